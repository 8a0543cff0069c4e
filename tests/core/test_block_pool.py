"""The block pool against a model of sets and an ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from helpers.tiers import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvik.core.block_pool import (
    HASH_BYTES,
    BlockKey,
    BlockPool,
    block_hash,
    extend_hashes,
    root_hash,
)


class PoolMachine(RuleBasedStateMachine):
    """`free` lists free blocks in the order of allocation."""

    @initialize(num_blocks=st.integers(0, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.refs: dict[int, int] = {}
        # Blocks by content in the order of their commits; lookups find the first.
        self.keys: dict[int, BlockKey] = {}
        self.pins: dict[int, int] = {}
        self.touched: set[int] = set()  # blocks whose memory the system may have to keep

    @property
    def index(self) -> dict[BlockKey, int]:
        found: dict[BlockKey, int] = {}
        for block, key in self.keys.items():
            found.setdefault(key, block)
        return found

    def append(self, block: int) -> None:
        """Add a block to the free blocks, as if released now. A copy makes the block found by
        lookups newer."""
        self.free[block] = None
        key = self.keys.get(block)
        if key is not None and self.index[key] != block:
            del self.keys[block]
            found = self.index[key]
            if found in self.free:
                self.free.move_to_end(found)
        if block not in self.keys:
            self.free.move_to_end(block, last=False)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = [block for block in self.free if block not in self.pins]
        if count > len(free):
            with pytest.raises(RuntimeError, match="wanted"):
                self.pool.allocate(count)
            return
        expected = free[:count]
        assert self.pool.allocate(count) == expected
        for block in expected:
            del self.free[block]
            self.refs[block] = 1
            self.keys.pop(block, None)
            self.touched.add(block)

    @precondition(lambda self: self.refs or self.keys)
    @rule(data=st.data())
    def acquire(self, data: Any) -> None:
        """Acquire a block in use, or a free one that still caches content."""
        block = data.draw(st.sampled_from(sorted({*self.refs, *self.keys})))
        self.pool.acquire(block)
        self.free.pop(block, None)
        self.refs[block] = self.refs.get(block, 0) + 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        held = st.lists(st.sampled_from(sorted(self.refs)), unique=True, min_size=1)
        blocks = data.draw(held)
        self.pool.release(blocks)
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                del self.refs[block]
                self.append(block)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        block = data.draw(st.sampled_from(sorted(self.index.values())))
        self.pool.pin(block)
        self.pins[block] = self.pins.get(block, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        block = data.draw(st.sampled_from(sorted(self.pins)))
        self.pool.unpin(block)
        self.pins[block] -= 1
        if self.pins[block] == 0:
            del self.pins[block]
            if block in self.free:
                del self.free[block]
                self.append(block)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), group=st.integers(0, 1), content=st.sampled_from([b"a", b"b", b"c"]))
    def commit(self, data: Any, group: int, content: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.commit(block, (group, content))
        self.keys.setdefault(block, (group, content))

    @precondition(lambda self: self.pool.num_blocks > 0)
    @rule(data=st.data())
    def withdraw(self, data: Any) -> None:
        block = data.draw(st.integers(1, self.pool.num_blocks))
        self.pool.forget(block)
        self.keys.pop(block, None)

    @rule(count=st.integers(0, 4))
    def give_back(self, count: int) -> None:
        free = [b for b in self.free if b in self.touched and b not in self.pins]
        assert self.pool.give_back(count) == free[:count]
        for block in free[:count]:
            self.touched.remove(block)
            self.keys.pop(block, None)
            self.free.move_to_end(block)

    @rule(really=st.integers(0, 4))
    def withdraw_all(self, really: int) -> None:
        if really == 0:
            assert self.pool.forget_all() == len(self.index)
            self.keys.clear()

    @invariant()
    def same(self) -> None:
        pool = self.pool
        assert pool.free_blocks() == [block for block in self.free if block not in self.pins]
        assert pool.num_free == len(self.free)
        unused = [b for b in self.free if b in self.touched and b not in self.pins]
        assert pool.num_unused == len(unused)
        assert pool.num_kept == sum(block in self.pins for block in self.free)
        assert (pool.pin_counts(), pool.num_pinned) == (self.pins, len(self.pins))
        counts = [self.refs.get(block, 0) for block in range(pool.num_blocks + 1)]
        assert pool.ref_counts == counts
        assert dict(pool.index_items()) == self.index
        assert pool.num_cached == len(self.index)
        for group in (0, 1):
            for content in (b"a", b"b", b"c"):
                assert pool.lookup((group, content)) == self.index.get((group, content))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(100), stateful_step_count=30)


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks)


def hashes(tokens: list[int], salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, tokens, 2, salt, len(tokens) // 2)
    return found


def test_salts_separate_tenants() -> None:
    assert not set(hashes([1, 2, 3, 4], "a")) & set(hashes([1, 2, 3, 4], "b"))
    assert root_hash("") != root_hash("\ud800")  # any string is a valid salt


def test_boundaries_between_tokens_matter() -> None:
    root = root_hash("")
    assert block_hash(root, [1, 256]) != block_hash(root, [256, 1])
    assert block_hash(root, [2**31]) != block_hash(root, [2**31 - 1])
    assert len(block_hash(root, [0])) == HASH_BYTES


def test_hashes_are_extended_in_place_from_the_known_ones() -> None:
    tokens = list(range(10))
    found = hashes(tokens[:4])
    before = found[:]
    extend_hashes(found, tokens, 2, "", 5)
    assert found[:2] == before
    assert found == hashes(tokens)
    extend_hashes(found, tokens, 2, "", 3)
    assert len(found) == 5
