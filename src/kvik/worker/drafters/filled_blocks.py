"""The blocks that contain K and V of a draft model, and their tokens."""

from __future__ import annotations

import numpy as np

from kvik.worker.request_table import RequestTable

UNKNOWN = 0  # tag of a block that is not completely computed
_MODULUS = 1 << 64  # numpy's unsigned integers wrap around there
_BASE = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio


class FilledBlocks:
    """Tags of blocks: the tag of a block is a hash of all tokens up to its end.

    A request need not compute a block whose tag matches its own tokens, whichever request computed
    it. A block loses its tag when it is written to, so changes of its owner need no notice.

    A collision costs drafts, not correctness. So a weak hash is enough, which numpy computes for
    many blocks at once: the tag of the block before times a constant, plus the tokens times random
    numbers, modulo 2^64.
    """

    def __init__(self, table: RequestTable, pool_size: int) -> None:
        """
        Args:
            table: of the draft model.
            pool_size: blocks of the pool.
        """
        slots, size = len(table.num_tokens), table.block_size
        self._table = table
        self._blocks = table.block_tables[0]  # of every group
        self._tags = np.full(pool_size, UNKNOWN, np.uint64)
        self._num_full = np.zeros(slots, np.int64)  # blocks of each slot whose tag is known
        self._last = np.full(slots, UNKNOWN, np.uint64)  # tag of the last of them
        factors = np.random.default_rng(0).integers(_MODULUS, size=size, dtype=np.uint64)
        self._factors = factors | np.uint64(1)  # odd: no change of one token is lost

    def enter(self, slot: int) -> None:
        """Reset a slot for a new request."""
        self._num_full[slot], self._last[slot] = 0, UNKNOWN

    def find(self, slots: np.ndarray) -> None:
        """Count the tokens of matching next blocks of some slots as computed.

        The newest token is never counted, as its logits are needed."""
        table, size = self._table, self._table.block_size
        # Of all slots, as any may have computed the blocks.
        self.note(np.arange(len(self._num_full)))
        for slot in slots.tolist():
            num_full = int(self._num_full[slot])
            if num_full * size != table.num_computed[slot]:
                continue  # within a block
            end = max(num_full, (int(table.num_tokens[slot]) - 1) // size)
            tags = self._run(slot, end)
            missing = np.flatnonzero(self._tags[self._blocks[slot, num_full:end]] != tags)
            count = int(missing[0]) if len(missing) else end - num_full
            self._know(slot, tags[:count])
            table.num_computed[slot] = (num_full + count) * size

    def note(self, slots: np.ndarray) -> None:
        """Tag the full blocks of some slots; must be called before these blocks are freed."""
        table = self._table
        full = table.num_computed[slots] // table.block_size
        for row in np.flatnonzero(full > self._num_full[slots]).tolist():
            slot, end = int(slots[row]), int(full[row])
            tags = self._run(slot, end)
            self._tags[self._blocks[slot, self._num_full[slot] : end]] = tags
            self._know(slot, tags)

    def overwrite(self, blocks: np.ndarray) -> None:
        """Remove the tags of blocks that are about to be written to."""
        self._tags[blocks] = UNKNOWN

    def _know(self, slot: int, tags: np.ndarray) -> None:
        """Record the tags of a slot's next blocks."""
        if len(tags):
            self._num_full[slot] += len(tags)
            self._last[slot] = tags[-1]

    def _run(self, slot: int, end: int) -> np.ndarray:
        """Return the tags of a slot's next full blocks up to the `end`th: [blocks] uint64."""
        size, begin, tags = self._table.block_size, int(self._num_full[slot]), []
        tokens = self._table.token_ids[slot, begin * size : end * size].astype(np.uint64)
        tag = int(self._last[slot])
        for more in (tokens.reshape(-1, size) * self._factors).sum(axis=1).tolist():
            tag = (tag * _BASE + more) % _MODULUS | 1  # never `UNKNOWN`
            tags.append(tag)
        return np.array(tags, np.uint64)
