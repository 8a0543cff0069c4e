"""A small model guesses what a large one will say (Leviathan et al. 2023, 2211.17192).

Its K/V lies in storages of its own under the block ids of the large one, so block tables, prefix
hits and preemption are shared, and the scheduler knows of one cache only.

Like a request in the scheduler, a slot catches up with what is known of it, in chunks under a
budget, and drafts once it has. So the draft model computes nothing while it is not asked.
"""

from __future__ import annotations

import numpy as np

from kvik.worker.drafters.base import DraftRows, Drafts
from kvik.worker.drafters.draft_network import DraftNetwork
from kvik.worker.drafters.filled_blocks import FilledBlocks
from kvik.worker.drafters.guessing import Guessing
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_table import SamplingTable

NONE = -1  # no token


class DraftModel:
    """Chains of drafts from a model with a cache of its own."""

    def __init__(
        self,
        network: DraftNetwork,
        sampler: Sampler,
        sampling: SamplingTable,
        num_blocks: int,
        most_drafts: int,
        room: int,
    ) -> None:
        """
        Args:
            sampling: of the target.
            num_blocks: of the target's pool.
            most_drafts: of a request.
            room: bytes that sampling may take beside logits and probabilities.
        """
        self.network = network
        self.sampler = sampler
        self._sampling = sampling
        self._room = room
        self._table = network.table
        self._filled = FilledBlocks(network.table, num_blocks)
        # Drafts of each slot of which there is K and V behind that of the known tokens.
        self._ahead = np.full((len(network.table.num_tokens), most_drafts + 1), NONE, np.int64)
        self._depths = np.arange(most_drafts + 1)

    def enter(self, slot: int) -> None:
        self._filled.enter(slot)
        self._table.num_computed[slot] = 0
        self._ahead[slot] = NONE

    def leave(self, slot: int) -> None:
        self._filled.note(np.array([slot]))
        self._ahead[slot] = NONE

    def propose(self, rows: DraftRows) -> Drafts:
        network, slots = self.network, rows.slots
        network.prepare()
        known = self._table.num_tokens[slots].astype(np.int64)
        computed = self._settle(slots, known)
        # The last draft is not computed, so it may lie beyond what the model knows.
        limits = np.minimum(rows.limits, network.max_context + 1 - known)
        missing, chunks = self._missing(slots, known, computed, limits > 0)
        counts = limits * ((chunks == missing) & (chunks > 0))
        going = (-counts).argsort(kind="stable")  # those with most drafts first
        if np.count_nonzero(chunks) < len(slots):
            going = going[chunks[going] > 0]
        if not len(going):
            return _none(len(slots))
        drafted = counts[going]
        forwards = network.forwards(slots[going], computed[going], chunks[going], drafted)
        self._filled.overwrite(forwards.blocks)
        output = forwards.first()
        most = int(drafted[0])
        if not most:
            return _none(len(slots))
        chosen = going[: np.count_nonzero(drafted)]
        guessing = Guessing(self.sampler, self._sampling, rows, chosen, known, counts, self._room)
        tokens = guessing.draft(0, *network.logits(output))
        for depth in range(1, most):
            output = forwards.follow(tokens)
            tokens = guessing.draft(depth, *network.logits(output))
        found = np.empty((len(slots), most), np.int64)
        found.fill(NONE)
        found[chosen] = guessing.told()
        self._ahead[slots, :most] = found
        self._ahead[slots, counts - 1] = NONE  # of the last one there is no K and V
        return Drafts(counts, found[found != NONE], probs=guessing.probs)

    def _settle(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Drafts that turned out right need not be computed again.

        Args:
            slots, known: [rows], tokens of each.

        Returns:
            [rows] int64, how many of them are computed.
        """
        table, ahead = self._table, self._ahead.take(slots, axis=0)
        first = table.num_computed[slots].astype(np.int64)
        # In the flattened table, where what lies beyond the end of a row is not counted below.
        places = (first + slots * table.token_ids.shape[1])[:, None] + self._depths
        right = (table.token_ids.take(places, mode="clip") != ahead).argmax(axis=1)
        # The newest token is computed anyway: its logits are wanted.
        computed = np.minimum(first + right, known - 1)
        table.num_computed[slots] = computed.astype(np.int32)
        self._ahead[slots] = NONE
        return computed

    def _missing(
        self, slots: np.ndarray, known: np.ndarray, computed: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Args:
            known, computed: [rows], tokens of each; what is found to be computed is added to the
                latter.
            wanted: [rows] bool, who wants drafts.

        Returns:
            [rows] tokens of those that are not computed, and how many of them the next forward may
            compute.
        """
        table, budget = self._table, self.network.max_tokens
        missing = (known - computed) * wanted
        if max(missing.tolist()) <= table.block_size:  # as nearly always
            return missing, _within(missing, budget)
        behind = np.flatnonzero(missing > table.block_size)
        self._filled.find(slots[behind])
        computed[behind] = table.num_computed[slots[behind]]
        missing[behind] = known[behind] - computed[behind]
        chunks = missing.copy()
        chunks[self._repeated(slots, behind)] = 0
        return missing, _within(chunks, budget)

    def _repeated(self, slots: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """Which of the rows `behind` would compute a block that another of them computes already:
        they share it, as siblings share their prompt, and wait until it is filled."""
        table, some = self._table, slots[behind]
        computed = table.num_computed[some]
        blocks = table.block_tables[0][some, computed // table.block_size]
        furthest = np.argsort(-computed, kind="stable")
        _, first = np.unique(blocks[furthest], return_index=True)
        return np.delete(behind, furthest[first])


def _none(rows: int) -> Drafts:
    return Drafts(np.zeros(rows, np.int64), np.zeros(0, np.int64))


def _within(chunks: np.ndarray, budget: int) -> np.ndarray:
    """Cut so that their sum is within the budget; short ones first, as they are nearly done."""
    if sum(chunks.tolist()) <= budget:
        return chunks
    order = np.argsort(chunks, kind="stable")
    sums = np.minimum(np.cumsum(chunks[order]), budget)
    cut = np.empty_like(chunks)
    cut[order] = np.diff(sums, prepend=0)
    return cut
