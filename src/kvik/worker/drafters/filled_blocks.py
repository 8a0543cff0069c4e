"""Which blocks hold a draft model's K and V, and of which tokens."""

from __future__ import annotations

import numpy as np

from kvik.worker.request_table import RequestTable

UNKNOWN = 0  # tag of a block that holds nothing, or not all of a run of tokens
_MODULUS = 1 << 64  # numpy's unsigned integers wrap around there
_BASE = 0x9E3779B97F4A7C15  # this over the golden ratio


class FilledBlocks:
    """A block has a tag: a hash of all tokens up to its end. A request that finds the tag of its
    own tokens at one of its blocks need not compute them, whoever did it before. So nobody need say
    when a block changes hands: it loses its tag when it is written to.

    A tag that is met by chance costs drafts, not answers. So a hash is enough that numpy computes
    of many blocks at once: the tag of the block before times a constant, plus the tokens times
    random numbers, modulo 2^64.
    """

    def __init__(self, table: RequestTable, num_blocks: int) -> None:
        """
        Args:
            table: of the draft model.
            num_blocks: of the pool.
        """
        slots, size = len(table.num_tokens), table.block_size
        self._table = table
        self._blocks = table.block_tables[0]  # of every group
        self._tags = np.full(num_blocks, UNKNOWN, np.uint64)
        self._whole = np.zeros(slots, np.int64)  # blocks of each slot whose tag is known
        self._last = np.full(slots, UNKNOWN, np.uint64)  # tag of the last of them
        factors = np.random.default_rng(0).integers(_MODULUS, size=size, dtype=np.uint64)
        self._factors = factors | np.uint64(1)  # odd: no change of one token is lost

    def enter(self, slot: int) -> None:
        """A request of which nothing is known."""
        self._whole[slot], self._last[slot] = 0, UNKNOWN

    def find(self, slots: np.ndarray) -> None:
        """Count as computed what the next blocks of some slots hold. The newest token is never
        counted: its logits are wanted."""
        table, size = self._table, self._table.block_size
        self.note(np.arange(len(self._whole)))  # whoever may hold them
        for slot in slots.tolist():
            whole = int(self._whole[slot])
            if whole * size != table.num_computed[slot]:
                continue  # within a block
            end = max(whole, (int(table.num_tokens[slot]) - 1) // size)
            tags = self._run(slot, end)
            missing = np.flatnonzero(self._tags[self._blocks[slot, whole:end]] != tags)
            count = int(missing[0]) if len(missing) else end - whole
            self._know(slot, tags[:count])
            table.num_computed[slot] = (whole + count) * size

    def note(self, slots: np.ndarray) -> None:
        """Tag the blocks of some slots that are full. To be called before they are given away."""
        table = self._table
        full = table.num_computed[slots] // table.block_size
        for row in np.flatnonzero(full > self._whole[slots]).tolist():
            slot, end = int(slots[row]), int(full[row])
            tags = self._run(slot, end)
            self._tags[self._blocks[slot, self._whole[slot] : end]] = tags
            self._know(slot, tags)

    def overwrite(self, blocks: np.ndarray) -> None:
        """Some blocks are about to be written to."""
        self._tags[blocks] = UNKNOWN

    def _know(self, slot: int, tags: np.ndarray) -> None:
        """The tags of a slot's next blocks."""
        if len(tags):
            self._whole[slot] += len(tags)
            self._last[slot] = tags[-1]

    def _run(self, slot: int, end: int) -> np.ndarray:
        """[blocks] uint64, what the tags of a slot's next blocks are, up to the `end`th, if they
        are full."""
        size, begin, tags = self._table.block_size, int(self._whole[slot]), []
        tokens = self._table.token_ids[slot, begin * size : end * size].astype(np.uint64)
        tag = int(self._last[slot])
        for more in (tokens.reshape(-1, size) * self._factors).sum(axis=1).tolist():
            tag = (tag * _BASE + more) % _MODULUS | 1  # never `UNKNOWN`
            tags.append(tag)
        return np.array(tags, np.uint64)
