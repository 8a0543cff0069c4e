"""A snapshot of the engine's gauges and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvik.core.plan import GraphCounts
from kvik.core.types import DraftCounts
from kvik.core.work import Work


@dataclass(frozen=True, slots=True)
class LoopTime:
    """How the step loop spent its time, in seconds since it was made; each second counts once,
    however many steps are in flight.

    Attributes:
        executor: the loop waited for the executor: to take a step, or for its result.
        host: it planned and took in results, or its caller worked between steps, as on text.
        idle: there was nothing to do, or a policy waited for more requests.
    """

    executor: float = 0.0
    host: float = 0.0
    idle: float = 0.0

    @property
    def busy(self) -> float:
        return self.executor + self.host

    def since(self, earlier: LoopTime) -> LoopTime:
        """Return what passed after an earlier reading."""
        return LoopTime(
            self.executor - earlier.executor, self.host - earlier.host, self.idle - earlier.idle
        )


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Results of speculation, as totals since the start. A row is one request's part of a step.

    Attributes:
        drafts: how many were computed and accepted, by place.
        proposing: seconds of making drafts; see `DraftTimes`.
        seconds, plain_seconds: of all requests with speculation; see `RequestSpeculation`.
    """

    drafts: DraftCounts
    proposing: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def speedup(self) -> float | None:
        """How much faster tokens came than without drafts, as estimated from the steps that had
        none; None before there is an estimate."""
        return self.plain_seconds / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class PaceStats:
    """Means of the last steps, from the scheduler's `StepClock`; None: nothing was measured yet.

    Attributes:
        seconds_per_step: of any step.
        prefill_tokens_per_second: of steps with chunks of prompts, all their tokens counted.
    """

    seconds_per_step: float | None = None
    prefill_tokens_per_second: float | None = None


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
    step_sizes: tuple[int, ...] = ()  # [i] steps of more than 2^(i - 1) and up to 2^i tokens
    work: Work = field(default_factory=Work)
    time: LoopTime = field(default_factory=LoopTime)
    speculation: SpeculationStats | None = None  # None: off
    pace: PaceStats = field(default_factory=PaceStats)
    peak_blocks: int = 0  # most that requests held at a time, since the start
    # That the blocks of running requests have room for, and that are in them; groups of layers and
    # requests that share a block count it each.
    kv_allocated_tokens: int = 0
    kv_used_tokens: int = 0
    rows: int = 0  # requests of all steps; rows / steps is the mean batch size
    pinned_blocks: int = 0  # kept in the prefix cache for a time, used or not
    given_back_blocks: int = 0  # whose memory the system got back, while it was short of it
    # When the last step was finished; None: nothing is captured on this device, or was told yet.
    graphs: GraphCounts | None = None
    # That the native kernels compute on; None: other kernels, or no step was computed yet.
    threads: int | None = None

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0
