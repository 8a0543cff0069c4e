"""A snapshot of the engine's gauges and counters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import Any, TypeVar

from kvik.core.moves import MoveCounters
from kvik.core.plan import DISK, GraphCounts
from kvik.core.types import DraftCounts
from kvik.core.work import Work

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoopTime:
    """How the step loop spent its time, in seconds since it was made; each second counts once, even
    with several steps in flight."""

    executor: float = 0.0  # the loop waited for the executor: to take a step, or for its result
    # It planned and processed results, or its caller worked between steps, e.g. on text.
    host: float = 0.0
    idle: float = 0.0  # there was nothing to do, or a policy waited for more requests

    @property
    def busy(self) -> float:
        return self.executor + self.host

    def since(self, earlier: LoopTime) -> LoopTime:
        """Return the time since an earlier reading."""
        return LoopTime(
            self.executor - earlier.executor, self.host - earlier.host, self.idle - earlier.idle
        )


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Results of speculation, as totals since the start. A row is one request's part of a step."""

    drafts: DraftCounts  # how many were computed and accepted, by place
    proposing: float = 0.0  # seconds spent making drafts; see `DraftTimes`
    seconds: float = 0.0  # of all requests with speculation; see `RequestSpeculation`
    plain_seconds: float = 0.0  # likewise

    @property
    def speedup(self) -> float | None:
        """Estimated speedup over decoding without drafts, from the steps that had none; None before
        there is an estimate."""
        return self.plain_seconds / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class SpeedStats:
    """Means of the last steps, from the scheduler's `StepClock`; None: nothing was measured yet."""

    seconds_per_step: float | None = None  # of any step
    # Of steps with chunks of prompts, all their tokens counted.
    prefill_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in pages unless noted."""

    name: str  # memory or disk; peer: other engines, of which only loads are counted
    pages: int  # number that can be loaded
    bytes: int  # their size, out of `capacity`
    capacity: int
    stored: int  # total since the start
    loaded: int  # likewise
    failed: int  # likewise, of loads
    evicted: int  # likewise
    bytes_per_second: float | None  # of recent loads; None: there were none


@dataclass(frozen=True, slots=True)
class MoveStats:
    """Moves between the KV cache and its tiers, as totals since the start."""

    tiers: tuple[TierStats, ...]
    totals: MoveCounters  # see `MoveCounters`
    off: str = ""  # why the disk tier was turned off; "": it was not
    leases: int = 0  # number of leases under which prompts are kept for other engines


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges at the time of the call, and counters since the start; in tokens unless noted."""

    num_running: int = 0  # requests
    num_waiting: int = 0  # requests
    queued_tokens: int = 0
    kv_usage: float = 0.0  # share of blocks held by requests, 0 to 1
    num_blocks: int = 0
    cached_blocks: int = 0  # blocks whose content can be matched
    steps: int = 0
    scheduled_tokens: int = 0
    delivered_tokens: int = 0
    preemptions: int = 0  # times
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # and found there
    step_sizes: Sequence[int] = ()  # [i] steps of more than 2^(i - 1) and up to 2^i tokens
    work: Work = field(default_factory=Work)
    time: LoopTime = field(default_factory=LoopTime)
    speculation: SpeculationStats | None = None  # None: off
    speed: SpeedStats = field(default_factory=SpeedStats)
    peak_blocks: int = 0  # most that requests held at a time, since the start
    # Tokens that the blocks of running requests have room for, and tokens in them. A block counts
    # once per request that shares it.
    kv_allocated_tokens: int = 0
    kv_used_tokens: int = 0
    rows: int = 0  # requests summed over steps; rows / steps is the mean batch size
    pinned_blocks: int = 0  # kept in the prefix cache for a time, used or not
    given_back_blocks: int = 0  # whose memory was given back because the system was short of it
    # At the end of the last step; None: nothing is captured on this device, or not reported yet.
    graphs: GraphCounts | None = None
    # Threads of the native kernels; None: other kernels, or no step was computed yet.
    threads: int | None = None
    moves: MoveStats | None = None  # None: the KV cache has no tiers

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


def counters_of(stats: EngineStats) -> EngineStats:
    """Return what remains of an engine that has ended: its counters. Gauges are zero."""
    moves = stats.moves
    if moves is not None:
        empty: dict[str, Any] = {"pages": 0, "bytes": 0, "capacity": 0, "bytes_per_second": None}
        moves = MoveStats(tuple(replace(tier, **empty) for tier in moves.tiers), moves.totals)
    return replace(
        stats,
        num_running=0,
        num_waiting=0,
        queued_tokens=0,
        kv_usage=0.0,
        num_blocks=0,
        cached_blocks=0,
        speed=SpeedStats(),
        peak_blocks=0,
        kv_allocated_tokens=0,
        kv_used_tokens=0,
        pinned_blocks=0,
        graphs=None,
        threads=None,
        moves=moves,
    )


def sum_stats(all_stats: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of several engines as if they were one: sums, shares averaged by their
    blocks, and step times averaged by their steps."""
    if len(all_stats) == 1:
        return all_stats[0]
    total = _sum([replace(stats, moves=None) for stats in all_stats])
    used = sum(stats.kv_usage * stats.num_blocks for stats in all_stats)
    timed = [stats for stats in all_stats if stats.speed.seconds_per_step is not None]
    seconds = sum((stats.speed.seconds_per_step or 0.0) * stats.steps for stats in timed)
    steps = max(1, sum(stats.steps for stats in timed))
    return replace(
        total,
        kv_usage=used / max(1, total.num_blocks),
        speed=replace(total.speed, seconds_per_step=seconds / steps if timed else None),
        moves=_sum_moves([stats.moves for stats in all_stats if stats.moves is not None]),
    )


def _sum_moves(parts: Sequence[MoveStats]) -> MoveStats | None:
    if not parts:
        return None
    tiers: dict[str, list[TierStats]] = {}
    for tier in (tier for part in parts for tier in part.tiers):
        tiers.setdefault(tier.name, []).append(tier)
    return MoveStats(
        tuple(map(_sum_tiers, tiers.values())),
        _sum([part.totals for part in parts]),
        next((part.off for part in parts if part.off), ""),
        sum(part.leases for part in parts),
    )


def _sum_tiers(parts: Sequence[TierStats]) -> TierStats:
    """Add the tiers of one name. Engines share the pages on disk, so these count once."""
    rates = [tier.bytes_per_second for tier in parts if tier.bytes_per_second is not None]
    mean = sum(rates) / len(rates) if rates else None
    total = replace(_sum(parts), name=parts[0].name, bytes_per_second=mean)
    if total.name == DISK:
        shared = ("pages", "bytes", "capacity")
        total = replace(total, **{name: max(getattr(t, name) for t in parts) for name in shared})
    return total


def _sum(parts: Sequence[T]) -> T:
    """Add dataclasses, field by field."""
    kind = type(parts[0])
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(*(_add(getattr(part, name) for part in parts) for name in names))


def _add(values: Iterable[Any]) -> Any:
    """Add values that are not None: dataclasses, or tuples and lists of numbers place by place, or
    anything else that can be added. Without any, return None."""
    items = [value for value in values if value is not None]
    if not items:
        return None
    if isinstance(items[0], (list, tuple)):
        return type(items[0])(map(sum, zip_longest(*items, fillvalue=0)))
    return _sum(items) if is_dataclass(items[0]) else reduce(operator.add, items)
