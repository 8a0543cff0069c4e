"""The block pool against a model of sets and an ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvik.core.block_pool import NULL_BLOCK, BlockKey, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """`free` lists free blocks from the first to be handed out to the last."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.refs: dict[int, int] = {}
        self.keys: dict[BlockKey, int] = {}
        self.pins: dict[int, int] = {}

    def key_of(self, block: int) -> BlockKey | None:
        return next((key for key, b in self.keys.items() if b == block), None)

    def forget(self, block: int) -> None:
        key = self.key_of(block)
        if key is not None:
            del self.keys[key]

    def append(self, block: int) -> None:
        """To the free blocks, as if released now."""
        self.free[block] = None
        if self.key_of(block) is None:
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
            self.forget(block)

    @precondition(lambda self: self.refs or self.keys)
    @rule(data=st.data())
    def acquire(self, data: Any) -> None:
        """A block in use, or a free one that still caches something."""
        block = data.draw(st.sampled_from(sorted({*self.refs, *self.keys.values()})))
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
        block = data.draw(st.sampled_from(sorted(self.keys.values())))
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
        if self.key_of(block) is None and (group, content) not in self.keys:
            self.keys[(group, content)] = block

    @precondition(lambda self: self.pool.num_blocks > 1)
    @rule(data=st.data())
    def withdraw(self, data: Any) -> None:
        block = data.draw(st.integers(1, self.pool.num_blocks - 1))
        self.pool.forget(block)
        self.forget(block)

    @rule(really=st.integers(0, 4))
    def withdraw_all(self, really: int) -> None:
        if really == 0:
            assert self.pool.forget_all() == len(self.keys)
            self.keys.clear()

    @invariant()
    def same(self) -> None:
        pool = self.pool
        assert pool.free_blocks() == [block for block in self.free if block not in self.pins]
        assert pool.num_free == len(self.free)
        assert pool.num_kept == sum(block in self.pins for block in self.free)
        assert (pool.pin_counts(), pool.num_pinned) == (self.pins, len(self.pins))
        counts = [self.refs.get(block, 0) for block in range(pool.num_blocks)]
        assert pool.ref_counts == counts
        assert dict(pool.index_items()) == self.keys
        assert pool.num_cached == len(self.keys)
        for group in (0, 1):
            for content in (b"a", b"b", b"c"):
                assert pool.lookup((group, content)) == self.keys.get((group, content))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=100, stateful_step_count=30
)


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(8)
    assert sorted(pool.allocate(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.ref_counts[NULL_BLOCK] == 0


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks)


def test_cached_blocks_are_evicted_last_and_oldest_first() -> None:
    pool = BlockPool(5)
    a, b, c, d = pool.allocate(4)
    pool.commit(a, (0, b"a"))
    pool.commit(b, (0, b"b"))
    pool.release([a])
    pool.release([b])
    pool.release([c, d])
    assert pool.allocate(4) == [d, c, a, b]
    assert pool.num_cached == 0
