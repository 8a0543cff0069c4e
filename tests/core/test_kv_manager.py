"""Block tables and prefix matching, compared with a plain dictionary of block contents."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.simulation import Setup, kv_spec
from helpers.tiers import examples
from helpers.windows import Seen, chunks, first_seen, num_sinks, sinks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvik.core.block_pool import NULL_BLOCK
from kvik.core.config import CacheConfig
from kvik.core.kv_manager import KVCacheManager
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import Request, RequestStatus
from kvik.spec.kv import group_layers
from kvik.spec.visible_keys import Budget

Content = tuple[int, str, tuple[int, ...]]  # KV group, salt, all tokens up to the block's end


def holds_seen(block: int, size: int, position: int, window: Seen) -> bool:
    """Return whether a block holds a sink, or a key that the query at a position sees."""
    first, end = block * size, (block + 1) * size
    return first < num_sinks(10**6, window) or end > first_seen(position, window)


def new_request(tokens: list[int], salt: str = "", leader: Request | None = None) -> Request:
    return Request(
        "r",
        0,
        SamplingParams(),
        tokens[:],
        len(tokens),
        max_length=1000,
        stop_ids=frozenset(),
        seed=0,
        arrival=0.0,
        cache_salt=salt,
        leader=leader,
    )


def manager(
    num_blocks: int = 49, block_size: int = 4, windows: tuple[Seen, ...] = (None,)
) -> KVCacheManager:
    groups = group_layers([kv_spec(window) for window in windows])
    return KVCacheManager(CacheConfig(block_size, num_blocks, groups))


def start(kv: KVCacheManager, request: Request) -> int:
    """Admit a request whose prompt is computed in one step; return how much of it was cached."""
    match = kv.match(request)
    assert kv.admit(request, match, len(request.token_ids)) is not None
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = request.num_written_tokens = len(request.token_ids)
    kv.commit(request)
    return match.num_tokens


class CacheMachine(RuleBasedStateMachine):
    """`contents` has the content of each published block in the order of publication, until the
    block is reallocated, or is free and an older one has the same content."""

    @initialize(
        num_blocks=st.integers(7, 29),
        block_size=st.sampled_from([1, 2, 3]),
        windows=st.sampled_from(
            [
                *((None,), (3,), (None, 4), (2, None, 5), (chunks(5),), (chunks(4), None)),
                *((sinks(2, 3),), (sinks(4, 2),)),
            ]
        ),
    )
    def build(self, num_blocks: int, block_size: int, windows: tuple[Seen, ...]) -> None:
        self.kv = manager(num_blocks, block_size, windows)
        self.windows = [group.spec.window for group in self.kv.groups]
        self.contents: dict[int, Content] = {}
        self.running: list[Request] = []

    def content(self, request: Request, group: int, i: int) -> Content:
        end = (i + 1) * self.kv.block_size
        return (group, request.cache_salt, tuple(request.token_ids[:end]))

    def may_match(self, request: Request) -> int:
        """Return the most tokens whose keys are all published, as far as the next query sees
        them."""
        published = set(self.contents.values())
        size = self.kv.block_size
        for length in range((len(request.token_ids) - 1) // size, 0, -1):
            needed = [
                self.content(request, group, i)
                for group, window in enumerate(self.windows)
                for i in range(length)
                if holds_seen(i, size, length * size, window)
            ]
            if published.issuperset(needed):
                return length * size
        return 0

    def note_new(self, tables: list[list[int]], before: set[int]) -> None:
        for block in {b for ids in tables for b in ids} - before:
            self.contents.pop(block, None)

    def note_published(self, request: Request) -> None:
        full = min(request.num_written_tokens, len(request.token_ids)) // self.kv.block_size
        for group, ids in enumerate(request.block_ids):
            for i in range(request.num_committed_blocks, full):  # once, when it became full
                if ids[i] != NULL_BLOCK and ids[i] not in self.contents:
                    self.contents[ids[i]] = self.content(request, group, i)

    def drop_copies(self) -> None:
        seen: set[Content] = set()
        for block, content in list(self.contents.items()):
            if content in seen and not self.kv.pool.ref_counts[block]:
                del self.contents[block]
            seen.add(content)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(["", "x"]),
        chunk=st.integers(1, 12),
    )
    def admit(self, tokens: list[int], salt: str, chunk: int) -> None:
        request = new_request(tokens, salt)
        match = self.kv.match(request)
        assert match.num_tokens == self.may_match(request)
        assert match.num_tokens < len(tokens)
        for group, ids in enumerate(match.block_ids):
            for i, block in enumerate(ids):
                assert block == NULL_BLOCK or self.contents[block] == self.content(
                    request, group, i
                )
        chunk = min(chunk, len(tokens) - match.num_tokens)
        free = self.kv.pool.num_free
        copies = self.kv.admit(request, match, match.num_tokens + chunk)
        if copies is None:
            assert self.kv.pool.num_free == free
            assert not request.block_ids
            return
        assert copies == []
        request.status = RequestStatus.RUNNING
        self.note_new(request.block_ids, {b for ids in match.block_ids for b in ids})
        self.running.append(request)
        self.advance(request, chunk)

    def advance(self, request: Request, count: int) -> None:
        request.num_computed_tokens += count
        request.num_written_tokens += count
        self.note_published(request)
        self.kv.commit(request)
        self.drop_copies()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), count=st.integers(1, 4), token=st.integers(0, 1))
    def grow(self, which: int, count: int, token: int) -> None:
        request = self.running[which % len(self.running)]
        while len(request.token_ids) < request.num_written_tokens + count:
            request.token_ids.append(token)
        before = {b for ids in request.block_ids for b in ids}
        if self.kv.extend(request, request.num_written_tokens + count) is not None:
            self.note_new(request.block_ids, before)
            self.advance(request, count)
        self.drop_copies()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), forget=st.sampled_from([False, False, True]))
    def free(self, which: int, forget: bool) -> None:
        request = self.running[which % len(self.running)]
        self.running.remove(request)
        if forget:
            for block in {b for ids in request.block_ids for b in ids}:
                self.contents.pop(block, None)
        self.kv.free(request, forget=forget)
        self.drop_copies()
        assert not request.block_ids

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        held = [b for r in self.running for ids in r.block_ids for b in ids if b != NULL_BLOCK]
        counts = self.kv.pool.ref_counts
        assert all(counts[b] == held.count(b) for b in range(1, self.kv.pool.num_blocks + 1))

    @invariant()
    def a_window_holds_what_it_sees_and_no_more_than_planned(self) -> None:
        size = self.kv.block_size
        for request in self.running:
            position = request.num_written_tokens
            for window, ids in zip(self.windows, request.block_ids, strict=True):
                for i, block in enumerate(ids):
                    if holds_seen(i, size, position, window):
                        assert block != NULL_BLOCK
            most = self.kv.config.max_blocks(len(request.token_ids), 12)
            assert sum(len(ids) - ids.count(NULL_BLOCK) for ids in request.block_ids) <= most


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=examples(150), stateful_step_count=30)


def test_prompt_logprobs_need_their_tokens_computed() -> None:
    kv = manager()
    start(kv, new_request(list(range(8))))
    wanting = new_request(list(range(9)))
    assert kv.match(wanting).num_tokens == 8
    for first, num_cached in ((0, 0), (4, 0), (5, 4), (8, 4)):
        wanting.params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=first)
        assert kv.match(wanting).num_tokens == num_cached


def test_without_prefix_caching_nothing_matches() -> None:
    kv = KVCacheManager(Setup(caching=False).cache)
    start(kv, new_request(list(range(8))))
    assert kv.match(new_request(list(range(9)))).num_tokens == 0
    assert kv.pool.num_cached == 0


def test_a_block_is_allocated_when_a_token_crosses_its_boundary() -> None:
    kv = manager(block_size=4)
    request = new_request([1, 2, 3])
    start(kv, request)
    for num_tokens, blocks in [(3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]:
        kv.extend(request, num_tokens)
        assert len(request.block_ids[0]) == blocks
        assert kv.pool.num_blocks - kv.pool.num_free == blocks
        assert kv.pool.num_blocks - kv.pool.min_free == blocks
    request.num_computed_tokens = 9
    assert kv.tokens([request]) == (12, 9)
    kv.free(request)
    assert kv.pool.num_blocks - kv.pool.min_free == 3  # the peak


@pytest.mark.parametrize(
    "window",
    [*(1, 3, 4, 5, 8), *map(chunks, (1, 4, 6, 13)), sinks(1, 4), sinks(4, 5), sinks(9, 1)],
)
def test_a_window_keeps_exactly_the_keys_it_sees(window: Seen) -> None:
    kv = manager(block_size=4, windows=(window,))
    request = new_request([1])
    start(kv, request)
    for position in range(1, 40):
        request.token_ids.append(1)
        kv.extend(request, position + 1)
        ids = request.block_ids[0]
        for i, block in enumerate(ids):
            assert (block != NULL_BLOCK) == holds_seen(i, 4, position, window)
        assert kv.num_allocated(request) == len(ids) - ids.count(NULL_BLOCK)
        assert kv.config.max_blocks(100, 1) >= len(ids) - ids.count(NULL_BLOCK)
        request.num_computed_tokens = request.num_written_tokens = position + 1
        kv.commit(request)


def test_a_window_matches_without_blocks_that_left_the_window() -> None:
    kv = manager(num_blocks=5, block_size=2, windows=(3,))
    request = new_request(list(range(8)))
    start(kv, request)
    held = [b for b in request.block_ids[0] if b != NULL_BLOCK]
    assert len(held) == 1  # at position 8: keys 6 and 7
    kv.free(request)
    kv.pool.forget(kv.pool.lookup((0, request.block_hashes[0])) or 0)
    match = kv.match(new_request(list(range(9))))
    assert match.num_tokens == 8
    assert match.block_ids == [[NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, *held]]


def test_a_sibling_forks_only_from_a_running_leader() -> None:
    def match(change: Any) -> int:
        kv = manager(block_size=4)
        leader = new_request(list(range(3)))
        start(kv, leader)
        leader.first_token = 1.0
        change(leader)
        return kv.match(new_request(list(range(3)), leader=leader)).num_tokens

    def preempted(leader: Request) -> None:
        leader.num_preemptions = 1

    def unfinished_prefill(leader: Request) -> None:
        leader.first_token = None

    def finished(leader: Request) -> None:
        leader.status = RequestStatus.FINISHED

    assert match(lambda leader: None) == 2
    assert [match(change) for change in (preempted, unfinished_prefill, finished)] == [0, 0, 0]


def test_blocks_in_flight_are_not_published() -> None:
    kv = manager(block_size=4)
    request = new_request(list(range(9)))
    kv.admit(request, kv.match(request), 9)
    request.num_computed_tokens, request.num_written_tokens = 9, 5  # a step is in flight
    kv.commit(request)
    assert kv.match(new_request(list(range(9)))).num_tokens == 4


def test_a_failed_allocation_changes_nothing() -> None:
    kv = manager(num_blocks=3, block_size=4)
    first = new_request(list(range(8)))
    start(kv, first)
    second = new_request(list(range(8)) + [1] * 8)
    match = kv.match(second)
    assert match.num_tokens == 8
    assert kv.demand(match, 16, 16) > kv.pool.num_free
    assert kv.admit(second, match, 16) is None
    assert kv.extend(first, 20) is None
    assert kv.pool.ref_counts[1:] == [1, 1, 0]
    assert kv.demand(match, 12, 16) <= kv.pool.num_free
    assert kv.usage == pytest.approx(2 / 3)


def test_the_start_of_a_freed_prefix_is_evicted_last() -> None:
    kv = manager(num_blocks=4, block_size=2)
    request = new_request(list(range(8)))
    start(kv, request)
    kv.free(request)
    start(kv, new_request([9] * 3))  # takes two blocks
    assert kv.match(new_request(list(range(8)))).num_tokens == 4


def test_free_blocks_of_a_match_count_as_taken() -> None:
    kv = manager(num_blocks=3, block_size=2)
    request = new_request([1, 2, 3, 4])
    start(kv, request)
    kv.free(request)
    again = new_request([1, 2, 3, 4, 5, 6, 7])
    match = kv.match(again)  # 3 free, of which the match takes 2
    assert kv.demand(match, 7, 8) > kv.pool.num_free == 3 >= kv.demand(match, 6, 8)
    assert kv.admit(again, match, 7) is None
    assert kv.pool.num_free == 3
    assert kv.admit(again, match, 6) == []


def test_a_fork_needs_a_block_for_its_copy() -> None:
    kv = manager(num_blocks=2, block_size=4)
    leader = new_request([1, 2, 3])
    start(kv, leader)
    leader.first_token = 1.0
    sibling = new_request([1, 2, 3], leader=leader)
    match = kv.match(sibling)
    assert match.num_tokens == 2
    assert kv.demand(match, 4, 4) <= kv.pool.num_free
    assert kv.demand(match, 5, 4) > kv.pool.num_free


def test_a_cut_takes_no_block_that_the_same_plan_copies() -> None:
    """The copy comes after the cut."""
    kv = manager(6, windows=(Budget(4, 1, 2, 4),))
    first, cut = new_request([1, 2, 3, 4, 5, 6]), new_request([9] * 6)
    again = new_request([*first.token_ids, 7])
    first.num_prompt_tokens = again.num_prompt_tokens = 3  # so these are not cut
    again.num_kept_tokens = 6
    start(kv, first)
    kv.commit_rest(first)
    kv.free(first)
    start(kv, cut)
    match = kv.match(again)
    assert match.num_tokens == 6
    ((source, _),) = kv.admit(again, match, 7) or ()
    assert kv.pool.num_free == 1 and kv.extend(cut, 7) is None
    assert kv.take_cuts() == []  # the next plan may take it
    assert kv.extend(cut, 7) and source in cut.block_ids[0]


def test_blocks_outside_the_window_are_freed_before_allocation() -> None:
    kv = manager(num_blocks=3, block_size=4, windows=(6,))  # 3 blocks
    assert kv.config.max_blocks(100, 2) == 3
    request = new_request([1] * 8)
    start(kv, request)
    for written in (9, 10, 11):  # no block boundary is crossed, but key 5 leaves the window
        request.token_ids.append(1)
        kv.extend(request, written)
        request.num_computed_tokens = request.num_written_tokens = written
    assert kv.extend(request, 13) is not None
    assert request.block_ids[0][0] == NULL_BLOCK
