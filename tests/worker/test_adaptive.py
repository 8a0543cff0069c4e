"""Drafts never cost time: engine runs of which only the times are simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from kvik.worker.adaptive import FIRST, LEAST, SHARE, DraftControl, LossBudget, StepFigures

DRAFTS = 5  # per request, at most

Noise = Callable[[np.random.Generator], float]
Acceptance = Callable[[int, int, int], float]  # step, request, position -> share
JUDGING: dict[str, Callable[[int, int], float]] = {  # requests, drafts -> time of a step
    "memory-bound": lambda requests, drafts: 1 + 0.02 * drafts,
    "compute-bound": lambda requests, drafts: (requests + drafts) / requests,
    "ridge": lambda requests, drafts: max(1.0, (requests + drafts) / 8) + 0.01 * drafts,
    "jump": lambda requests, drafts: 1.5 + 0.02 * drafts if drafts else 1.0,
}
MAKING = {"lookup": 0.0001, "small model": 0.05, "large model": 0.2}  # per draft in depth
ACCEPTANCE: dict[str, Acceptance] = {
    "never": lambda step, request, position: 0.0,
    "low": lambda step, request, position: 0.3,
    "good": lambda step, request, position: 0.8,
    "always": lambda step, request, position: 1.0,
    "dropping": lambda step, request, position: 0.9 if step < 100 else 0.05,
    "rising": lambda step, request, position: 0.05 if step < 200 else 0.9,
    "alternating": lambda step, request, position: 0.9 if step // 50 % 2 == 0 else 0.0,
    "alternating fast": lambda step, request, position: 0.95 if step // 7 % 2 == 0 else 0.0,
    "one of two": lambda step, request, position: 0.9 if request % 2 else 0.05,
    "short runs": lambda step, request, position: 0.9 if position < 2 else 0.05,
}


def busy(rng: np.random.Generator) -> float:
    """Return noise of a busy machine: any step may take 1.5 times as long, some ten times."""
    return float(np.exp(0.3 * rng.standard_normal())) * (10.0 if rng.random() < 0.01 else 1.0)


@dataclass
class Run:
    """The result of a run.

    Attributes:
        speed_up: over the same tokens without drafts.
        drafts: of each step and request.
    """

    speed_up: float
    drafts: np.ndarray


def run(
    requests: int,
    acceptance: Acceptance,
    judging: Callable[[int, int], float],
    making: float,
    steps: int = 400,
    fixed: int | None = None,
    lookup: bool = False,
    noise: Noise = lambda rng: 1.0,
    found: float = 1.0,
    deciding: float = 0.0,
    seed: int = 0,
) -> Run:
    """Simulate steps under draft control.

    Args:
        fixed: drafts of each request, without control.
        making: time per draft in depth, or of a lookup for all; in plain steps.
        noise: measured over actual time.
        found: probability that the drafter has drafts.
        deciding: time of the decision, in plain steps.
    """
    rng = np.random.default_rng((requests, seed))
    control = DraftControl(requests, DRAFTS, requests * DRAFTS)
    slots, room = np.arange(requests), np.full(requests, DRAFTS)
    limits = np.zeros(requests, np.int64)
    time, tokens = 0.0, 0
    history = []
    for step in range(steps):
        limits = limits if fixed is None else np.full(requests, fixed)
        assert (limits <= room).all()
        asked = int(limits.max())
        drafts = np.where(rng.random(requests) < found, limits, 0)
        accepted = np.zeros(requests, np.int64)
        for i in range(requests):
            while accepted[i] < drafts[i] and rng.random() < acceptance(step, i, int(accepted[i])):
                accepted[i] += 1
        seconds = judging(requests, int(drafts.sum()))
        made = making * (min(asked, 1) if lookup else asked)
        time += seconds + made
        tokens += requests + int(accepted.sum())
        history.append(drafts)
        limits = np.zeros(requests, np.int64)
        if not asked and not control.passed(requests, 0.02 * seconds * noise(rng), pure=True):
            continue
        if asked:
            times = 0.02 * seconds * noise(rng), 0.02 * made * noise(rng)
            control.observe(StepFigures(slots, drafts, accepted, *times, asked, True))
        limits = control.limits(slots, room)
        if not limits.any():
            control.decided(0.02 * deciding * noise(rng))
        time += deciding
    return Run(tokens / requests * judging(requests, 0) / time, np.stack(history))


# If acceptance changes within 300 steps, earlier gains may be lost each time.
MIN_SPEED_UP = {"alternating": 0.96, "dropping": 0.96}


@pytest.mark.parametrize("judging", JUDGING)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_drafts_never_cost(acceptance: str, judging: str) -> None:
    for requests, making in ((1, "lookup"), (1, "large model"), (8, "small model"), (32, "lookup")):
        found = run(requests, ACCEPTANCE[acceptance], JUDGING[judging], MAKING[making], steps=300)
        assert found.speed_up >= MIN_SPEED_UP.get(acceptance, 0.97)


@pytest.mark.parametrize("judging", JUDGING)
@pytest.mark.parametrize("acceptance", ["never", "low", "alternating", "one of two"])
def test_drafts_do_not_cost_on_a_busy_machine(acceptance: str, judging: str) -> None:
    for requests, making, lookup in ((1, 0.1, True), (8, 0.05, False)):
        given = ACCEPTANCE[acceptance], JUDGING[judging], making
        found = [
            run(requests, *given, 600, lookup=lookup, noise=busy, seed=seed).speed_up
            for seed in range(2)
        ]
        assert min(found) >= MIN_SPEED_UP.get(acceptance, 0.97)


@pytest.mark.full
@pytest.mark.parametrize("judging", ["memory-bound", "ridge"])
@pytest.mark.parametrize("acceptance", ["good", "always", "short runs"])
def test_gains_survive_on_a_busy_machine(acceptance: str, judging: str) -> None:
    for making, lookup in ((0.1, True), (0.05, False)):
        given = 1, ACCEPTANCE[acceptance], JUDGING[judging], making, 1000
        eager = run(*given, fixed=DRAFTS, lookup=lookup).speed_up
        found = [run(*given, lookup=lookup, noise=busy, seed=seed).speed_up for seed in range(3)]
        # A few unlucky steps have to be recovered.
        assert eager > 1.3 and np.mean(found) > 0.85 * eager


def test_a_lookup_costs_the_same_for_any_number_of_drafts() -> None:
    """Five drafts are not charged five times."""
    given = 1, ACCEPTANCE["always"], JUDGING["memory-bound"], 0.3
    found = run(*given, lookup=True)
    assert found.drafts[50:].mean() > 4.5
    assert found.speed_up > 0.9 * run(*given, lookup=True, fixed=DRAFTS).speed_up


def test_slow_steps_do_not_end_drafts_that_pay() -> None:
    hiccups = iter(range(10**6))
    found = run(
        1,
        ACCEPTANCE["always"],
        JUDGING["memory-bound"],
        0.02,
        noise=lambda rng: 20.0 if next(hiccups) % 9 == 8 else 1.0,
    )
    assert found.drafts[20:].mean() > 3.5


@pytest.mark.parametrize("requests", [1, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("acceptance", ["low", "good", "always", "short runs"])
def test_gains_are_nearly_those_of_the_best_fixed_number(acceptance: str, requests: int) -> None:
    for judging in ("memory-bound", "ridge"):
        given = ACCEPTANCE[acceptance], JUDGING[judging], 0.05
        best = max(run(requests, *given, fixed=k).speed_up for k in range(DRAFTS + 1))
        assert run(requests, *given).speed_up > 0.93 * best


def test_requests_get_drafts_by_their_own_acceptance() -> None:
    found = run(8, ACCEPTANCE["one of two"], JUDGING["memory-bound"], 0.05)
    means = found.drafts[100:].mean(axis=0)
    assert means[1::2].min() > 3 and means[::2].max() < 1.5
    everyone = max(
        run(8, ACCEPTANCE["one of two"], JUDGING["memory-bound"], 0.05, fixed=k).speed_up
        for k in range(DRAFTS + 1)
    )
    assert found.speed_up > everyone


def test_drafts_stop_when_rejected_and_resume_when_accepted() -> None:
    given = 1, ACCEPTANCE["dropping"], JUDGING["memory-bound"], 0.05
    fails = np.array([run(*given, seed=seed).drafts[:, 0] for seed in range(5)])
    assert fails[:, 20:100].mean() > 3 and fails[:, 120:].mean() < 1.2
    assert fails[:, 300:].mean() < 0.8  # earlier gains are spent
    rises = run(1, ACCEPTANCE["rising"], JUDGING["memory-bound"], 0.05).drafts[:, 0]
    assert rises[50:200].mean() < 0.5 and rises[300:].mean() > 3


def test_a_batch_with_too_expensive_checks_gets_no_drafts() -> None:
    small, large = (
        run(n, ACCEPTANCE["good"], JUDGING["ridge"], 0.05).drafts[50:].mean() for n in (1, 32)
    )
    assert small > 2 and large < 0.1


def test_rare_but_right_drafts_pay() -> None:
    """A lookup that mostly finds nothing then costs nothing."""
    found = run(1, ACCEPTANCE["always"], JUDGING["memory-bound"], 0.0001, found=0.1)
    assert found.speed_up > 1.3


def test_limits_of_requests_are_respected() -> None:
    control = DraftControl(4, DRAFTS, 6)
    slots, room = np.arange(4), np.array([5, 0, 2, 5])
    none = np.zeros(4, np.int64)
    for _ in range(6):
        assert not control.limits(slots, room).any()  # the cost of a step is unknown
        control.observe(StepFigures(slots, none, none, 0.01, 0.0, 0, True))
    seen = np.zeros(4, np.int64)
    for _ in range(50):
        limits = control.limits(slots, room)
        seen = np.maximum(seen, limits)
        assert (limits <= room).all() and limits.sum() <= 6
        control.observe(StepFigures(slots, limits, limits, 0.01, 0.0, int(limits.max()), True))
    assert seen[1] == 0 and seen[0] > 1 and seen[2] > 1
    assert not control.limits(slots, np.zeros(4, np.int64)).any()


def test_steps_with_prompts_do_not_count_for_the_cost_of_drafts() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    slots, none, five = np.arange(1), np.array([0]), np.array([5])
    for _ in range(6):
        control.observe(StepFigures(slots, none, none, 0.01, 0.0, 0, True))
    for _ in range(20):  # long steps with drafts
        control.observe(StepFigures(slots, five, five, 5.0, 0.0, 5, False))
    assert control.budget.balance > 0 and control.limits(slots, five)[0] > 0


def test_a_new_request_is_not_judged_by_the_one_before_it() -> None:
    control = DraftControl(2, DRAFTS, 2 * DRAFTS)
    slots, none, some = np.arange(2), np.zeros(2, np.int64), np.array([3, 3])
    for _ in range(6):
        control.observe(StepFigures(slots, none, none, 0.01, 0.0, 0, True))
    for _ in range(10):
        control.observe(StepFigures(slots, some // 3, np.array([1, 0]), 0.011, 0.0, 1, True))
        control.observe(StepFigures(slots, some, np.array([3, 0]), 0.013, 0.0, 3, True))
    control.observe(StepFigures(slots, none, none, 0.01, 0.0, 0, True))
    before = control.limits(slots, np.full(2, DRAFTS))
    control.enter(1)
    after = control.limits(slots, np.full(2, DRAFTS))
    assert before[0] > before[1] and after[1] > before[1]


def test_a_choice_of_drafts_is_reused_while_it_gains() -> None:
    control = DraftControl(3, DRAFTS, 3 * DRAFTS)
    slots, none, room = np.arange(2), np.zeros(2, np.int64), np.full(2, DRAFTS)
    weighed: list[int] = []
    weigh = control._best
    control._best = lambda *given: weighed.append(len(given[0])) or weigh(*given)

    def step(slots, limits, accepted) -> list[int]:
        limits, accepted = np.array(limits), np.array(accepted)
        seconds = 0.01 + 0.0001 * int(limits.sum())
        control.observe(StepFigures(slots, limits, accepted, seconds, 0.0, max(limits), True))
        weighed.clear()
        return control.limits(slots, room[: len(slots)]).tolist()

    for _ in range(6):
        control.observe(StepFigures(slots, none, none, 0.01, 0.0, 0, True))
    limits = control.limits(slots, room).tolist()
    times = 0
    for _ in range(12):
        limits = step(slots, limits or [1, 1], limits or [1, 1])
        times += len(weighed)
    assert 0 < times <= 6 and limits == [DRAFTS, DRAFTS]
    while not weighed:
        limits = step(slots, limits, limits)
    room[1] = 2  # near its end
    assert step(slots, limits, limits) == [DRAFTS, 2] and not weighed
    step(slots, [DRAFTS, 2], [0, 0])
    assert weighed == [2]  # it lost
    while not weighed:
        limits = step(slots, [DRAFTS, 2], [DRAFTS, 2])
    step(np.array([2, 1]), limits, limits)
    assert weighed == [2]  # another request
    control.enter(1)
    step(np.array([2, 1]), limits, limits)
    assert weighed == [2]  # another request in the same slot


def test_only_worthwhile_nodes_of_a_tree_are_checked() -> None:
    """The token is always one of the first two drafts; the others only cost."""
    control = DraftControl(1, 4, 4)
    control.follow((-1, 0, 0, 0, 0))
    slots, room = np.arange(1), np.array([4])
    limits = np.zeros(1, np.int64)
    history = []
    for step in range(200):
        path = np.zeros((1, 4), np.bool_)
        if limits[0] > step % 2:
            path[0, step % 2] = True
        seconds = 0.01 * (1 + 0.1 * int(limits[0]))
        control.observe(
            StepFigures(slots, limits, path.sum(1), seconds, 0.0, int(limits[0]), True, path)
        )
        limits = control.limits(slots, room)
        history.append(int(limits[0]))
    assert max(set(history[50:]), key=history[50:].count) == 2


def test_a_tree_is_not_judged_as_a_chain() -> None:
    """The token is one of four drafts for the same place. As a chain, the first one would get the
    credit, even if another one was right."""

    def gain(control: DraftControl, trees: bool) -> float:
        slots, room = np.arange(1), np.array([4])
        limits = np.zeros(1, np.int64)
        tokens, time = 0, 0.0
        rng = np.random.default_rng(0)
        for _ in range(400):
            path = np.zeros((1, 4), np.bool_)
            right = rng.choice(4, p=(0.35, 0.3, 0.2, 0.15))
            path[0, right] = limits[0] > right
            accepted = path.sum(1)
            seconds = 1.0 + 0.08 * int(limits[0])
            tokens, time = tokens + 1 + int(accepted[0]), time + seconds
            paths = path if trees else None
            control.observe(
                StepFigures(slots, limits, accepted, seconds, 0.0, int(limits[0]), True, paths)
            )
            limits = control.limits(slots, room)
        return tokens / time

    tree = DraftControl(1, 4, 4)
    tree.follow((-1, 0, 0, 0, 0))
    found, as_chain = gain(tree, trees=True), gain(DraftControl(1, 4, 4), trees=False)
    assert found > 1.25 and found > 1.05 * as_chain


def test_time_without_drafts_is_measured_again_from_time_to_time() -> None:
    drafts = run(1, ACCEPTANCE["always"], JUDGING["memory-bound"], 0.05).drafts[:, 0]
    without = np.flatnonzero(drafts == 0)
    assert (np.diff([*without, len(drafts)]) <= 33).all() and len(without) < 40


# Steps without drafts during which `DraftControl` does not call the drafter.

PLAIN = 0.01
ONE_SLOT = np.array([0])
NO_DRAFTS = np.zeros(1, np.int64)
LIMITS = np.array([DRAFTS])


def plain_step(control: DraftControl) -> np.ndarray:
    due = control.passed(1, PLAIN, pure=True)
    return control.limits(ONE_SLOT, LIMITS) if due else NO_DRAFTS


def draft_step(control: DraftControl, drafts: np.ndarray, seconds: float = PLAIN) -> np.ndarray:
    control.observe(StepFigures(ONE_SLOT, drafts, NO_DRAFTS, seconds, 0.0, int(drafts.max()), True))
    return control.limits(ONE_SLOT, LIMITS)


def until_asleep(control: DraftControl) -> None:
    """Reject every draft, in steps that take three times as long."""
    limits = NO_DRAFTS
    for _ in range(200):
        limits = draft_step(control, limits, 3 * PLAIN) if limits.any() else plain_step(control)
        if control.budget.balance <= 0:
            return
    pytest.fail("drafts that are always wrong go on")


def test_six_plain_steps_are_timed_before_the_first_drafts() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    due = [control.passed(1, PLAIN, pure=True) for _ in range(6)]
    assert due == [False] * 5 + [True]


def test_no_drafts_until_the_lost_time_is_earned_then_new_ones() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    until_asleep(control)
    lost, rests = -control.budget.balance, 0
    while not control.passed(1, PLAIN, pure=True):
        rests += 1
        assert rests < 1000
    assert rests + 1 >= lost / (SHARE * PLAIN)
    for _ in range(1000):  # and tries drafts again
        if plain_step(control).any():
            return
    pytest.fail("drafts are never tried again")


def test_a_new_request_is_considered_as_soon_as_the_budget_is_positive() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    until_asleep(control)
    while control.budget.balance <= 0:
        control.passed(1, PLAIN, pure=True)
    control.budget.needed = 1.0  # a trial would cost more than the budget
    assert not control.passed(1, PLAIN, pure=True)
    control.enter(0)
    assert control.passed(1, PLAIN, pure=True)


def test_the_time_of_deciding_without_drafts_is_charged_too() -> None:
    """No request may have drafts; this is not decided again after every step."""
    control = DraftControl(1, DRAFTS, DRAFTS)
    looks = 0
    for _ in range(1000):
        if control.passed(1, PLAIN, pure=True):
            looks += 1
            assert not control.limits(ONE_SLOT, np.zeros(1, np.int64)).any()
            control.decided(PLAIN)
    assert looks <= 2 + 1000 * SHARE


# Speculation never costs more than its budget, under any conditions.

REQUESTS, STEPS = 6, 400


def test_a_loss_is_earned_back_before_the_next_trial() -> None:
    budget = LossBudget()
    budget.settle(1.0, 3.0, limit=2.0)
    lost = 2.0 - SHARE
    assert budget.balance == pytest.approx(-lost)
    assert SHARE * LEAST < budget.share < SHARE  # trials gained less than they cost
    steps = 0
    while not budget.passed(1.0):
        steps += 1
    assert steps == pytest.approx(lost / budget.share, abs=2)
    budget.needed = 1.0  # possible loss of the next trial
    steps = 0
    while not budget.passed(1.0):
        steps += 1
    assert steps == pytest.approx(1.0 / budget.share, abs=3)


def test_trials_are_rare_until_one_gains() -> None:
    budget = LossBudget()
    for _ in range(100):
        budget.settle(1.0, 1.2, limit=2.0)
    assert budget.share == pytest.approx(SHARE * LEAST)
    for _ in range(10):
        budget.settle(1.0, 0.5, limit=2.0)
    assert budget.share == SHARE
    for _ in range(20_000):  # until all losses are recovered
        budget.settle(1.0, 0.5, limit=2.0)
    assert budget.share == SHARE
    for _ in range(200):  # half of their cost is regained
        budget.settle(1.0, 1.2, limit=2.0)
        budget.settle(1.0, 0.9, limit=2.0)
    assert budget.share == pytest.approx(SHARE / 2, rel=0.1)


def test_gains_fill_the_budget_up_to_its_limit() -> None:
    budget = LossBudget()
    for _ in range(10):
        budget.settle(3.0, 1.0, limit=2.5)
    assert budget.balance == 2.5
    budget.settle(1.0, 1.5, limit=2.5)
    assert budget.balance == pytest.approx(2.0 + SHARE)
    budget.spend(3.0)
    assert not budget.passed(1.0)


@dataclass
class Phase:
    """The performance of drafts during one phase.

    Attributes:
        right: [slots], acceptance of each draft.
        judging: time to check one draft; making: of one draft in depth; looking: of any proposal;
            reading: of the text of a request without drafts so far; in steps without drafts.
        found: probability that there are drafts.
    """

    right: np.ndarray
    judging: float
    making: float
    looking: float
    reading: float
    found: float

    @staticmethod
    def draw(rng: np.random.Generator) -> Phase:
        return Phase(
            right=rng.choice([0.0, 0.2, 0.5, 0.8, 1.0], REQUESTS),
            judging=rng.choice([0.0, 0.05, 0.3, 1.0, 3.0]),
            making=rng.choice([0.0, 0.05, 0.5]),
            looking=rng.choice([0.0, 0.2, 1.0]),
            reading=rng.choice([0.0, 0.0, 3.0]),
            found=rng.choice([0.0, 0.3, 1.0]),
        )


@pytest.mark.parametrize("seed", range(12))
def test_time_with_drafts_is_bounded_by_the_time_without(seed: int) -> None:
    """Requests come and go, prompts are computed, and sometimes all costs and gains of drafts
    change. The clock is simulated; the bound holds at every moment."""
    rng = np.random.default_rng(seed)
    control = DraftControl(REQUESTS, DRAFTS, REQUESTS * DRAFTS)
    deciding = rng.choice([0.0, 0.2, 1.0])
    phase = Phase.draw(rng)
    running = [0]
    limits = dict.fromkeys(range(REQUESTS), 0)
    unread = set(range(REQUESTS))
    total = without = worst = made = longest = 0.0
    asked = 0
    for _ in range(STEPS):
        if rng.random() < 0.01:
            phase = Phase.draw(rng)
        if rng.random() < 0.05:  # a request comes or goes
            slot = int(rng.integers(REQUESTS))
            running = sorted({*running, slot} if slot not in running else {*running} - {slot})
            running = running or [slot]
            if slot in running:
                control.enter(slot)
            limits[slot] = 0
            unread.add(slot)
        slots = np.array(running)
        plain = 0.02 * (1 + 0.3 * len(slots))
        longest = max(longest, plain)
        wanted = np.array([limits[slot] for slot in running])
        drafts = np.where(rng.random(len(slots)) < phase.found, wanted, 0)
        accepted = np.zeros_like(drafts)
        for i, slot in enumerate(running):
            while accepted[i] < drafts[i] and rng.random() < phase.right[slot]:
                accepted[i] += 1
        pure = bool(rng.random() < 0.9)
        prompt = 0.0 if pure else 2 * plain
        seconds = plain * (1 + phase.judging * drafts.sum() / len(slots))
        took, would = seconds + made, plain * (1 + accepted.mean())
        if asked:
            figures = seconds + prompt, made, asked, pure
            control.observe(StepFigures(slots, drafts, accepted, *figures))
            due = True
        else:
            due = control.passed(len(slots), seconds + prompt, pure=pure)
        made, asked = 0.0, 0
        limits = dict.fromkeys(range(REQUESTS), 0)
        if due:
            made = plain * deciding if control.budget.balance > 0 else 0.0
            chosen = control.limits(slots, np.full(len(slots), DRAFTS))
            limits |= dict(zip(running, chosen.tolist(), strict=True))
            new = {slot for slot in running if limits[slot]} & unread
            unread -= new
            asked = int(chosen.max())
            if chosen.any():
                made += plain * (phase.looking + phase.making * int(chosen.max()))
                made += plain * phase.reading * len(new)
            else:
                control.decided(made)
                total += made
                made = 0.0
        total += took + prompt
        without += would + prompt
        worst = max(worst, took - would, plain * deciding)
        assert total <= without / 0.97 + FIRST * longest + 3 * worst  # see `LossBudget`
    assert control.budget.balance < 1.0
