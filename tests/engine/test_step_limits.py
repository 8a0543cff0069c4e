"""How long a step may take, told from those before."""

from __future__ import annotations

import pytest
from helpers.served_engine import FakeExecutor, tiny_config

from kvik.core.plan import SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.step_clock import StepClock
from kvik.core.types import EngineRequest
from kvik.engine.core import EngineCore
from kvik.engine.host import StepWatch, step_limit
from kvik.engine.loop import EngineLoop


@pytest.mark.parametrize(
    ("steps", "tokens", "limit"),
    [
        ([], 8, None),
        ([(8, 0.01)], 8, 30.0),
        ([(8, 1.6)], 5, 60.0),  # of one size: 32 s, rounded up
        ([(8, 1.6), (8, 0.1)], 8, 60.0),  # the slowest counts
        ([(8, 60.0), *[(8, 0.1)] * 64], 8, 30.0),  # of the last ones
        ([(1, 0.5)], 2048, 30720.0),  # as long as so many steps of one token
        ([(1, 0.5), (1024, 10.0)], 2048, 480.0),  # or as two of 1024
        ([(2048, 100.0)], 1, 1920.0 * 2),  # no longer than a larger one
        ([(2048, 100.0), (1, 0.5)], 1, 30.0),
    ],
)
def test_a_limit(steps: list[tuple[int, float]], tokens: int, limit: float | None) -> None:
    clock, now = StepClock(), 0.0
    for size, seconds in steps:
        clock.note(now, now + seconds, size, prefill=False)
        now += seconds
    slowest = clock.at_most(tokens)
    assert (None if slowest is None else step_limit(slowest)) == limit


def test_what_the_loop_computes_now_has_a_limit_of_its_size() -> None:
    """Under a clock of its own: a step takes a second for each of its tokens."""
    now = 100.0
    told: list[float] = []

    class Slow(FakeExecutor):
        def submit(self, plan: SchedulerOutput) -> object:
            nonlocal now
            now += plan.num_tokens
            return super().submit(plan)

    loop = EngineLoop(EngineCore(tiny_config()), Slow(), lambda: now)
    loop.watch(StepWatch(loop.core.scheduler, told.append))
    loop.add(EngineRequest("a", [1] * 40, SamplingParams(max_tokens=3, ignore_eos=True)))
    while loop.has_work:
        loop.step()
    # The prompt's step was the first. A step of one token is told from that, and then from its own.
    assert told == [960.0, 30.0]
