"""The step loop's accounting of time counts each second once, with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers.faults import raising

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest
from kvik.engine.loop import EngineLoop
from kvik.engine.stats import LoopTime


@dataclass
class Timed:
    """Takes `submit` seconds to submit a step, and has its result `compute` seconds after that and
    after the previous step."""

    clock: Any
    depth: int
    submit_seconds: float
    compute: float
    ready: float = 0.0
    fails: bool = False
    in_turn: bool = False
    lost: str = ""
    results: dict[int, float] = field(default_factory=dict)

    def submit(self, plan: SchedulerOutput) -> object:
        self.clock.now += self.submit_seconds
        self.ready = max(self.ready, self.clock.now) + self.compute
        self.results[plan.step] = self.ready
        return ModelRunnerOutput(plan.step, [[1] if s else [] for s in plan.samples])

    def result(self, handle: object) -> ModelRunnerOutput:
        self.clock.now = max(self.clock.now, self.results[handle.step])
        if self.fails:
            raise RuntimeError("broken")
        return handle

    def idle_step(self) -> bool:
        return False

    def stop(self) -> None: ...


Make = Callable[..., tuple[EngineLoop, Any]]


@pytest.fixture
def make(rig: Callable[..., Any]) -> Make:
    def loop(depth: int, submit: float, compute: float, **scheduler: object) -> Any:
        engine = rig(depth, **scheduler)
        executor = Timed(engine.clock, depth, submit, compute)
        return EngineLoop(engine.core, executor, engine.clock), engine.clock

    return loop


def ask(loop: EngineLoop, tokens: int = 4) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    loop.core.add(EngineRequest("a", [1, 2, 3], params), loop.clock())


def drain(loop: EngineLoop, clock: Any, between: float) -> None:
    """Step to the end; the caller spends `between` seconds after each step."""
    while loop.has_work:
        loop.step()
        clock.now += between


def test_one_step_at_a_time(make: Make) -> None:
    loop, clock = make(1, submit=2.0, compute=5.0)
    clock.now += 100.0  # without requests
    ask(loop)
    drain(loop, clock, between=0.5)
    clock.now += 30.0
    # The last half second counts for no work.
    assert loop.stats().time == LoopTime(executor=4 * 7.0, host=3 * 0.5, idle=130.5)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("submit", "compute"), [(0.0, 4.0), (1.0, 2.0), (3.0, 0.0)])
def test_steps_in_flight_are_not_counted_twice(
    make: Make, depth: int, submit: float, compute: float
) -> None:
    loop, clock = make(depth, submit, compute)
    started = clock.now
    ask(loop, 20)
    drain(loop, clock, between=1.0)
    time = loop.stats().time
    assert time.executor + time.host + time.idle == pytest.approx(clock.now - started)
    assert time.executor >= 20 * submit


def test_a_slow_host_overlaps_with_steps_in_flight(make: Make) -> None:
    """With two steps in flight the executor works while the host does, so that waits are short."""
    for depth, waited in ((1, 20 * 4.0), (2, 20 * 3.0 + 1.0)):
        loop, clock = make(depth, submit=0.0, compute=4.0)
        ask(loop, 20)
        drain(loop, clock, between=1.0)
        assert loop.stats().time.executor == pytest.approx(waited, abs=4.0), depth


def test_time_of_a_failed_step_counts(make: Make) -> None:
    loop, clock = make(1, submit=0.0, compute=5.0)
    loop.executor.fails = True
    ask(loop)
    drain(loop, clock, between=0.0)
    assert loop.stats().time.executor == 5.0


def test_time_in_which_a_dynamic_batch_waits_is_idle(make: Make) -> None:
    loop, clock = make(1, submit=0.0, compute=5.0, policy="dynamic", batch_size=4, max_wait=3.0)
    loop.add(EngineRequest("a", [1, 2], SamplingParams(max_tokens=1)))
    while loop.has_work:
        loop.poll(sleep=clock.sleep)
    assert loop.stats().time == LoopTime(executor=5.0, host=0.0, idle=3.0)


def test_a_batch_that_waits_without_limit_does_not_spin(make: Make) -> None:
    loop, clock = make(1, submit=0.0, compute=5.0, policy="static", batch_size=2, max_wait=0.0)
    loop.add(EngineRequest("a", [1, 2], SamplingParams(max_tokens=1)))
    assert loop.poll(2.0, clock.sleep) == [] and loop.idle_seconds() is None
    assert loop.stats().time == LoopTime(idle=2.0)
    loop.core.scheduler.more_expected = False
    while loop.has_work:
        loop.poll(2.0, clock.sleep)
    assert loop.stats().time == LoopTime(executor=5.0, idle=2.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_begin_when_all_running_ones_end_at_once(make: Make, depth: int) -> None:
    loop, clock = make(depth, submit=0.0, compute=5.0, max_num_seqs=2)
    began = clock.now
    for name in "abcdef":
        params = SamplingParams(max_tokens=1)
        loop.core.add(EngineRequest(name, [1, 2], params, deadline=1000.0), clock.now)
    loop.step()
    while loop.has_work:
        assert loop.idle_seconds() == 0.0
        loop.step()
    assert clock.now - began == 15.0


def test_reading_the_time_does_not_change_it(make: Make) -> None:
    loop, clock = make(1, submit=0.0, compute=5.0)
    ask(loop)
    loop.step()
    clock.now += 2.0
    first = loop.stats().time
    assert loop.stats().time == first == LoopTime(executor=5.0, host=2.0)
    clock.now += 1.0
    assert loop.stats().time.since(first) == LoopTime(host=1.0)


def test_the_executor_rests_only_without_requests(make: Make) -> None:
    loop, clock = make(1, submit=0.0, compute=5.0, policy="dynamic", batch_size=4, max_wait=3.0)
    left = 2

    def idle_step() -> bool:
        nonlocal left
        left -= 1
        return left > 0

    loop.executor.idle_step = idle_step
    ask(loop, tokens=2)
    assert not loop.idle_step() and loop.idle_seconds() == 3.0  # it waits for more requests
    clock.now += 3.0
    while loop.has_work:
        loop.step()
        assert not loop.has_work or not loop.idle_step()
    assert left == 2 and loop.idle_step() and not loop.idle_step() and left == 0


@dataclass
class InTurn(Timed):
    """An executor whose steps need the results of the previous ones."""

    in_turn: bool = True
    known: int = -1

    def submit(self, plan: SchedulerOutput) -> object:
        assert self.known == plan.step - 1
        return super().submit(plan)

    def result(self, handle: object) -> ModelRunnerOutput:
        output = super().result(handle)
        self.known = output.step
        return output


def test_deltas_are_delivered_while_the_next_step_runs(rig: Callable[..., Any]) -> None:
    """A result is known before the next step is planned, and delivered when that step runs."""
    engine = rig(2)
    executor = InTurn(engine.clock, 2, 0.0, 4.0)
    executor.known = engine.core.scheduler.counters.steps - 1
    loop, clock = EngineLoop(engine.core, executor, engine.clock), engine.clock
    ask(loop, 20)
    tokens: list[int] = []
    while loop.has_work:
        tokens.append(sum(len(delta.token_ids) for delta in loop.step()))
        clock.now += 1.0  # time to serve readers
    assert tokens == [0] + [1] * 20
    # All of it except the last second overlapped with a step.
    assert loop.stats().time.executor == pytest.approx(4.0 * 20 - 20 * 1.0)


def test_deltas_are_not_lost_when_the_next_step_is_interrupted(rig: Any) -> None:
    engine = rig(2)
    executor = InTurn(engine.clock, 2, 0.0, 4.0)
    loop = EngineLoop(engine.core, executor, engine.clock)
    ask(loop, 3)
    loop.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "submit", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    assert loop.has_work
    deltas = []
    while loop.has_work:
        deltas += loop.step()
    assert [list(delta.token_ids) for delta in deltas if delta.token_ids] == [[1]]
    assert deltas[-1].error is not None and "interrupted" in deltas[-1].error
