"""Pins stay consistent under any order of pinning, use, shortage, failures and resets.

Invariants are checked after each step: pinned blocks can be matched, are counted correctly and stay
within the quotas. The fake worker checks the contents of all blocks that are shared.
"""

from __future__ import annotations

from dataclasses import replace

from helpers.simulation import Setup, Simulation
from helpers.tiers import examples
from helpers.windows import Seen, chunks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvik.core.types import Pin

LONGEST = 24  # most tokens of a request


class PinMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from([(None,), (None,), (4,), (None, 5), (1, None), (chunks(6), None)]),
        spare_blocks=st.integers(0, 20),
        shares=st.sampled_from([(0.75, 0.5), (1.0, 1.0), (0.5, 0.5), (0.4, 0.2)]),
    )
    def build(
        self,
        block_size: int,
        windows: tuple[Seen, ...],
        spare_blocks: int,
        shares: tuple[float, float],
    ) -> None:
        setup = Setup(
            block_size=block_size,
            num_blocks=1,
            windows=windows,
            budget=8,
            depth=2,
            pinned_share=shares[0],
            tenant_pinned_share=shares[1],
        )
        needed = Simulation(setup).scheduler.kv.config.max_blocks(LONGEST, setup.budget)
        self.sim = Simulation(replace(setup, num_blocks=needed + spare_blocks))

    @rule(
        head=st.integers(0, 3),
        length=st.integers(4, 16),
        tenant=st.sampled_from(["a", "b", "c"]),
        pinned=st.sampled_from([(), (16,), (4, 8), (4, 8, 12, 16)]),
        seconds=st.sampled_from([0.5, 4.0, 30.0]),
        n=st.sampled_from([1, 1, 2]),
    )
    def serve(
        self,
        head: int,
        length: int,
        tenant: str,
        pinned: tuple[int, ...],
        seconds: float,
        n: int,
    ) -> None:
        pins = tuple(Pin(length, seconds) for length in pinned)
        self.sim.add([head] * length, LONGEST - length, tenant=tenant, pins=pins, n=n)
        self.step(6)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.sim.step()
            self.sim.now += 0.05

    @rule(seconds=st.sampled_from([0.3, 2.0]))
    def wait(self, seconds: float) -> None:
        self.sim.now += seconds

    @rule(row=st.integers(0, 3))
    def let_a_row_fail(self, row: int) -> None:
        self.sim.failing_row = row
        self.sim.step()

    @rule(really=st.integers(0, 3))
    def reset(self, really: int) -> None:
        if really == 0:
            kv = self.sim.scheduler.kv
            assert kv.reset() == 0 or not kv.pool.num_cached
            self.sim.check()

    def teardown(self) -> None:
        self.sim.failing_row = None
        self.sim.drain(max_steps=1000)
        self.sim.now += 60.0
        self.sim.scheduler.schedule(self.sim.now)
        assert self.sim.scheduler.kv.pool.num_pinned == 0


TestPins = PinMachine.TestCase
TestPins.settings = settings(max_examples=examples(150), stateful_step_count=20)
