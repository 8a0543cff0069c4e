"""Random service under every policy: each request gets its own tokens.

The fake worker checks every key that every forward sees; the simulation checks invariants
after each call. The second half breaks the core on purpose and expects that to be detected.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from helpers.simulation import Setup, Simulation
from helpers.tiers import runs
from helpers.windows import Seen, chunks

from kvik.core import kv_manager
from kvik.core.block_pool import BlockPool, block_hash, extend_hashes, root_hash
from kvik.core.config import POLICIES
from kvik.core.kv_manager import KVCacheManager
from kvik.core.scheduler import Scheduler
from kvik.core.types import NEVER, FinishReason, Request
from kvik.spec.visible_keys import Budget, Window

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


Patch = Callable[[pytest.MonkeyPatch], None]


def breaks_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    admit = KVCacheManager.admit

    def without_copies(*args: Any) -> Any:
        made = admit(*args)
        return made and []

    patch.setattr(KVCacheManager, "admit", without_copies)


def breaks_the_hash_chain(patch: pytest.MonkeyPatch) -> None:
    def unchained(
        hashes: list[bytes], tokens: list[int], block_size: int, salt: str, num_blocks: int
    ) -> None:
        for i in range(len(hashes), num_blocks):
            block = tokens[i * block_size : (i + 1) * block_size]
            hashes.append(block_hash(root_hash(salt), block))

    patch.setattr(kv_manager, "extend_hashes", unchained)
    patch.setattr("kvik.core.invariants.extend_hashes", unchained)


def breaks_salts(patch: pytest.MonkeyPatch) -> None:
    def unsalted(
        hashes: list[bytes], tokens: list[int], block_size: int, salt: str, num_blocks: int
    ) -> None:
        extend_hashes(hashes, tokens, block_size, "", num_blocks)

    patch.setattr(kv_manager, "extend_hashes", unsalted)
    patch.setattr("kvik.core.invariants.extend_hashes", unsalted)


def breaks_windows(patch: pytest.MonkeyPatch) -> None:
    first_key = Window.first_key

    def one_short(window: Window, position: int, prompt: int | None = None) -> int:
        return first_key(window, position + 1, prompt)

    patch.setattr(Window, "first_key", one_short)


def publishes_promises(patch: pytest.MonkeyPatch) -> None:
    """Publish blocks that a step in flight will write, although it may fail."""
    commit = KVCacheManager.commit

    def too_early(self: KVCacheManager, request: Request) -> None:
        written, request.num_written_tokens = (
            request.num_written_tokens,
            request.num_computed_tokens,
        )
        commit(self, request)
        request.num_written_tokens = written

    patch.setattr(KVCacheManager, "commit", too_early)


def keeps_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    deliver = Scheduler._deliver

    def optimistic(self: Scheduler, request: Request, *args: Any) -> Any:
        computed = request.num_computed_tokens
        delta = deliver(self, request, *args)
        if request.num_computed_tokens:
            request.num_computed_tokens = computed
        return delta

    patch.setattr(Scheduler, "_deliver", optimistic)


def keeps_what_blocks_cached(patch: pytest.MonkeyPatch) -> None:
    allocate = BlockPool.allocate

    def forgetful(self: BlockPool, count: int) -> list[int]:
        index = dict(self._index)
        blocks = allocate(self, count)
        self._index = index
        return blocks

    patch.setattr(BlockPool, "allocate", forgetful)


@pytest.mark.parametrize(
    "bug",
    [
        breaks_copy_on_write,
        breaks_the_hash_chain,
        breaks_salts,
        breaks_windows,
        publishes_promises,
        keeps_rejected_drafts,
        keeps_what_blocks_cached,
    ],
)
def test_a_broken_core_is_detected(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        for seed, windows, depth in product(range(12), WINDOWS, (1, 2)):
            run(seed, "fcfs", windows, depth)


def straddles_cuts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_up_to_cut", lambda self, request, start, chunk: chunk)


def hits_all_that_is_cached(patch: pytest.MonkeyPatch) -> None:
    """The queries that choose the kept tokens are not computed."""
    patch.setattr(
        KVCacheManager, "num_cacheable", lambda self, request: request.num_cacheable_tokens
    )


def publishes_what_was_made_of_the_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "num_public", lambda self, request, blocks: blocks)


def cuts_too_early(patch: pytest.MonkeyPatch) -> None:
    """Some dropped tokens are not published yet."""
    patch.setattr(Scheduler, "_waits_to_cut", lambda self, request: False)


def writes_to_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    cut = KVCacheManager._cut

    def in_place(self: KVCacheManager, request: Request) -> None:
        before = [ids[:] for ids in request.block_ids]
        cut(self, request)
        for made, old in zip(self._cuts, before, strict=False):
            first = made.first_key // self.block_size
            made.block_ids[:] = old[first : first + len(made.block_ids)]

    patch.setattr(KVCacheManager, "_cut", in_place)


def forgets_to_cut_again(patch: pytest.MonkeyPatch) -> None:
    after = KVCacheManager.cut_after

    def once(self: KVCacheManager, request: Request, num_tokens: int) -> int:
        return NEVER if request.num_cut_tokens else after(self, request, num_tokens)

    patch.setattr(KVCacheManager, "cut_after", once)


@pytest.mark.parametrize(
    "bug",
    [
        straddles_cuts,
        hits_all_that_is_cached,
        publishes_what_was_made_of_the_kept,
        cuts_too_early,
        writes_to_shared_blocks,
        forgets_to_cut_again,
    ],
)
def test_broken_budgets_are_detected(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        for seed, budgets, depth in product(range(12), BUDGETS, (1, 2)):
            run(seed, "fcfs", budgets, depth)
