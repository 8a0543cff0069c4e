"""What guesses the next tokens of requests: a drafter sees rows of the tables, and proposes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from kvik.worker.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Requests that sampled in this step, go on, and may get drafts for the next one. All that was
    sampled stands in the tables already.

    Attributes:
        slots: [rows] int64 on the host, no slot twice.
        limits: [rows] int64 on the host, most drafts for each; at least 1.
        hidden: gives [rows, hidden], the model's last hidden state, normalised, at the token before
            the newest one, which was sampled from it. Valid until the next step. To be called by
            drafters that read it alone: a lookup takes no longer than this does.
        certain: [rows] bool on the host: drafts of these rows must not be sampled, as the request
            is greedy or brought a seed.
    """

    slots: np.ndarray
    limits: np.ndarray
    hidden: Callable[[], Tensor]
    certain: np.ndarray


@dataclass(frozen=True, slots=True)
class Drafts:
    """Attributes:
    token_ids: of each row, in the order of the rows; shorter than its limit, or empty.
    tree: None: each draft follows the one before it. Else row i's drafts are the first nodes of
        the tree, in their order.
    probs: [sum of drafts, vocab] fp32, what each draft was sampled from, row after row; None if no
        row's drafts were sampled. What stands there for rows that are `certain` is not read.
    """

    token_ids: list[list[int]]
    tree: DraftTree | None = None
    probs: Tensor | None = None


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
