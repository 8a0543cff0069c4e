"""Which blocks hold a draft model's K and V, and of which tokens."""

from __future__ import annotations

import numpy as np

from kvik.worker.request_table import RequestTable

UNKNOWN = 0  # tag of a block that holds nothing, or not all of a run of tokens


class FilledBlocks:
    """A block has a tag: a hash of all tokens up to its end. A request that finds the tag of its
    own tokens at one of its blocks need not compute them, whoever did it before. So nobody need say
    when a block changes hands: it loses its tag when it is written to.

    A tag that is met by chance costs drafts, not answers.
    """

    def __init__(self, table: RequestTable, num_blocks: int) -> None:
        """
        Args:
            table: of the draft model.
            num_blocks: of the pool.
        """
        slots = len(table.num_tokens)
        self._table = table
        self._blocks = table.block_tables[0]  # of every group
        self._tags = np.full(num_blocks, UNKNOWN, np.int64)
        self._whole = np.zeros(slots, np.int64)  # blocks of each slot whose tag is known
        self._last = np.full(slots, UNKNOWN, np.int64)  # tag of the last of them

    def enter(self, slot: int) -> None:
        """A request of which nothing is known."""
        self._whole[slot], self._last[slot] = 0, UNKNOWN

    def find(self, slot: int) -> None:
        """Count as computed what the slot's next blocks hold. The newest token is never counted:
        its logits are wanted."""
        table, size = self._table, self._table.block_size
        whole = int(self._whole[slot])
        if whole * size != table.num_computed[slot]:
            return  # within a block
        while (whole + 1) * size < table.num_tokens[slot]:
            tag = self._tag(slot, whole)
            if self._tags[self._blocks[slot, whole]] != tag:
                break
            whole += 1
            self._whole[slot], self._last[slot] = whole, tag
        table.num_computed[slot] = whole * size

    def note(self, slots: np.ndarray) -> None:
        """More of some slots is computed: tag the blocks that are full."""
        full = self._table.num_computed[slots] // self._table.block_size
        for i in np.flatnonzero(full > self._whole[slots]).tolist():
            slot = int(slots[i])
            for index in range(int(self._whole[slot]), int(full[i])):
                tag = self._tag(slot, index)
                self._tags[self._blocks[slot, index]] = tag
                self._whole[slot], self._last[slot] = index + 1, tag

    def overwrite(self, slots: np.ndarray, places: np.ndarray, counts: np.ndarray) -> None:
        """So many places of each slot are about to be written.

        Args:
            slots, places, counts: [rows], from which place on, and how many; at least 1.
        """
        size = self._table.block_size
        first, last = places // size, (places + counts - 1) // size
        self._tags[self._blocks[slots, first]] = UNKNOWN
        for index in range(1, int((last - first).max()) + 1):
            touched = first + index <= last
            self._tags[self._blocks[slots[touched], first[touched] + index]] = UNKNOWN

    def _tag(self, slot: int, index: int) -> int:
        """What the slot's next block would have, if it is full."""
        size = self._table.block_size
        tokens = self._table.token_ids[slot, index * size : (index + 1) * size]
        return hash((int(self._last[slot]), tokens.tobytes())) or 1
