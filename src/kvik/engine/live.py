"""The current state of the engine, for display: KV blocks, steps, the queue, requests over time.

It contains neither the text of a request nor its tenant: requests are identified only by number.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum

from kvik.core.block_pool import BlockPool
from kvik.core.types import Request, RequestDelta, RequestReport
from kvik.engine.core import EngineCore
from kvik.engine.stats import EngineStats, sum_stats

MAX_CELLS = 4096  # of the map of blocks
MAX_LOOKED_AT = 1 << 16  # blocks of requests examined to draw the map
MAX_STEPS = 200
MAX_RUNNING, MAX_WAITING, MAX_FINISHED = 256, 32, 64  # requests in a view
RATE_SECONDS = 2.0


class BlockState(IntEnum):
    """A cell of the map; `OWNED + i`: only `running[i]` holds the block."""

    FREE = 0
    CACHED = 1  # free, and its content can be matched
    SHARED = 2  # held by several requests, or by one that is not in the view
    PINNED = 3  # held by no request, and pinned
    OWNED = 4


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"  # waits again
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A map of the KV blocks."""

    num_blocks: int  # of the cache
    # 1 up to `MAX_CELLS` blocks; beyond, a cell shows a sample of its blocks, and a held block
    # takes precedence over a free one.
    blocks_per_cell: int
    num_free: int  # blocks that no request holds, those with content included
    num_cached: int  # blocks, free or held, whose content can be matched
    cells: bytes  # 16 bits each, the lower 8 first: a `BlockState`, or more for an owner


@dataclass(frozen=True, slots=True)
class Steps:
    """The last steps, oldest first, in columns."""

    first: int = 0  # number of the first step
    ended: tuple[float, ...] = ()  # times of their ends on the engine's clock
    seconds: tuple[float, ...] = ()  # their durations, planning included
    prefill_tokens: tuple[int, ...] = ()  # computed tokens
    decode_tokens: tuple[int, ...] = ()  # computed tokens, drafts included
    running: tuple[int, ...] = ()  # requests after the step
    waiting: tuple[int, ...] = ()  # likewise
    preemptions: tuple[int, ...] = ()  # during the step

    def after(self, number: int) -> Steps:
        """Return the steps after the first `number` steps of the engine."""
        drop = max(0, number - self.first)
        columns = (getattr(self, field.name)[drop:] for field in fields(self)[1:])
        return Steps(self.first + drop, *columns)


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """The times of a request, in seconds of the engine's clock; None: not yet."""

    number: int  # in order of arrival, since the engine started; n completions have n numbers
    phase: Phase
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    computed: int  # tokens of prompt and output whose K/V is written, or is being written
    blocks: int  # held by the request, shared ones included
    preemptions: int
    finish_reason: str | None = None  # None until it has finished


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second, over the last `RATE_SECONDS`, or fewer if older steps were dropped."""

    steps: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class LiveView:
    """The state of the engine at one time."""

    now: float  # on the engine's clock
    stats: EngineStats
    rates: Rates
    blocks: BlockMap
    steps: Steps
    running: tuple[LiveRequest, ...] = ()  # with a slot, in order of service, at most `MAX_RUNNING`
    # First of the queue, at most `MAX_WAITING`; `stats.num_waiting` counts all.
    waiting: tuple[LiveRequest, ...] = ()
    finished: tuple[LiveRequest, ...] = ()  # last to finish, oldest first, at most `MAX_FINISHED`

    def after(self, earlier: LiveView) -> LiveView:
        """Return this view without the steps and finished requests of an earlier view."""
        seen = earlier.steps.first + len(earlier.steps.ended)
        sent = {request.number for request in earlier.finished}
        return replace(
            self,
            steps=self.steps.after(seen),
            finished=tuple(r for r in self.finished if r.number not in sent),
        )


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """The state of one of several engines."""

    number: int  # counted from 0
    state: str  # see `EngineState`
    reason: str  # likewise; "" if it is ready
    draining: bool  # it gets no more requests
    starts: int  # how often it became ready
    unfinished: int  # requests that were sent to it
    stats: EngineStats | None = None  # None: it does not respond now
    rates: Rates | None = None  # likewise


def merge_views(views: Sequence[LiveView]) -> LiveView:
    """Merge the states of several engines into one.

    Requests are renumbered; steps are in the order in which they ended.
    """
    if len(views) == 1:
        return views[0]
    count = len(views)
    rows = [
        row
        for view in views
        for row in zip(*(getattr(view.steps, field.name) for field in _COLUMNS), strict=True)
    ]
    rows = sorted(rows)[-MAX_STEPS:]
    total = sum(view.steps.first + len(view.steps.ended) for view in views)
    requests = {
        name: [
            replace(request, number=request.number * count + i)
            for i, view in enumerate(views)
            for request in getattr(view, name)
        ]
        for name in ("running", "waiting", "finished")
    }
    requests["finished"].sort(key=lambda request: request.finished or 0.0)
    return LiveView(
        now=max(view.now for view in views),
        stats=sum_stats([view.stats for view in views]),
        rates=Rates(
            *(sum(getattr(view.rates, field.name) for view in views) for field in fields(Rates))
        ),
        blocks=_merge_maps(views),
        steps=Steps(total - len(rows), *(zip(*rows, strict=True) if rows else ())),
        running=tuple(requests["running"]),
        waiting=tuple(requests["waiting"][:MAX_WAITING]),
        finished=tuple(requests["finished"][-MAX_FINISHED:]),
    )


def _merge_maps(views: Sequence[LiveView]) -> BlockMap:
    """Return one map of all blocks, with at most `MAX_CELLS` cells."""
    cells, owners = array("H"), 0
    for view in views:
        mine = array("H")
        mine.frombytes(view.blocks.cells)
        if sys.byteorder == "big":
            mine.byteswap()
        cells.extend(cell + owners if cell >= BlockState.OWNED else cell for cell in mine)
        owners += len(view.running)
    every = max(1, -(-len(cells) // MAX_CELLS))
    cells = cells[::every]
    if sys.byteorder == "big":
        cells.byteswap()
    maps = [view.blocks for view in views]
    return BlockMap(
        sum(part.num_blocks for part in maps),
        every * max(part.blocks_per_cell for part in maps),
        sum(part.num_free for part in maps),
        sum(part.num_cached for part in maps),
        cells.tobytes(),
    )


_COLUMNS = fields(Steps)[1:]


class LiveCollector:
    """Collects the state of a core. `step` costs a few microseconds, `view` well under a
    millisecond for most caches."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._steps: deque[tuple[float, float, int, int, int, int, int]] = deque(maxlen=MAX_STEPS)
        self._finished: deque[LiveRequest] = deque(maxlen=MAX_FINISHED)
        self._num_steps = self._scheduled = self._prefilled = self._preemptions = 0

    def step(self, began: float, ended: float, deltas: Iterable[RequestDelta]) -> None:
        """Record one iteration of the step loop and its deltas."""
        for delta in deltas:
            report = delta.report
            if report is not None:
                self._finished.append(_finished(delta, report))
        scheduler = self._core.scheduler
        counters, prefilled = scheduler.counters, scheduler.meter.total.prefill_tokens
        if counters.steps == self._num_steps:
            return
        prefill = prefilled - self._prefilled
        self._steps.append(
            (
                ended,
                ended - began,
                prefill,
                counters.scheduled_tokens - self._scheduled - prefill,
                len(scheduler.running),
                len(scheduler.waiting),
                counters.preemptions - self._preemptions,
            )
        )
        self._num_steps = counters.steps
        self._scheduled, self._prefilled = counters.scheduled_tokens, prefilled
        self._preemptions = counters.preemptions

    def view(self, now: float, stats: EngineStats) -> LiveView:
        """Return the state at `now`; `stats` must be of the same time."""
        scheduler = self._core.scheduler
        running = scheduler.running[:MAX_RUNNING]
        waiting = scheduler.waiting.snapshot()[:MAX_WAITING]
        columns = zip(*self._steps, strict=True) if self._steps else ()
        return LiveView(
            now=now,
            stats=stats,
            rates=self._rates(now),
            blocks=block_map(scheduler.kv.pool, [r.block_ids for r in running]),
            steps=Steps(self._num_steps - len(self._steps), *columns),
            running=tuple(_live(request) for request in running),
            waiting=tuple(_live(request) for request in waiting),
            finished=tuple(self._finished),
        )

    def _rates(self, now: float) -> Rates:
        since = now - RATE_SECONDS
        recent = [step for step in self._steps if step[0] > since]
        if not recent:
            return Rates()
        if len(recent) == MAX_STEPS:  # earlier steps were dropped
            since = recent[0][0] - recent[0][1]
        seconds = max(now - since, 1e-6)
        return Rates(
            len(recent) / seconds,
            sum(step[2] for step in recent) / seconds,
            sum(step[3] for step in recent) / seconds,
        )


