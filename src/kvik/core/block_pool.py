"""KV blocks: ids, reference counts, an LRU free list and a hash index, every operation O(1).

The prefix cache needs no blocks of its own: a block that no request refers to keeps its content,
and can be matched, until it is allocated again. The index of contents replaces the radix tree of
SGLang (Zheng et al. 2024, arXiv 2312.07104): the hash of a block covers its whole prefix.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvik.core.config import RESERVED_BLOCKS

# Block hashes
#
# The hash of a block covers its tokens and the hash of the block before it, so equal hashes mean
# equal prefixes, and the blocks of all requests form an implicit prefix tree. The chain starts from
# a salt: requests under different salts never see each other's blocks.

HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Return the hash that a chain of block hashes under this salt starts from."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a full block of `tokens` that follows the prefix hashed to `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: str, num_blocks: int
) -> None:
    """Append the hashes of the full blocks of `tokens` that `hashes` lacks, up to `num_blocks`."""
    parent = hashes[-1] if hashes else root_hash(salt)
    for i in range(len(hashes), num_blocks):
        parent = block_hash(parent, tokens[i * block_size : (i + 1) * block_size])
        hashes.append(parent)


NULL_BLOCK = 0  # never allocated: stands for "no block" in tables and absorbs padded writes

BlockKey = tuple[int, bytes]  # KV group, chained hash of the tokens up to the block's end


# What a router needs to know about a prefix cache.


@dataclass(frozen=True, slots=True)
class ContentChanges:
    """Changes of the contents of a pool since the previous `ContentChanges`."""

    number: int  # one more than the previous number
    # stored, removed: hashes of blocks that became matchable, or stopped being so.
    stored: list[bytes]
    removed: list[bytes]
    cleared: bool = False  # everything reported before is void


class ContentLog:
    """Collects changes of one KV group's contents. A content is present while the cache or a tier
    has it. Only the last change of each hash counts."""

    def __init__(self, group: int = 0) -> None:
        self.group = group
        self._number = 0
        self._changes: dict[bytes, bool] = {}  # hash -> whether it can be matched
        self._keepers = Counter[bytes]()
        self._cleared = True

    def note(self, key: BlockKey, *, stored: bool) -> None:
        """Note that a content was published or withdrawn in one place."""
        group, content = key
        if group != self.group:
            return
        before = self._keepers[content]
        self._keepers[content] += 1 if stored else -1
        if not self._keepers[content]:
            del self._keepers[content]
        if bool(before) != (content in self._keepers):
            self._changes[content] = stored

    def restart(self) -> None:
        """Forget everything; each place then notes all its contents again."""
        self._cleared = True
        self._changes, self._keepers = {}, Counter()

    def take(self) -> ContentChanges | None:
        """Return the changes since the last call; None: there are none."""
        if not self._changes and not self._cleared:
            return None
        changes, cleared = self._changes, self._cleared
        self._changes, self._cleared = {}, False
        self._number += 1
        stored = [content for content, is_stored in changes.items() if is_stored]
        removed = [content for content, is_stored in changes.items() if not is_stored]
        return ContentChanges(self._number, stored, [] if cleared else removed, cleared)


class BlockPool:
    """Owns every block id of one KV cache.

    A block without references is *free* and in the free list, but keeps its contents and its hash
    until it is allocated again: the free list is the prefix cache, least recently used first.
    Blocks without a hash cache nothing and go to the front.

    Requests that compute the same prefix at the same time fill a block each. The first one is
    indexed; the others are its *copies* while they are referenced. When the indexed block is
    allocated again or forgotten, its oldest copy takes its place. A copy without references is a
    free block without content, and the indexed block counts as just used.

    A *pinned* block without references is kept outside the free list, and cannot be allocated until
    it is unpinned.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        size = num_blocks + RESERVED_BLOCKS
        self.ref_counts = [0] * size
        self._keys: list[BlockKey | None] = [None] * size
        self._index: dict[BlockKey, int] = {}
        self._copies: dict[int, BlockKey] = {}  # referenced blocks with another's content
        self._copies_of: dict[BlockKey, dict[int, None]] = {}  # the same by content; oldest first
        # A doubly linked list threaded through two arrays; the null block is its sentinel.
        self._next = [*range(1, size), NULL_BLOCK]
        self._previous = [num_blocks, *range(num_blocks)]
        self.num_free = num_blocks  # without references, pinned ones included
        self.num_kept = 0  # of these, pinned
        self.min_free = self.num_free  # minimum of `num_free` since the start
        self._pins: dict[int, int] = {}  # how often a block is pinned
        # Blocks that were allocated since the start, or since their memory was given back.
        self._touched = bytearray(size)
        self.num_touched = 0
        self.num_given_back = 0  # since the start
        self._log: ContentLog | None = None

    def log_to(self, log: ContentLog) -> None:
        """Note all contents in a log, and from now on all changes."""
        self._log = log
        for key in self._index:
            log.note(key, stored=True)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each, forgetting their contents."""
        if count > self.num_free - self.num_kept:
            free = self.num_free - self.num_kept
            raise RuntimeError(f"{count} blocks wanted, {free} free and not pinned")
        following, keys, refs = self._next, self._keys, self.ref_counts
        blocks = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            key = keys[block]
            if key is not None:
                self._withdraw(block, key)
            refs[block] = 1
            self.num_touched += not self._touched[block]
            self._touched[block] = True
            blocks.append(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._previous[block] = NULL_BLOCK
        self.num_free -= count
        self.min_free = min(self.min_free, self.num_free)
        return blocks

    def acquire(self, block: int) -> None:
        """Add a reference; a free block leaves the free list and keeps its contents."""
        if self.ref_counts[block] == 0:
            if block in self._pins:
                self.num_kept -= 1
            else:
                self._remove(block)
            self.num_free -= 1
            self.min_free = min(self.min_free, self.num_free)
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference of each block; the last listed is evicted last."""
        for block in blocks:
            count = self.ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} released more often than acquired")
            self.ref_counts[block] = count
            if count == 0:
                self.num_free += 1
                if block in self._copies:
                    self._use(self._index[self._drop_copy(block)])
                if block in self._pins:
                    self.num_kept += 1
                else:
                    self._append(block)

    def pin(self, block: int) -> None:
        """Keep a block's content, referenced or not, until it is unpinned as often as pinned."""
        count = self._pins.get(block, 0)
        if count == 0 and self.ref_counts[block] == 0:
            self._remove(block)
            self.num_kept += 1
        self._pins[block] = count + 1

    def unpin(self, block: int) -> None:
        """Undo one `pin`; a block without references is then free as if released now."""
        count = self._pins[block] - 1
        if count:
            self._pins[block] = count
            return
        del self._pins[block]
        if self.ref_counts[block] == 0:
            self.num_kept -= 1
            self._append(block)

    def lookup(self, key: BlockKey) -> int | None:
        """Return the block that holds this content, free or not."""
        return self._index.get(key)

    def has(self, block: int, key: BlockKey) -> bool:
        """Return whether a block has this content, and it can be matched."""
        return self._keys[block] == key or self._copies.get(block) == key

    def commit(self, block: int, key: BlockKey) -> None:
        """Publish the content of a full, referenced block. The first block with a content keeps the
        entry, and others are its copies."""
        if self._keys[block] is not None or block in self._copies:
            return
        if key in self._index:
            self._copies[block] = key
            self._copies_of.setdefault(key, {})[block] = None
        else:
            self._keys[block] = key
            self._index[key] = block
            if self._log is not None:
                self._log.note(key, stored=True)

    def forget(self, block: int) -> None:
        """Withdraw a block's content from the index: it must not be matched any more."""
        key = self._keys[block]
        if key is not None:
            self._withdraw(block, key)
        elif block in self._copies:
            self._drop_copy(block)

    def discard(self, block: int) -> None:
        """Withdraw the content of a block that is not needed again. If the block is free, it is
        allocated before all others."""
        self.forget(block)
        if self.ref_counts[block] == 0 and block not in self._pins:
            self._remove(block)
            self._append(block)

    def forget_all(self) -> int:
        """Withdraw all contents; returns how many there were."""
        count = len(self._index)
        for block in self._index.values():
            self._keys[block] = None
        if self._log is not None:
            for key in self._index:
                self._log.note(key, stored=False)
        self._index.clear()
        self._copies.clear()
        self._copies_of.clear()
        return count

    def give_back(self, count: int) -> list[int]:
        """Give back the memory of up to `count` free blocks, least recently used first. Their
        contents are withdrawn, and they are allocated after all others. Pinned blocks stay."""
        blocks: list[int] = []
        for block in self.free_blocks():
            if len(blocks) == count:
                break
            if not self._touched[block]:
                continue
            self.forget(block)
            self._touched[block] = False
            self._remove(block)
            self._link(block, self._previous[NULL_BLOCK], NULL_BLOCK)
            blocks.append(block)
        self.num_touched -= len(blocks)
        self.num_given_back += len(blocks)
        return blocks

    @property
    def num_unused(self) -> int:
        """Blocks that no request refers to and whose memory could be given back."""
        return self.num_touched - (self.num_blocks - self.num_free) - self.num_kept

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be matched."""
        return len(self._index)

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned, referenced or not."""
        return len(self._pins)

    def sample(self, every: int) -> tuple[list[int], list[bool], list[bool]]:
        """Return the state of every `every`-th block, from block 1: its number of references,
        whether its content can be matched, and whether it is pinned."""
        cached = [key is not None for key in self._keys[1::every]]
        pinned = [block in self._pins for block in range(1, len(self.ref_counts), every)]
        return self.ref_counts[1::every], cached, pinned

    def free_blocks(self) -> list[int]:
        """Return the free list in the order of allocation (for audits), without pinned blocks."""
        blocks = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def index_items(self) -> list[tuple[BlockKey, int]]:
        """Return every published content and its block (for audits)."""
        return list(self._index.items())

    def copies(self) -> dict[int, BlockKey]:
        """Return the blocks whose content is indexed under another block (for audits)."""
        return dict(self._copies)

    def pin_counts(self) -> dict[int, int]:
        """Return how often each pinned block is pinned (for audits)."""
        return dict(self._pins)

    def _withdraw(self, block: int, key: BlockKey) -> None:
        """Withdraw an indexed block's content; its oldest copy is indexed in its place."""
        self._keys[block] = None
        copies = self._copies_of.get(key)
        if copies is None:
            del self._index[key]
            if self._log is not None:
                self._log.note(key, stored=False)
            return
        copy = next(iter(copies))
        self._drop_copy(copy)
        self._keys[copy] = key
        self._index[key] = copy

    def _drop_copy(self, block: int) -> BlockKey:
        """Remove a copy. Returns the key of its content."""
        key = self._copies.pop(block)
        copies = self._copies_of[key]
        del copies[block]
        if not copies:
            del self._copies_of[key]
        return key

    def _use(self, block: int) -> None:
        """Move a block of the free list to the place it would get if it were released now."""
        if self.ref_counts[block] == 0 and block not in self._pins:
            self._remove(block)
            self._append(block)

    def _append(self, block: int) -> None:
        """Add a block to the free list: last if it caches something, else first."""
        if self._keys[block] is None:
            before, after = NULL_BLOCK, self._next[NULL_BLOCK]
        else:
            before, after = self._previous[NULL_BLOCK], NULL_BLOCK
        self._link(block, before, after)

    def _link(self, block: int, before: int, after: int) -> None:
        self._next[before] = block
        self._previous[block] = before
        self._next[block] = after
        self._previous[after] = block

    def _remove(self, block: int) -> None:
        """Remove a block from the free list."""
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
