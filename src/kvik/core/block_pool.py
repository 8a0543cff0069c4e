"""KV blocks: ids, reference counts, an LRU free list and a hash index, every operation O(1)."""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0  # never handed out: stands for "no block here" in tables and absorbs padded writes

BlockKey = tuple[int, bytes]  # KV group, chained hash of the tokens up to the block's end


class BlockPool:
    """Owns every block id of one KV cache.

    A block nobody references is *free* and sits in the free list, but keeps its contents and its
    hash until it is handed out again: the free list is the prefix cache, least recently used
    first. Blocks without a hash are of no use to anyone and go to the front.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[BlockKey, int] = {}
        # A doubly linked list threaded through two arrays; the null block is its sentinel.
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self.num_free = num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each, forgetting what they cached."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} free")
        following, keys, refs = self._next, self._keys, self.ref_counts
        blocks = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            key = keys[block]
            if key is not None:
                del self._index[key]
                keys[block] = None
            refs[block] = 1
            blocks.append(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._previous[block] = NULL_BLOCK
        self.num_free -= count
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference; a free block leaves the free list with its contents."""
        if self.ref_counts[block] == 0:
            before, after = self._previous[block], self._next[block]
            self._next[before] = after
            self._previous[after] = before
            self.num_free -= 1
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less for each; the last listed is evicted last."""
        for block in blocks:
            count = self.ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} released more often than acquired")
            self.ref_counts[block] = count
            if count == 0:
                if self._keys[block] is None:
                    self._insert(NULL_BLOCK, block, self._next[NULL_BLOCK])
                else:
                    self._insert(self._previous[NULL_BLOCK], block, NULL_BLOCK)

    def lookup(self, key: BlockKey) -> int | None:
        """The block that holds this content, free or not."""
        return self._index.get(key)

    def commit(self, block: int, key: BlockKey) -> None:
        """Publish a full block's content. The first block with a content keeps the entry."""
        if self._keys[block] is None and key not in self._index:
            self._keys[block] = key
            self._index[key] = block

    def forget(self, block: int) -> None:
        """Withdraw a block's content from the index: it must not be matched any more."""
        key = self._keys[block]
        if key is None:
            return
        del self._index[key]
        self._keys[block] = None

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be matched."""
        return len(self._index)

    def free_blocks(self) -> list[int]:
        """The free list from the first to be handed out to the last (for audits)."""
        blocks = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def index_items(self) -> list[tuple[BlockKey, int]]:
        """Every published content and its block (for audits)."""
        return list(self._index.items())

    def _insert(self, before: int, block: int, after: int) -> None:
        self._next[before] = block
        self._previous[block] = before
        self._next[block] = after
        self._previous[after] = block
        self.num_free += 1
