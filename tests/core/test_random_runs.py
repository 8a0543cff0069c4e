"""Random service under every policy: each request gets its own tokens, and none waits forever.

The fake worker checks every key that every forward sees; the simulation checks invariants after
each call, and compares all tokens and embeddings. In every second run there is always more work
than can be done, and each request still ends within a bounded number of steps of its arrival.
"""

from __future__ import annotations

import random

import pytest
from helpers.simulation import Setup, Simulation
from helpers.tiers import runs
from helpers.windows import Seen, chunks

from kvik.core.config import POLICIES
from kvik.core.types import FinishReason, Pin
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
# KV groups, number of checkpoints of states, sizes of tiers.
KINDS: list[tuple[tuple[Seen, ...], int | None, tuple[int, int]]] = [
    *((windows, None, (0, 0)) for windows in WINDOWS + BUDGETS),
    ((None, 5), 6, (0, 0)),
    ((None,), 6, (60, 0)),
    ((None, 5), 4, (30, 200)),
    (BUDGETS[0], 6, (0, 0)),
    (BUDGETS[1], None, (30, 200)),
    (BUDGETS[0], 4, (60, 0)),
]
LONGEST = 40


def run(
    seed: int,
    policy: str,
    windows: tuple[Seen, ...],
    depth: int,
    checkpoints: int | None,
    tiers: tuple[int, int],
) -> Simulation:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    budgets = windows in BUDGETS
    busy = seed % 2 == 0
    setup = Setup(
        policy=policy,
        block_size=block_size,
        num_blocks=(LONGEST // block_size + 3 + budgets * (12 // block_size + 2)) * len(windows)
        + rng.randint(0, 11),
        windows=windows,
        budget=rng.choice([8, 24, 64]),
        max_num_seqs=rng.choice([2, 3, 6]),
        max_model_len=LONGEST,
        depth=depth,
        stages=1 if budgets or checkpoints is not None else rng.choice([1, depth]),
        caching=rng.random() < 0.8 or checkpoints is not None,
        ageing=0.5,
        lookahead=0 if budgets else seed % 3 * 4,
        checkpoints=checkpoints,
        pinned_share=rng.choice([0.4, 1.0]),
        tiers=tiers,
    )
    sim = Simulation(setup)
    tenants = ["", "a", "b", "c"][: seed % 4 + 1]
    heads = [[rng.randint(0, 2) for _ in range(16)] for _ in range(3)]
    most = 120 + 60 * depth  # steps of a request of 40 tokens with ten requests ahead of it
    arrived: dict[tuple[str, int], int] = {}
    for step in range(240 if busy else 60):
        sim.worker.num_drafts = rng.choice([0, 0, 2, 5])
        if len(sim.scheduler.waiting) < 8 and (busy or rng.random() < 0.4):
            pooling = rng.choice([None, None, None, "mean", "last"])
            found = sim.add(
                rng.choice(heads)[: rng.randint(1, 16)]
                + [rng.randint(0, 2) for _ in range(rng.randint(0, 8))],
                max_tokens=rng.randint(1, 16),
                n=1 if pooling else rng.choice([1, 1, 1, 3]),
                priority=rng.randint(-1, 1),
                salt=rng.choice(["", "", "x"]),
                deadline=sim.now + 2.0 if rng.random() < 0.1 else None,
                tenant=rng.choice(tenants),
                pins=(Pin(8, 0.5), Pin(16, 5.0)) if rng.random() < 0.3 else (),
                pooling=pooling,
            )
            arrived.update(dict.fromkeys([r.key for r in found], step))
        if arrived and rng.random() < 0.03:
            sim.end(sim.requests[rng.choice(list(arrived))])
        if rng.random() < 0.02:
            sim.failing_row = rng.randint(0, 5)
        if rng.random() < 0.02:
            sim.step_fails = True
        if rng.random() < 0.01:
            sim.scheduler.reset_cache()
        if sim.worker.tiers is not None and rng.random() < 0.1:
            sim.worker.tiers.at_once = rng.random() < 0.5
            sim.worker.tiers.fail(rng.choice(("load", "gone", "lost")), rng.randint(0, 9))
        sim.step()
        sim.now += 0.1
        for key in sim.ended:
            arrived.pop(key, None)
        assert step - min(arrived.values(), default=step) <= most, "a request starves"
    sim.failing_row, sim.step_fails = None, False
    if sim.worker.tiers is not None:
        sim.worker.tiers.at_once = True
    left = [r for r in sim.requests.values() if not r.finished]
    sim.drain(max_steps=20 + 2 * sum(r.max_length for r in left))
    sim.outlive_pins()
    return sim


@pytest.mark.each(1)  # policies order requests, depth decides when results arrive
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_its_own_tokens(policy: str, depth: int) -> None:
    reasons: set[FinishReason | None] = set()
    preemptions = hits = pinned = vectors = loaded = 0
    first = 14 * (depth + 3 * POLICIES.index(policy))  # each run has a seed of its own
    for seed, (windows, checkpoints, tiers) in enumerate(KINDS * runs(1), first):
        sim = run(seed, policy, windows, depth, checkpoints, tiers)
        ended = sim.ended.values()
        reasons |= {delta.finish_reason for delta in ended}
        preemptions += sim.scheduler.counters.preemptions
        hits += sim.scheduler.counters.prefix_hits
        pinned += sum(d.report.num_pinned_tokens for d in ended if d.report is not None)
        vectors += sum(d.embedding is not None for d in ended)
        loaded += sim.scheduler.moves.counters.loaded_tokens if sim.scheduler.moves else 0
    # The runs cover what they should; there is no other engine for moves.
    assert reasons == set(FinishReason) - {FinishReason.MOVED}
    assert hits and pinned and vectors and loaded
    assert preemptions or policy in ("static", "dynamic")
