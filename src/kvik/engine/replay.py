"""Replay of a recording: the same requests at the same steps must produce the same plans and
tokens.

The core gets the recorded inputs with their times, and the worker's clock returns the recorded
readings. So on the same machine every difference comes from the code, the weights or the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, RequestDelta
from kvik.engine.core import EngineCore
from kvik.engine.loop import Executor
from kvik.engine.recorder import (
    AdapterChanged,
    Added,
    CacheReset,
    Ended,
    Event,
    Failed,
    Finished,
    GaveBack,
    HandedOver,
    NothingPlanned,
    Planned,
    Stopped,
    output_digest,
    plan_digest,
)
from kvik.errors import GroupLost, KvikError
from kvik.spec.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a recording and its replay."""

    step: int  # the step that differs, or before which something differs
    request: str | None  # the request concerned; None: no single one
    what: str

    def __str__(self) -> str:
        whose = "" if self.request is None else f", request {self.request}"
        return f"step {self.step}{whose}: {self.what}"


@dataclass(slots=True)
class Replayed:
    """The result of a replay."""

    steps: int = 0  # replayed and found equal
    tokens: int = 0  # likewise
    requests: int = 0  # likewise
    failed_steps: int = 0  # steps that failed when they were recorded, and were not compared
    stopped: str | None = None  # why the recording ends; None: the engine died
    # Steps that were being computed at its end. They are computed again, in case one of them killed
    # the engine.
    unfinished: int = 0
    difference: Difference | None = None


class RecordedClock:
    """A clock that returns the recorded readings, one after the other."""

    def __init__(self, readings: Iterable[float]) -> None:
        self._readings = deque(readings)
        self._last = 0.0

    def load(self, readings: Iterable[float]) -> None:
        """Set the readings of the next step."""
        self._readings = deque(readings)

    def __call__(self) -> float:
        if self._readings:  # else the code reads the clock more often than when recorded
            self._last = self._readings.popleft()
        return self._last


def fetches(events: Iterable[Event]) -> list[EngineRequest]:
    """Return requests for the pages that another engine had, each with the tokens of such pages as
    its prompt. They are computed before the replay, see `keep_pages`."""
    requests: list[EngineRequest] = []
    for event in events:
        if isinstance(event, Added):
            request = event.request
            tokens = list(request.prompt_token_ids)
            parts = [(request.source, tokens)]
            parts += [(part.source, tokens + part.output_token_ids) for part in request.resumed]
            for source, known_tokens in parts:
                if source is not None:
                    requests.append(
                        EngineRequest(
                            f"{len(requests)}",
                            known_tokens[: source.num_tokens],
                            SamplingParams(
                                max_tokens=2,
                                temperature=0.0,
                                ignore_eos=True,
                                adapter=request.params.adapter,
                            ),
                            cache_salt=request.cache_salt,
                        )
                    )
    return requests


def keep_pages(core: EngineCore, executor: Executor, requests: Sequence[EngineRequest]) -> None:
    """Compute prompts one after the other, and keep all of their pages in the tier of `core`, also
    those that are partly filled."""
    for request in requests:
        with suppress(KvikError):  # it fills all that there is, so it was not fetched either
            core.add(request, 0.0)
        while core.has_requests or core.scheduler.has_moves:
            plan = core.plan(0.0)
            if plan is None:
                core.take_finished()
                continue
            if core.finish_step(executor.result(executor.submit(plan)), 0.0):
                core.hand_over(request.request_id, 0.0)
            core.take_finished()


