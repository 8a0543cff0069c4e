"""A snapshot of the engine's gauges and counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges hold at the time of the call, counters since the start; tokens unless said."""

    num_running: int  # requests
    num_waiting: int  # requests
    queued_tokens: int
    kv_usage: float  # share of blocks held by requests, 0 to 1
    num_blocks: int
    cached_blocks: int  # blocks whose content can be matched
    steps: int
    scheduled_tokens: int
    delivered_tokens: int
    preemptions: int  # times
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # and found there

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0
