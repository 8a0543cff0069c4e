"""What guesses the next tokens of requests: a drafter sees rows of the tables, and proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from kvik.frozen import frozen

if TYPE_CHECKING:
    from kvik.worker.draft_tree import DraftTree


@frozen
class DraftRows:
    """Requests that sampled in this step, go on, and may get drafts for the next one. All that was
    sampled stands in the tables already.

    Attributes:
        slots: [rows] int64 on the host, no slot twice.
        limits: [rows] int64 on the host, most drafts for each; at least 1.
        hidden: gives [rows, hidden], the model's last hidden state, normalised, at the token before
            the newest one, which was sampled from it. Valid until the next step. To be called by
            drafters that read it alone: a lookup takes no longer than this does.
    """

    slots: np.ndarray
    limits: np.ndarray
    hidden: Callable[[], Tensor]


@frozen
class Drafts:
    """Attributes:
    counts: [rows] int64, how many each row gets, in the order of the rows; at most its limit.
    token_ids: [sum of counts] int64, row after row.
    tree: None: each draft follows the one before it. Else row i's drafts are the first nodes of
        the tree, in their order.
    probs: [sum of counts, vocab] fp32, what each draft was sampled from; None if no row's drafts
        were sampled. What stands there for rows that are `SamplingTable.certain` is not read.
    """

    counts: np.ndarray
    token_ids: np.ndarray
    tree: DraftTree | None = None
    probs: Tensor | None = None

    @staticmethod
    def of(
        rows: Sequence[Sequence[int]], tree: DraftTree | None = None, probs: Tensor | None = None
    ) -> Drafts:
        """
        Args:
            rows: the drafts of each.
        """
        counts = np.array(list(map(len, rows)), np.int64)
        return Drafts(counts, np.array(list(chain.from_iterable(rows)), np.int64), tree, probs)

    @staticmethod
    def first(limits: np.ndarray, table: np.ndarray, tree: DraftTree) -> Drafts:
        """
        Args:
            limits: [rows] int64. table: [rows, drafts], of which each row gets at most its limit.
        """
        most = table.shape[1]
        return Drafts(np.minimum(limits, most), table[np.arange(most) < limits[:, None]], tree)

    def by_row(self) -> list[list[int]]:
        """Return the drafts of each."""
        tokens, ends = self.token_ids.tolist(), self.counts.cumsum().tolist()
        return [tokens[begin:end] for begin, end in pairwise([0, *ends])]


class Drafter(Protocol):
    """Built with the `RequestTable`, where the tokens of a slot are read, and with the
    `SamplingTable` if it samples. Whatever it raises costs its drafts and nothing else."""

    def enter(self, slot: int) -> None:
        """A request begins, or comes back after a preemption: its tokens and blocks stand in the
        table."""
        ...

    def leave(self, slot: int) -> None:
        """The request of this slot ended, or was preempted."""
        ...

    def propose(self, rows: DraftRows) -> Drafts: ...
