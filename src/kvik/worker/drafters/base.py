"""The interface of drafters, which propose the next tokens of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from kvik.frozen import frozen

if TYPE_CHECKING:
    from kvik.worker.draft_tree import DraftTree
    from kvik.worker.graphs import StepOutput
    from kvik.worker.input_batch import InputBatch


@frozen
class DraftRows:
    """Unfinished requests that sampled in this step and may get drafts for the next one. Their
    sampled tokens are already in the tables."""

    slots: np.ndarray  # [rows] int64 on the host, no slot twice
    limits: np.ndarray  # [rows] int64 on the host, most drafts for each; at least 1
    # Returns [rows, hidden], the model's last hidden state, normalised, from which the newest token
    # was sampled. Valid until the next step. Only drafters that need it should call it, because the
    # call takes as long as a whole lookup by other drafters.
    hidden: Callable[[], Tensor]


@frozen
class Drafts:
    """Proposed tokens."""

    counts: np.ndarray  # [rows] int64, number of drafts of each row, at most its limit
    token_ids: np.ndarray  # [sum of counts] int64, row after row
    # None: each draft follows the one before it. Else row i's drafts are the first nodes of the
    # tree, in order.
    tree: DraftTree | None = None
    # [sum of counts, vocab] fp32, the distribution each draft was sampled from; None if no drafts
    # were sampled. Not read for rows of `SamplingTable.must_match`.
    probs: Tensor | None = None

    @staticmethod
    def of(
        rows: Sequence[Sequence[int]], tree: DraftTree | None = None, probs: Tensor | None = None
    ) -> Drafts:
        """Return the given drafts.

        Args:
            rows: the drafts of each row.
        """
        counts = np.array(list(map(len, rows)), np.int64)
        return Drafts(counts, np.array(list(chain.from_iterable(rows)), np.int64), tree, probs)

    @staticmethod
    def first(limits: np.ndarray, table: np.ndarray, tree: DraftTree) -> Drafts:
        """Return the first drafts of each row of a table, up to the row's limit.

        Args:
            limits: [rows] int64. table: [rows, drafts].
        """
        width = table.shape[1]
        return Drafts(np.minimum(limits, width), table[np.arange(width) < limits[:, None]], tree)

    def by_row(self) -> list[list[int]]:
        """Return the drafts of each row."""
        tokens, ends = self.token_ids.tolist(), self.counts.cumsum().tolist()
        return [tokens[begin:end] for begin, end in pairwise([0, *ends])]


class Drafter:
    """Proposes drafts. It reads the tokens of a slot from a `RequestTable`, and uses a
    `SamplingTable` if it samples. An exception only loses the drafts of the step.

    This class proposes nothing, for engines whose only drafts are forced tokens; subclasses with a
    state for each request override `enter` and `leave`."""

    def enter(self, slot: int) -> None:
        """Begin a request, or resume it after a preemption. Its tokens and blocks are in the
        table."""

    def leave(self, slot: int) -> None:
        """Forget the request of this slot, which ended or was preempted."""

    def read_step(self, batch: InputBatch, output: StepOutput) -> None:
        """Read a finished step, before proposals for its requests.

        Args:
            batch, output: of the step; the tables know its results.
        """

    def propose(self, rows: DraftRows) -> Drafts:
        return Drafts.of([()] * len(rows.slots))
