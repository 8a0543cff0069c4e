"""Random service under every policy: each request gets its own tokens.

The fake worker checks every key that every forward sees; the simulation checks invariants
after each call.
"""

from __future__ import annotations

import random

import pytest
from helpers.simulation import Setup, Simulation
from helpers.tiers import runs
from helpers.windows import Seen, chunks

from kvik.core.config import POLICIES
from kvik.core.types import FinishReason
from kvik.spec.visible_keys import Budget

WINDOWS: list[tuple[Seen, ...]] = [
    (None,),
    (5,),
    (None, 6),
    (16, None, 3),
    (chunks(12), None),
    (chunks(5),),
]
BUDGETS: list[tuple[Seen, ...]] = [
    (Budget(3, 1, 2, 4),),
    (Budget(9, 2, 4, 3), Budget(12, 2, 4, 3)),
]


def run(seed: int, policy: str, windows: tuple[Seen, ...], depth: int) -> Simulation:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    budget = rng.choice([6, 16, 64])
    longest = 52  # 30 prompt + 20 output tokens, and some room
    plain = windows in BUDGETS  # without drafts and stages
    setup = Setup(
        policy=policy,
        block_size=block_size,
        num_blocks=(longest // block_size + 2 + plain * (12 // block_size + 2)) * len(windows)
        + rng.randint(0, 11),
        windows=windows,
        budget=budget,
        max_num_seqs=rng.choice([3, 6]),
        depth=depth,
        stages=depth if seed % 2 and not plain else 1,
        caching=rng.random() < 0.8,
        lookahead=0 if plain else seed % 3 * 4,
    )
    sim = Simulation(setup)
    heads = [[rng.randint(0, 2) for _ in range(20)] for _ in range(3)]
    for _ in range(60):
        sim.now += 0.1
        sim.worker.num_drafts = rng.choice([0, 0, 2, 5]) * (not plain)
        if rng.random() < 0.4:
            head = rng.choice(heads)[: rng.randint(1, 20)]
            sim.add(
                head + [rng.randint(0, 2) for _ in range(rng.choice([0, 1, 9]))],
                max_tokens=rng.randint(1, 20),
                n=rng.choice([1, 1, 3]),
                priority=rng.randint(0, 2),
                salt=rng.choice(["", "", "tenant"]),
                tenant=rng.choice(["", "a", "b"][: seed % 3 + 1]),
                deadline=sim.now + 1.0 if rng.random() < 0.2 else None,
            )
        if rng.random() < 0.06 and sim.requests:
            sim.end(rng.choice(list(sim.requests.values())))
        if rng.random() < 0.04:
            sim.failing_row = rng.randint(0, 5)
        if rng.random() < 0.04:
            sim.step_fails = True
        sim.step()
    sim.failing_row, sim.step_fails = None, False
    sim.drain()
    return sim


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_its_own_tokens(policy: str, depth: int) -> None:
    reasons: set[FinishReason | None] = set()
    preemptions = hits = 0
    first = 25 * (depth + 3 * POLICIES.index(policy))  # each run has a seed of its own
    for seed, windows in enumerate((WINDOWS + BUDGETS) * runs(2), first):
        sim = run(seed, policy, windows, depth)
        reasons |= {delta.finish_reason for delta in sim.ended.values()}
        preemptions += sim.scheduler.counters.preemptions
        hits += sim.scheduler.counters.prefix_hits
    # The runs cover what they should; there are no moves here.
    assert reasons == set(FinishReason) - {FinishReason.MOVED}
    assert hits > 0
    assert preemptions or policy in ("static", "dynamic")