def block_map(
    pool: BlockPool, tables: Sequence[Sequence[Sequence[int]]], max_cells: int = MAX_CELLS
) -> BlockMap:
    """Draw a map of the blocks.

    Args:
        tables: of each request, its blocks by KV group.
    """
    every = max(1, -(-pool.num_blocks // max_cells))
    references, cached, pinned = pool.sample(every)
    cells = array("H", bytes(2 * len(references)))
    for cell, (count, is_cached, is_pinned) in enumerate(
        zip(references, cached, pinned, strict=True)
    ):
        if count:
            cells[cell] = BlockState.SHARED
        elif is_cached:
            cells[cell] = BlockState.PINNED if is_pinned else BlockState.CACHED
    num_held = sum(len(table) for groups in tables for table in groups)
    stride = max(1, num_held // MAX_LOOKED_AT)
    for owner, groups in enumerate(tables, BlockState.OWNED):
        for table in groups:
            for block in table[::stride]:
                # never true of the null block, which has no cell
                if pool.ref_counts[block] == 1:
                    cells[(block - 1) // every] = owner
    if sys.byteorder == "big":
        cells.byteswap()
    return BlockMap(pool.num_blocks, every, pool.num_free, pool.num_cached, cells.tobytes())


def _live(request: Request) -> LiveRequest:
    if not request.block_ids:
        phase = Phase.PREEMPTED if request.num_preemptions else Phase.WAITING
    elif request.first_token is None or request.num_computed_tokens < len(request.token_ids) - 1:
        phase = Phase.PREFILL
    else:
        phase = Phase.DECODE
    blocks = sum(len(ids) - ids.count(0) for ids in request.block_ids)
    return _view_of(request, phase, request.num_computed_tokens, blocks)


def _finished(delta: RequestDelta, report: RequestReport) -> LiveRequest:
    return replace(
        _view_of(report, Phase.FINISHED, report.num_prompt_tokens + report.num_output_tokens, 0),
        finished=report.finished,
        finish_reason=delta.finish_reason and delta.finish_reason.value,
    )


def _view_of(
    request: Request | RequestReport, phase: Phase, computed: int, blocks: int
) -> LiveRequest:
    return LiveRequest(
        number=request.serial,
        phase=phase,
        arrival=request.arrival,
        first_scheduled=request.first_scheduled,
        first_token=request.first_token,
        finished=None,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        cached_tokens=request.num_cached_tokens,
        computed=computed,
        blocks=blocks,
        preemptions=request.num_preemptions,
    )