class _Differs(Exception):
    """A difference. `step`: None: the first step whose result was not processed."""

    def __init__(self, request: str | None, difference: str, step: int | None = None) -> None:
        super().__init__(difference)
        self.request = request
        self.what = difference
        self.step = step


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan in flight, and the request of each row."""

    plan: SchedulerOutput
    rows: list[str]


class Replay:
    """Plays the events of a recording, up to the first difference."""

    def __init__(self, core: EngineCore, executor: Executor, clock: RecordedClock) -> None:
        """Prepare to play events.

        Args:
            executor: started; its worker reads `clock`.
        """
        self._core, self._executor, self._clock = core, executor, clock
        self._in_flight: deque[_Step] = deque()
        self._failed_pages: dict[int, list[int]] = {}  # by ticket
        self.result = Replayed()

    def run(self, events: Iterable[Event], progress: Callable[[int], None]) -> Replayed:
        """Play all events.

        Args:
            progress: called with the number of each step that was played.

        Raises:
            RecordError: the file is damaged.
            GroupLost: one of the processes that compute it again is gone.
        """
        for event in events:
            try:
                self._play(event)
            except _Differs as difference:
                step = self.result.steps if difference.step is None else difference.step
                self.result.difference = Difference(step, difference.request, difference.what)
                return self.result
            if isinstance(event, (Finished, Failed)):
                progress(self.result.steps)
        if self.result.stopped is None:
            self._compute_unfinished()
        return self.result

    def _play(self, event: Event) -> None:
        core = self._core
        match event:
            case Added():
                self._add(event)
            case Ended():
                core.end(
                    event.request_id,
                    event.now,
                    index=event.index,
                    reason=event.reason,
                    error=event.error,
                )
            case HandedOver():
                core.hand_over(event.request_id, event.now)
            case CacheReset():
                core.scheduler.reset_cache()
            case GaveBack():
                core.scheduler.kv.pool.give_back(event.count)
            case AdapterChanged(name, None):
                core.unload_adapter(name)
            case AdapterChanged(_, Adapter() as adapter, slot):
                self._executor.load_adapter(slot, adapter)
                core.load_adapter(adapter, slot)
            case Planned():
                core.take_finished()
                self._plan(event)
            case NothingPlanned():
                plan = core.plan(event.now)
                core.take_finished()
                if plan is not None:
                    raise _Differs(None, "a step is planned where there was none")
            case Finished():
                self._finish(event)
            case Failed():
                self._fail(event)
            case Stopped():
                self.result.stopped = event.reason

    def _add(self, event: Added) -> None:
        request_id = event.request.request_id
        self._core.take_finished()
        try:
            seed = self._core.add(event.request, event.now)
        except KvikError as error:
            raise _Differs(request_id, f"it is refused, and was not before ({error})") from None
        if seed != event.seed:
            raise _Differs(request_id, f"its seed is {seed}, and was {event.seed}")
        self.result.requests += 1

    def _plan(self, event: Planned) -> None:
        plan = self._core.plan(event.now)
        if plan is None:
            raise _Differs(None, "no step is planned where one was")
        owners = {r.slot: f"{r.request_id}/{r.index}" for r in self._core.scheduler.running}
        step = _Step(plan, [owners[slot] for slot in plan.slots])
        where = _where_plans_differ(step, event)
        if where is not None:
            raise _Differs(*where, plan.step)
        self._in_flight.append(step)

    def _finish(self, event: Finished) -> None:
        step = self._oldest()
        self._clock.load(event.readings)
        try:
            output = self._executor.result(self._executor.submit(step.plan))
        except GroupLost:
            raise  # it happened now, and says nothing about the recording
        except Exception as error:
            raise _Differs(
                None, f"it fails, and did not before: {type(error).__name__}: {error}"
            ) from error
        _compare(step, output, event)
        self._compare_moves(output, event)
        self._in_flight.popleft()
        output = replace(output, moved=event.moved)  # so moves take effect when they did then
        self._take(self._core.finish_step(output, event.now))

    def _compare_moves(self, output: ModelRunnerOutput, event: Finished) -> None:
        """Check that pages loaded when recorded were loaded again. A replay loads at once, so they
        may come earlier."""
        failed = self._failed_pages
        failed.update(output.moved.loaded if output.moved is not None else ())
        for ticket, recorded in () if event.moved is None else event.moved.loaded:
            if not set(failed.pop(ticket, ())) <= set(recorded):
                raise _Differs(None, "a page that was loaded is no longer in its tier")

    def _fail(self, event: Failed) -> None:
        """Replay a failed step. Its cause may have been external, so it need not fail again."""
        step = self._oldest()
        self._clock.load(event.readings)
        with suppress(Exception):  # as it did then
            self._executor.result(self._executor.submit(step.plan))
        self._in_flight.popleft()
        self.result.failed_steps += 1
        self._take(self._core.fail_step(event.error, event.now))

    def _compute_unfinished(self) -> None:
        self._clock.load(())
        self.result.unfinished = len(self._in_flight)
        for step in self._in_flight:
            with suppress(Exception):
                self._executor.result(self._executor.submit(step.plan))

    def _oldest(self) -> _Step:
        if not self._in_flight:
            raise _Differs(None, "a result is recorded of a step that was not planned")
        return self._in_flight[0]

    def _take(self, deltas: Iterable[RequestDelta]) -> None:
        self.result.steps += 1
        self.result.tokens += sum(len(delta.token_ids) for delta in deltas)


def _where_plans_differ(step: _Step, event: Planned) -> tuple[str | None, str] | None:
    """Return the request whose row differs (None if no single row) and how; None: the plans are
    equal."""
    plan = step.plan
    if plan.step != event.step:
        return None, f"it is planned where step {event.step} was"
    if plan.slots != event.slots:
        for row, slot in enumerate(plan.slots):
            if event.slots[row : row + 1] != [slot]:
                return step.rows[row], f"row {row} of the plan is its own, and was not"
        return None, f"the plan has {len(plan.slots)} rows, and had {len(event.slots)}"
    pairs = zip(plan.num_scheduled_tokens, event.num_scheduled_tokens, strict=True)
    for row, (planned, recorded) in enumerate(pairs):
        if planned != recorded:
            return step.rows[row], f"it gets {planned} tokens, and got {recorded}"
    if plan_digest(plan) != event.digest:
        return None, "the plan has the same rows, and differs in blocks or in new requests"
    return None


def _compare(step: _Step, output: ModelRunnerOutput, event: Finished) -> None:
    if output.step != event.step:
        raise _Differs(None, f"it is computed where step {event.step} was")
    errors = [output.errors.get(row) for row in range(len(step.rows))]
    for row, (request, error) in enumerate(zip(step.rows, errors, strict=True)):
        if error != event.errors.get(row):
            raise _Differs(request, f"its error is {error}, and was {event.errors.get(row)}")
    if len(event.token_ids) != len(step.rows):
        raise _Differs(None, f"it has {len(step.rows)} rows, and had {len(event.token_ids)}")
    for request, computed, recorded in zip(
        step.rows, output.token_ids, event.token_ids, strict=True
    ):
        if computed != recorded:
            raise _Differs(request, f"the tokens are {computed}, and were {recorded}")
    if output.num_draft_tokens != event.num_draft_tokens:
        drafts = f"{output.num_draft_tokens}, and were {event.num_draft_tokens}"
        raise _Differs(None, f"the numbers of drafts are {drafts}")
    if output_digest(output) != event.digest:
        raise _Differs(None, "log probabilities or vectors differ, and tokens do not")
