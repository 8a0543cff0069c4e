"""A step whose rows have drafts: which are right, and what that leaves in tables and cache."""

from __future__ import annotations

import numpy as np
import torch

from kvik.frozen import frozen
from kvik.kernels.upload import upload
from kvik.worker.graphs import Network, StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.rejection import Chains
from kvik.worker.request_table import RequestTable
from kvik.worker.sampling_batch import NOTHING, Guesses, Offers
from kvik.worker.speculator import Speculator
from kvik.worker.step_sampler import StepSampler, StepTokens
from kvik.worker.tree_rejection import Trees


@frozen
class CheckedDrafts:
    """Attributes:
    found: tokens of the rows of logits.
    first: [sampling rows], the first row of logits of each.
    rows: [tokens], the rows of logits whose tokens are output, one sampling row after another.
    lengths: [sampling rows], how many of them are of each.
    """

    found: StepTokens
    first: np.ndarray
    rows: np.ndarray
    lengths: np.ndarray

    @property
    def newest(self) -> np.ndarray:
        """[sampling rows], the row of logits that gave each its newest token."""
        newest: np.ndarray = self.rows[self.lengths.cumsum() - 1]
        return newest

    def paths(self, drafts: int) -> np.ndarray:
        """[sampling rows, drafts] bool, which of the drafts of each were accepted: the row of
        logits after a draft is output if and only if the draft is."""
        owners = np.arange(len(self.first)).repeat(self.lengths)
        found = np.zeros((len(self.first), 1 + drafts), np.bool_)
        found[owners, self.rows - self.first[owners]] = True
        return found[:, 1:]


class DraftChecker:
    def __init__(
        self,
        network: Network,
        table: RequestTable,
        sampler: StepSampler,
        speculator: Speculator,
        device: torch.device,
    ) -> None:
        self.network = network
        self.table = table
        self.sampler = sampler
        self.speculator = speculator
        self.device = device

    def check(self, batch: InputBatch, output: StepOutput, counts: np.ndarray) -> CheckedDrafts:
        """Sample the step and accept drafts. Of each request the table has the accepted tokens
        then, and the cache their K and V; what was rejected is not counted any more.

        Args:
            counts: [sampling rows], drafts of each.
        """
        table, slots = self.table, batch.slots[batch.sampling_rows]
        tokens, tree = batch.logit_tokens, self.speculator.tree
        assert tokens is not None and batch.logit_positions is not None
        rows: Chains | Trees
        judged: Guesses | Offers | None = None
        if tree is None:
            rows = Chains.of(counts, tokens)
            judged = self.speculator.guesses(slots, rows)
        else:
            rows = Trees.of(tree, counts, tokens)
        typical = self.speculator.speculation.typical
        if typical is not None:
            judged = Offers(*rows.offers(), typical)
        judging = slots.repeat(counts + 1)  # [logit rows]
        found = self.sampler.sample(
            output,
            judging,
            batch.logit_positions + 1,
            rows.supposed() if self.sampler.sampling.reads_output(slots) else NOTHING,
            judged,
        )
        bad = None
        if found.bad_rows:
            bad = np.zeros(len(judging), np.bool_)
            bad[list(found.bad_rows)] = True
        kept, lengths = rows.output(found.token_ids, bad)
        if tree is not None:
            self._gather(slots, rows.starts[:-1], kept, lengths)
        table.num_computed[slots] -= (counts + 1 - lengths).astype(np.int32)
        table.append_runs(slots, lengths, found.token_ids[kept])
        return CheckedDrafts(found, rows.starts[:-1], kept, lengths)

    def _gather(
        self, slots: np.ndarray, first: np.ndarray, kept: np.ndarray, lengths: np.ndarray
    ) -> None:
        """Move the K and V of accepted paths to where they would lie without the rest of the tree.

        Args:
            slots, first, lengths: [rows], see `CheckedDrafts`. kept: [tokens], its `rows`.
        """
        owners = np.repeat(np.arange(len(slots)), lengths)
        nodes = kept - first[owners]
        depths = np.arange(len(kept)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        moved = np.flatnonzero(nodes != depths)
        if not len(moved):
            return
        owner = slots[owners[moved]]
        root = self.table.num_tokens[owner].astype(np.int64) - 1
        for group, layers in enumerate(self.network.groups):
            source = self._kv_positions(group, owner, root + nodes[moved])
            target = self._kv_positions(group, owner, root + depths[moved])
            for layer in layers.layers:
                self.network.backend.move(self.network.kv[layer], source, target)

    def _kv_positions(self, group: int, slots: np.ndarray, places: np.ndarray) -> torch.Tensor:
        block, offset = np.divmod(places, self.table.block_size)
        blocks = self.table.block_tables[group][slots, block].astype(np.int64)
        return upload(blocks * self.table.block_size + offset, self.device)
