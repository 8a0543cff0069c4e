"""Any order of adding, stepping, aborting and failing leaves the scheduler consistent.

Invariants are checked after each rule, and the fake worker checks the contents of every block that
a forward reads. At the end every request must end and every block must be free.
"""

from __future__ import annotations

from dataclasses import replace

from helpers.fake_worker import FAULTS
from helpers.simulation import Setup, Simulation
from helpers.tiers import examples
from helpers.windows import Seen, chunks, sinks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvik.core.config import POLICIES
from kvik.core.types import FinishReason, PageSource, Pin
from kvik.spec.visible_keys import Budget

LONGEST = 24  # most tokens of a request


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        block_size=st.sampled_from([1, 2, 4, 8]),
        windows=st.sampled_from(
            [
                *((None,), (4,), (None, 3), (5, None, 8), (chunks(6), None)),
                *((sinks(3, 4),), (sinks(1, 6),), (sinks(5, 2),)),
                *((Budget(3, 1, 2, 4),), (Budget(6, 2, 2, 1), Budget(4, 1, 3, 5))),
                (Budget(9, 2, 4, 3),) * 2,
                *((Budget(3, 1, 2, 4), 3), (chunks(6), Budget(6, 2, 2, 1), 4)),
            ]
        ),
        spare_blocks=st.integers(0, 12),
        budget=st.sampled_from([4, 8, 32]),
        max_num_seqs=st.integers(1, 5),
        depth=st.integers(1, 3),
        stages=st.sampled_from([1, 1, 2, 3]),
        caching=st.booleans(),
        pinned=st.sampled_from([(0.75, 0.5), (1.0, 1.0), (0.4, 0.2)]),
        lookahead=st.sampled_from([0, 0, 3]),
        checkpoints=st.sampled_from([None, None, 0, 1, 3, 12]),
        tiers=st.sampled_from([(0, 0), (3, 0), (40, 0), (0, 4), (0, 100), (5, 12), (40, 100)]),
        peers=st.booleans(),
    )
    def build(
        self,
        policy: str,
        block_size: int,
        windows: tuple[Seen, ...],
        spare_blocks: int,
        budget: int,
        max_num_seqs: int,
        depth: int,
        stages: int,
        caching: bool,
        pinned: tuple[float, float],
        lookahead: int,
        checkpoints: int | None,
        tiers: tuple[int, int],
        peers: bool,
    ) -> None:
        if any(isinstance(window, Budget) for window in windows):
            lookahead = 0  # drafters with keys of their own read all of them
        setup = Setup(
            policy=policy,
            block_size=block_size,
            num_blocks=1,
            windows=windows,
            budget=budget,
            max_num_seqs=max_num_seqs,
            depth=depth,
            stages=stages,
            caching=caching,
            max_wait=0.3,
            ageing=0.5,
            lookahead=lookahead,
            checkpoints=checkpoints,
            pinned_share=pinned[0],
            tenant_pinned_share=pinned[1],
            tiers=tiers if caching else (0, 0),
            peers=peers and caching,
        )
        # Just enough for the longest request, so that two compete for blocks.
        needed = Simulation(setup).scheduler.kv.config.max_blocks(LONGEST, budget)
        self.sim = Simulation(replace(setup, num_blocks=needed + spare_blocks))

    @rule(
        head=st.integers(0, 1),
        head_length=st.integers(0, 12),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        max_tokens=st.integers(0, 9),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "tenant"]),
        patience=st.sampled_from([None, None, 0.2, 1.0]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        pinned=st.sampled_from([(), (), (12,), (3, 7), (4, 8, 12)]),
        seconds=st.sampled_from([0.1, 1.0]),
        pooling=st.sampled_from([None, None, None, "mean", "last"]),
        lends=st.booleans(),
        at_peer=st.sampled_from([None, None, 3, 8, 15]),
    )
    def add(
        self,
        head: int,
        head_length: int,
        tail: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        salt: str,
        patience: float | None,
        tenant: str,
        pinned: tuple[int, ...],
        seconds: float,
        pooling: str | None,
        lends: bool,
        at_peer: int | None,
    ) -> None:
        deadline = None if patience is None else self.sim.now + patience
        self.sim.add(
            [head] * head_length + tail,
            max_tokens,
            n=1 if pooling or not max_tokens else n,
            priority=priority,
            salt=salt,
            deadline=deadline,
            tenant=tenant,
            pins=tuple(Pin(length, seconds) for length in pinned),
            pooling=pooling,
            lends=lends,
            source=None if at_peer is None else PageSource("peer", 1, "lease", at_peer),
        )

    @rule(count=st.integers(1, 4), drafts=st.sampled_from([0, 0, 1, 4]))
    def step(self, count: int, drafts: int) -> None:
        self.sim.worker.num_drafts = drafts
        for _ in range(count):
            self.sim.step()
            self.sim.now += 0.05

    @rule()
    def plan_only(self) -> None:
        if len(self.sim.in_flight) < self.sim.setup.depth:
            self.sim.plan()

    @precondition(lambda self: self.sim.in_flight)
    @rule()
    def deliver_early(self) -> None:
        self.sim.deliver()

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0, -0.4]))  # clocks may even go back
    def wait(self, seconds: float) -> None:
        self.sim.now += seconds

    @precondition(lambda self: self.sim.requests)
    @rule(
        which=st.integers(0, 20),
        reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]),
    )
    def abort(self, which: int, reason: FinishReason) -> None:
        requests = list(self.sim.requests.values())
        self.sim.end(requests[-1 - which % len(requests)], reason)

    @precondition(lambda self: self.sim.requests)
    @rule(which=st.integers(0, 20))
    def hand_over(self, which: int) -> None:
        requests = list(self.sim.requests.values())
        request = requests[-1 - which % len(requests)]
        siblings = sum(other.request_id == request.request_id for other in requests)
        if siblings == 1 and not request.params.prompt_logprobs_start:
            self.sim.hand_over(request)

    @rule(row=st.integers(0, 4))
    def let_a_row_fail(self, row: int) -> None:
        self.sim.failing_row = row
        self.sim.step()

    @rule()
    def let_a_step_fail(self) -> None:
        self.sim.step_fails = True
        self.sim.step()

    @precondition(lambda self: self.sim.worker.tiers is not None)
    @rule(at_once=st.booleans())
    def let_loads_take(self, at_once: bool) -> None:
        self.sim.worker.tiers.at_once = at_once

    @precondition(lambda self: self.sim.worker.tiers is not None)
    @rule(which=st.sampled_from(FAULTS), number=st.integers(0, 9))
    def let_a_tier_fail(self, which: str, number: int) -> None:
        self.sim.worker.tiers.fail(which, number)

    @rule()
    def reset_the_cache(self) -> None:
        self.sim.scheduler.reset_cache()
        self.sim.check()
        assert self.sim.scheduler.kv.pool.num_cached == 0

    def teardown(self) -> None:
        """Serve the rest within a number of steps that its tokens bound."""
        sim = self.sim
        sim.failing_row, sim.step_fails = None, False
        if sim.worker.tiers is not None:
            sim.worker.tiers.at_once = True
        left = [r for r in sim.requests.values() if not r.finished]
        sim.drain(max_steps=20 + 2 * sum(r.max_length for r in left))
        sim.outlive_pins()
        counted = sim.scheduler.counters.delivered_tokens
        assert counted == sum(map(len, sim.outputs.values()))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(300), stateful_step_count=25)
