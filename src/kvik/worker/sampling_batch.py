"""The sampling parameters of the rows of one step; None for what no row needs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvik.config.speculative import Typical
from kvik.frozen import frozen
from kvik.kernels.ops import Draws, Masks, Penalties
from kvik.worker.logits_rules import Edits

_Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that draw a token instead of taking the most likely one."""

    rows: Tensor | None  # [n] int64; None: all rows of the batch
    draws: Draws  # of these rows


@dataclass(frozen=True, slots=True)
class GuessedRows:
    """Rows that check a sampled draft."""

    rows: Tensor  # [m] int64, none of which is among `RandomRows`
    token_ids: Tensor  # [m] int64, the drafts
    probs: Tensor  # [m, vocab] float32, the distributions they were drawn from
    accept: Tensor  # [m] float64 uniform numbers that decide acceptance
    draws: Draws  # of these rows; their uniform numbers choose the token if the draft is rejected


@dataclass(frozen=True, slots=True)
class TypicalRows:
    """Rows that accept a draft if it is likely enough, even if another token was drawn."""

    rows: Tensor  # [n] int64, some of `RandomRows`
    owners: Tensor  # [m] int64, index into `rows` that each draft is offered to
    token_ids: Tensor  # [m] int64, the drafts
    draws: Draws  # of these rows
    rule: Typical


@frozen
class SamplingBatch:
    """The parameters of one batch; `SamplingBatch()` is a greedy batch without rules."""

    edits: Edits | None = None
    penalties: Penalties | None = None
    masks: Masks | None = None
    random: RandomRows | None = None
    guessed: GuessedRows | None = None
    typical: TypicalRows | None = None
    # Row -> how many of the most likely tokens to report with the sampled one.
    logprobs: dict[int, int] = field(default_factory=dict)
    beams: Tensor | None = None  # [n] int64, rows whose log probabilities are those by their rules

    @property
    def ruled(self) -> bool:
        """Rules change the logits of some row."""
        return self.edits is not None or self.penalties is not None or self.masks is not None

    @property
    def takes_largest(self) -> bool:
        """Every row takes the token that is most likely by its rules."""
        return self.random is None and self.guessed is None and self.typical is None


@dataclass(frozen=True, slots=True)
class Supposed:
    """Tokens that rows of a batch assume to be output, though no table has them: the drafts before
    them. Entry i is a token of row `rows[i]`."""

    rows: _Ids  # [m] int64, ascending
    tokens: _Ids  # [m] int64; tokens of a row are in order

    def part(self, first: int, last: int) -> Supposed:
        """Return the entries of rows first..last - 1, as a separate batch."""
        begin, end = np.searchsorted(self.rows, (first, last))
        return Supposed(self.rows[begin:end] - first, self.tokens[begin:end])

    def by_row(self) -> dict[int, list[int]]:
        tokens_of_row: dict[int, list[int]] = {}
        for row, token in zip(self.rows.tolist(), self.tokens.tolist(), strict=True):
            tokens_of_row.setdefault(row, []).append(token)
        return tokens_of_row


NOTHING = Supposed(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Guesses:
    """Sampled drafts, and the rows of a batch that check them."""

    # rows, token_ids: [m] int64, rows ascending.
    rows: _Ids
    token_ids: _Ids
    probs: Tensor  # [m, vocab] float32, the distribution of each

    def part(self, first: int, last: int) -> Guesses | None:
        """Return the entries of rows first..last - 1, as a separate batch; None: there are none."""
        begin, end = (int(i) for i in np.searchsorted(self.rows, (first, last)))
        if begin == end:
            return None
        return Guesses(
            self.rows[begin:end] - first, self.token_ids[begin:end], self.probs[begin:end]
        )


@dataclass(frozen=True, slots=True)
class Offers:
    """Drafts that rows of a batch may accept although another token was drawn (lossy). A row in a
    tree may have several."""

    # rows, token_ids: [m] int64, rows ascending.
    rows: _Ids
    token_ids: _Ids
    rule: Typical

    def part(self, first: int, last: int) -> Offers | None:
        """Return the entries of rows first..last - 1, as a separate batch; None: there are none."""
        begin, end = np.searchsorted(self.rows, (first, last))
        if begin == end:
            return None
        return Offers(self.rows[begin:end] - first, self.token_ids[begin:end], self.rule)
