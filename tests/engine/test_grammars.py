"""A request of structured text waits for its grammar while others run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import CHECKED, Constraint
from kvik.core.types import EngineRequest, FinishReason, RequestDelta
from kvik.errors import CapacityError, ParamError

Make = Callable[..., "Waiting"]


class Waiting:
    """A loop whose grammars are built by the test."""

    def __init__(self, rig: Any) -> None:
        self.executor, self.clock, self.loop = rig.executor, rig.clock, rig.loop

    def add(self, name: str, grammar: str | None = None, **changes: object) -> Future[object]:
        built: Future[object] = Future()
        structured = None
        if grammar is not None:
            structured = Constraint(CHECKED, grammar)
            built = self.executor.grammars.setdefault(grammar, built)
        params = SamplingParams(max_tokens=3, structured=structured, n=changes.pop("n", 1))
        self.loop.add(replace(EngineRequest(name, [1, 2, 3], params), **changes))
        return built

    def steps(self, count: int) -> list[RequestDelta]:
        return [delta for _ in range(count) for delta in self.loop.step()]


@pytest.fixture
def make(rig: Callable[..., Any]) -> Callable[..., Waiting]:
    return lambda **scheduler: Waiting(rig(**scheduler))


def ended(deltas: list[RequestDelta]) -> dict[tuple[str, int], tuple[FinishReason, str | None]]:
    return {
        (delta.request_id, delta.index): (delta.finish_reason, delta.error)
        for delta in deltas
        if delta.finish_reason is not None
    }


def test_others_run_while_a_grammar_is_built(make: Make) -> None:
    rig = make()
    built = rig.add("waits", "g")
    rig.add("runs")
    assert ended(rig.steps(4)) == {("runs", 0): (FinishReason.LENGTH, None)}
    assert rig.loop.has_work and 0 < rig.loop.idle_seconds() < 0.1
    built.set_result(None)
    assert ended(rig.steps(4)) == {("waits", 0): (FinishReason.LENGTH, None)}
    assert not rig.loop.has_work and rig.loop.idle_seconds() is None


def test_a_grammar_that_is_built_delays_nothing(make: Make) -> None:
    rig = make()
    ready: Future[object] = Future()
    ready.set_result(None)
    rig.executor.grammars["g"] = ready
    rig.add("a", "g")
    assert rig.steps(1)[0].token_ids


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ParamError("structured", "needs a tokenizer"), "structured: needs a tokenizer"),
        (RuntimeError("out of stack"), "RuntimeError: out of stack"),
    ],
)
def test_a_grammar_that_cannot_be_built_ends_its_request_alone(
    make: Make, error: Exception, message: str
) -> None:
    rig = make()
    built = rig.add("bad", "g", n=2)
    rig.add("good")
    built.set_exception(error)
    assert ended(rig.steps(4)) == {
        ("bad", 0): (FinishReason.ERROR, message),
        ("bad", 1): (FinishReason.ERROR, message),
        ("good", 0): (FinishReason.LENGTH, None),
    }
    assert not rig.loop.has_work


def test_a_waiting_request_can_be_aborted_or_reach_its_deadline(make: Make) -> None:
    rig = make()
    first = rig.add("aborted", "g")
    rig.add("late", "h", deadline=rig.clock() + 5.0)
    rig.loop.end("aborted")
    assert first.cancelled()
    assert ended(rig.steps(1)) == {("aborted", 0): (FinishReason.ABORT, None)}
    rig.clock.now += 6.0
    assert ended(rig.steps(1)) == {("late", 0): (FinishReason.DEADLINE, None)}
    assert not rig.loop.has_work


def test_impossible_requests_are_refused_before_they_wait(make: Make) -> None:
    rig = make(max_queued_requests=2)
    rig.add("a", "g")
    with pytest.raises(ParamError, match="already being served"):
        rig.add("a", "g")
    with pytest.raises(ParamError, match="prompt"):
        rig.add("b", "g", prompt_token_ids=[])
    rig.add("c", "h")
    with pytest.raises(CapacityError, match="queue is full"):
        rig.add("d", "i")
    assert rig.steps(1) == [] and rig.loop.has_work
