"""Tenants, pins, deadlines, embeddings, siblings, drafts and windows under constant load.

The simulation checks invariants after each call and compares all tokens and embeddings. These tests
check that no request waits forever: each ends within a bounded number of steps of its arrival,
although there is always more work than can be done.
"""

from __future__ import annotations

import random

import pytest
from helpers.simulation import Setup, Simulation
from helpers.tiers import runs
from helpers.windows import Seen, chunks

from kvik.core.config import POLICIES
from kvik.core.types import FinishReason, Pin

WINDOWS: list[tuple[Seen, ...]] = [(None,), (6,), (None, 5), (chunks(7), None)]
NUM_STEPS = min(runs(320), 320)


def keep_busy(
    seed: int,
    policy: str,
    depth: int,
    windows: tuple[Seen, ...],
    checkpoints: int | None = None,
) -> Simulation:
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 8])
    longest = 40
    setup = Setup(
        policy=policy,
        block_size=block_size,
        num_blocks=(longest // block_size + 3) * len(windows) + rng.randint(3, 29),
        windows=windows,
        budget=rng.choice([8, 24]),
        max_num_seqs=rng.choice([2, 5]),
        max_model_len=longest,
        depth=depth,
        ageing=0.5,
        lookahead=0 if checkpoints else seed % 2 * 4,
        checkpoints=checkpoints,
        pinned_share=rng.choice([0.4, 1.0]),
    )
    sim = Simulation(setup)
    tenants = ["a", "b", "c", "d"][: 2 + seed % 3]
    most = 120 + 60 * depth  # steps of a request with 40 tokens and ten requests ahead of it
    arrived: dict[tuple[str, int], int] = {}
    heads = [[rng.randint(0, 2) for _ in range(16)] for _ in range(3)]
    for step in range(NUM_STEPS):
        sim.worker.num_drafts = 0 if checkpoints else rng.choice([0, 0, 2])
        if len(sim.scheduler.waiting) < 8:
            tenant = rng.choice(tenants)
            pooling = rng.choice([None, None, None, "mean", "last"])
            found = sim.add(
                rng.choice(heads) + [rng.randint(0, 2) for _ in range(rng.randint(1, 8))],
                max_tokens=rng.randint(1, 16),
                n=1 if pooling else rng.choice([1, 1, 1, 2]),
                priority=rng.randint(-1, 1),
                deadline=sim.now + 2.0 if rng.random() < 0.1 else None,
                tenant=tenant,
                salt=tenant,
                pins=(Pin(8, 0.5), Pin(16, 5.0)) if rng.random() < 0.3 else (),
                pooling=pooling,
            )
            arrived.update(dict.fromkeys([r.key for r in found], step))
        if arrived and rng.random() < 0.02:
            sim.end(sim.requests[rng.choice(list(arrived))])
        if rng.random() < 0.01:
            sim.failing_row = rng.randint(0, 5)
        if rng.random() < 0.01:
            sim.scheduler.kv.reset()
        sim.step()
        sim.now += 0.1
        for key in sim.ended:
            arrived.pop(key, None)
        assert step - min(arrived.values(), default=step) <= most, "a request starves"
    sim.failing_row = None
    left = [r for r in sim.requests.values() if not r.finished]
    sim.drain(max_steps=20 + 2 * sum(r.max_length for r in left))
    sim.outlive_pins()
    return sim


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_under_random_load(policy: str, depth: int) -> None:
    reasons: set[FinishReason | None] = set()
    preemptions = pinned = vectors = 0
    kinds = [*((windows, None) for windows in WINDOWS), ((None, 5), 6)]
    for seed, (windows, checkpoints) in enumerate(kinds):
        sim = keep_busy(seed, policy, depth, windows, checkpoints)
        ended = sim.ended.values()
        reasons |= {delta.finish_reason for delta in ended}
        preemptions += sim.scheduler.counters.preemptions
        pinned += sum(d.report.num_pinned_tokens for d in ended if d.report is not None)
        vectors += sum(d.embedding is not None for d in ended)
    # The runs cover what they should; there is no other engine for moves.
    assert reasons == set(FinishReason) - {FinishReason.MOVED}
    assert pinned and vectors
    assert preemptions or policy in ("static", "dynamic")
