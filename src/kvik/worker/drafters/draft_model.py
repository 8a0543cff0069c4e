"""A small model guesses what a large one will say (Leviathan et al. 2023, 2211.17192).

Its K/V lies in storages of its own under the block ids of the large one, so block tables, prefix
hits and preemption are shared, and the scheduler knows of one cache only.

Like a request in the scheduler, a slot catches up with what is known of it, in chunks under a
budget, and drafts once it has. So the draft model computes nothing while it is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kvik.worker.drafters.base import DraftRows, Drafts
from kvik.worker.drafters.draft_network import Chain, DraftNetwork
from kvik.worker.drafters.filled_blocks import FilledBlocks
from kvik.worker.graphs import StepOutput
from kvik.worker.noise import DRAFT, SAMPLE
from kvik.worker.sampler import Guess, Sampler
from kvik.worker.sampling_batch import NOTHING, SamplingBatch, Supposed
from kvik.worker.sampling_table import SamplingTable


class DraftModel:
    """Chains of drafts from a model with a cache of its own."""

    def __init__(
        self,
        network: DraftNetwork,
        sampler: Sampler,
        sampling: SamplingTable,
        num_blocks: int,
        room: int,
    ) -> None:
        """
        Args:
            sampling: of the target.
            num_blocks: of the target's pool.
            room: bytes that sampling may take beside logits and probabilities.
        """
        self._network = network
        self._sampler = sampler
        self._sampling = sampling
        self._room = room
        self._table = network.table
        self._filled = FilledBlocks(network.table, num_blocks)
        # Drafts by slot, of which there is K and V behind that of the known tokens.
        self._ahead: dict[int, list[int]] = {}

    def enter(self, slot: int) -> None:
        self._filled.enter(slot)
        self._table.num_computed[slot] = 0
        self._ahead.pop(slot, None)

    def leave(self, slot: int) -> None:
        self._ahead.pop(slot, None)

    def propose(self, rows: DraftRows) -> Drafts:
        network, slots = self._network, rows.slots
        network.prepare()
        known = self._table.num_tokens[slots].astype(np.int64)
        self._settle(slots.tolist(), known.tolist())
        # The last draft is not computed, so it may lie beyond what the model knows.
        limits = np.minimum(rows.limits, network.max_context + 1 - known)
        missing, chunks = self._missing(slots, known, limits > 0)
        counts = np.where((chunks == missing) & (chunks > 0), limits, 0)
        going = np.flatnonzero(chunks)
        if not len(going):
            return Drafts([[] for _ in slots])
        some, read, drafted = slots[going], chunks[going], counts[going]
        self._filled.overwrite(
            some, self._table.num_computed[some], read + np.maximum(drafted - 1, 0)
        )
        output: StepOutput | None = None
        if len(some) < len(slots) or read.max() > 1:  # else the newest tokens begin the chain
            output = network.read(some, read, drafted > 0)
            self._filled.note(some)
            if not drafted.any():
                return Drafts([[] for _ in slots])
        found, probs = self._draft(output, rows, known, counts)
        if output is None:
            self._table.num_computed[slots] = known
            self._filled.note(slots)
        drafts = [
            of_row[:count] for of_row, count in zip(found.tolist(), counts.tolist(), strict=True)
        ]
        for slot, of_row in zip(slots.tolist(), drafts, strict=True):
            self._ahead[slot] = of_row[:-1]
        return Drafts(drafts, probs=probs)

    def _settle(self, slots: list[int], known: list[int]) -> None:
        """Drafts that turned out right need not be computed again.

        Args:
            known: tokens of each slot.
        """
        table = self._table
        for slot, end in zip(slots, known, strict=True):
            ahead = self._ahead.pop(slot, None)
            if ahead:
                first = int(table.num_computed[slot])
                # The newest token is computed anyway: its logits are wanted.
                actual = table.token_ids[slot, first : end - 1].tolist()
                pairs = enumerate(zip(ahead, actual, strict=False))
                right = min(len(ahead), len(actual))
                table.num_computed[slot] += next((i for i, (a, b) in pairs if a != b), right)

    def _newest(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        tokens: np.ndarray = self._table.token_ids[slots, known - 1].astype(np.int64)
        return tokens

    def _missing(
        self, slots: np.ndarray, known: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Args:
            known: [rows], tokens of each. wanted: [rows] bool, who wants drafts.

        Returns:
            [rows] tokens of those that are not computed, and how many of them the next forward may
            compute.
        """
        table = self._table
        missing = np.where(wanted, known - table.num_computed[slots], 0)
        behind = np.flatnonzero(missing > table.block_size)
        if not len(behind):
            return missing, _within(missing, self._network.max_tokens)
        for slot in slots[behind].tolist():
            self._filled.find(slot)
        missing[behind] = known[behind] - table.num_computed[slots[behind]]
        chunks = missing.copy()
        chunks[self._repeated(slots, behind)] = 0
        return missing, _within(chunks, self._network.max_tokens)

    def _repeated(self, slots: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """Which of the rows `behind` would compute a block that another of them computes already:
        they share it, as siblings share their prompt, and wait until it is filled."""
        table, some = self._table, slots[behind]
        computed = table.num_computed[some]
        blocks = table.block_tables[0][some, computed // table.block_size]
        furthest = np.argsort(-computed, kind="stable")
        _, first = np.unique(blocks[furthest], return_index=True)
        return np.delete(behind, furthest[first])

    def _draft(
        self, output: StepOutput | None, rows: DraftRows, known: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, Tensor | None]:
        """Drafts, one after the other.

        Args:
            output: with logits after the newest token of the rows that get any; None: the newest
                token, of every row, is all that is missing.
            known, counts: [rows], tokens and drafts of each.

        Returns:
            [rows, depths] int64, and what they were drawn from, as `Drafts.probs`.
        """
        depths, shortest = int(counts.max()), 0
        found = np.zeros((len(counts), depths), np.int64)
        first = np.cumsum(counts) - counts
        probs: Tensor | None = None
        chain: Chain | None = None
        guessing = _Guessing(self._sampler, self._sampling, rows, self._room)
        going = np.flatnonzero(counts)
        newest = self._newest(rows.slots[going], known[going])
        for depth in range(depths):
            if output is None or depth:
                if chain is None or depth == shortest:  # some rows have their drafts
                    left = counts[going] > depth
                    going, newest = going[left], newest[left]
                    shortest, places = int(counts[going].min()), known[going] + depth - 1
                    chain = self._network.chain(rows.slots[going], places, shortest - depth)
                output = chain.follow(newest)
            logits, largest = self._network.logits(output)
            guesses = guessing.draft(logits, largest, going, known + depth, found[:, :depth])
            for some, guess in guesses:
                found[some, depth] = tokens = guess.token_ids.cpu().numpy()
                if guess.probs is not None:
                    if probs is None:
                        probs = guess.probs.new_zeros(int(counts.sum()), guess.probs.shape[1])
                    at = torch.from_numpy(first[some] + depth).to(probs.device)
                    probs.index_copy_(0, at, guess.probs)
            newest = tokens if len(tokens) == len(going) else found[going, depth]
        return found, probs


class _Guessing:
    """The next drafts of some rows.

    A request that brought a seed draws its drafts with the very numbers that its tokens will be
    drawn with: where the two models agree, so do the tokens.
    """

    def __init__(
        self, sampler: Sampler, sampling: SamplingTable, rows: DraftRows, room: int
    ) -> None:
        self._sampler = sampler
        self._sampling = sampling
        self._slots = rows.slots
        self._streams = np.where(rows.certain, SAMPLE, DRAFT)
        self._at_once = sampling.rows_at_once(rows.slots, room, shares=True)
        self._plain = sampling.plain(rows.slots)
        self._reads_output = sampling.reads_output(rows.slots)

    def draft(
        self,
        logits: Tensor,
        largest: tuple[Tensor, Tensor] | None,
        going: np.ndarray,
        positions: np.ndarray,
        before: np.ndarray,
    ) -> Iterator[tuple[np.ndarray, Guess]]:
        """A part of the rows at a time.

        Args:
            logits: [going, vocab]. largest: what `Ops.largest` says of them, if that is known.
            going: numbers of these rows.
            positions: [rows], where the draft will stand.
            before: [rows, depth], drafts so far.
        """
        if len(going) <= self._at_once:
            yield going, self._guess(logits, largest, going, positions, before)
            return
        for begin in range(0, len(going), self._at_once):
            part = slice(begin, begin + self._at_once)
            some = None if largest is None else (largest[0][part], largest[1][part])
            rows = going[part]
            yield rows, self._guess(logits[part], some, rows, positions, before)

    def _guess(
        self,
        logits: Tensor,
        largest: tuple[Tensor, Tensor] | None,
        rows: np.ndarray,
        positions: np.ndarray,
        before: np.ndarray,
    ) -> Guess:
        if self._plain:
            return self._sampler.guess(logits, SamplingBatch(), largest)
        supposed = NOTHING
        if self._reads_output:
            drafts = before[rows]
            owners = np.repeat(np.arange(len(rows)), drafts.shape[1])
            supposed = Supposed(owners, drafts.reshape(-1))
        batch = self._sampling.batch(
            self._slots[rows], positions[rows], supposed, stream=self._streams[rows]
        )
        return self._sampler.guess(logits, batch, largest)


def _within(chunks: np.ndarray, budget: int) -> np.ndarray:
    """Cut so that their sum is within the budget; short ones first, as they are nearly done."""
    if chunks.sum() <= budget:
        return chunks
    order = np.argsort(chunks, kind="stable")
    sums = np.minimum(np.cumsum(chunks[order]), budget)
    cut = np.empty_like(chunks)
    cut[order] = np.diff(sums, prepend=0)
    return cut
