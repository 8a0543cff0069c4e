"""From logits to one token per row.

Order of the rules: single-token edits, penalties, masks of grammars, then `Ops.draw`: temperature,
truncation and one draw by inverse CDF with one uniform number per row. A row's token does not
depend on the other rows. A row that checks a sampled draft takes that draft or another token, such
that its own distribution is unchanged (`worker/rejection.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.core.sampling_params import NOTHING_ALLOWED
from kvik.core.types import TokenLogprobs
from kvik.frozen import frozen
from kvik.kernels.ops import Draws, Ops
from kvik.kernels.upload import upload
from kvik.worker.rejection import coupled, typical
from kvik.worker.sampling_batch import GuessedRows, SamplingBatch, TypicalRows

# Log probabilities of tokens, with those of the most likely tokens.


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one token in each of some rows."""

    token_ids: Tensor  # [rows] int64
    token_logprobs: Tensor  # [rows] float32, log probability of the token
    ranks: Tensor  # [rows] int64, 1 is the most likely token
    # top_ids, top: [rows, n] int64 and float32, the most likely tokens; of equally likely ones the
    # lower ids first.
    top_ids: Tensor
    top: Tensor

    @staticmethod
    def empty(rows: int, top: int, device: torch.device) -> Scores:
        """Return memory for scores that are computed in parts. Small results allocated between
        large temporaries would fragment the memory that the temporaries free."""
        number, words = torch.float32, torch.int64
        return Scores(
            torch.empty(rows, dtype=words, device=device),
            torch.empty(rows, dtype=number, device=device),
            torch.empty(rows, dtype=words, device=device),
            torch.empty(rows, top, dtype=words, device=device),
            torch.empty(rows, top, dtype=number, device=device),
        )

    def put(self, first: int, part: Scores) -> None:
        """Fill in the rows from `first` on."""
        for buffer, rows in zip(self.tensors, part.tensors, strict=True):
            buffer[first : first + len(rows)] = rows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.token_ids, self.token_logprobs, self.ranks, self.top_ids, self.top)


def score(logits: Tensor, token_ids: Tensor, top: int) -> Scores:
    """Score one token per row, without waiting for the device.

    Args:
        logits: [rows, vocab]. token_ids: [rows] int64.
        top: how many of the most likely tokens.
    """
    logprobs = logits.float().log_softmax(-1)
    token_logprobs = logprobs.gather(1, token_ids[:, None])  # [rows, 1]
    top_ids = _most_likely(logprobs, min(top, logprobs.shape[-1]))
    largest = logprobs.gather(1, top_ids)
    # In place, as new memory for whole rows takes longer than their comparison; 1.0 for each token
    # that is more likely, and such sums are exact.
    ranks = logprobs.gt_(token_logprobs).sum(-1).to(torch.int64) + 1
    return Scores(token_ids, token_logprobs[:, 0], ranks, top_ids, largest)


def to_host(arrays: Sequence[NDArray[np.generic]]) -> list[TokenLogprobs]:
    """Return the contents of `Scores.tensors`, row by row."""
    token_ids, logprobs, ranks, top_ids, top = (array.tolist() for array in arrays)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids, values, strict=True)))
        for token, logprob, rank, ids, values in zip(
            token_ids, logprobs, ranks, top_ids, top, strict=True
        )
    ]


STRETCH = 64  # tokens whose largest log probability is compared first


def _most_likely(logprobs: Tensor, top: int) -> Tensor:
    """Return the most likely tokens: [rows, top] int64; of equally likely ones the lower ids first.

    They are among the `top` stretches of the vocabulary with the largest maxima, of equal ones the
    first: so all tokens are read once, and few are ordered.
    """
    rows, vocab = logprobs.shape
    device = logprobs.device
    num_stretches = vocab // STRETCH
    if num_stretches <= top:
        return _order(logprobs, torch.arange(vocab, device=device).expand(rows, -1), top)
    end = num_stretches * STRETCH
    maxima = logprobs[:, :end].unflatten(-1, (-1, STRETCH)).amax(-1)  # [rows, num_stretches]
    stretches = _order(maxima, torch.arange(num_stretches, device=device).expand(rows, -1), top)
    ids = (stretches[:, :, None] * STRETCH + torch.arange(STRETCH, device=device)).flatten(1)
    rest = torch.arange(end, vocab, device=device).expand(rows, -1)
    ids = torch.cat([ids, rest], dim=-1)
    return _order(logprobs.gather(1, ids), ids, top)


def _order(values: Tensor, ids: Tensor, top: int) -> Tensor:
    """Return the ids of the `top` largest values, of equal ones the lower ids first.

    Args:
        values: [rows, n] float32. ids: [rows, n] int64, each once in a row.
    """
    if top == 0:
        return ids[:, :0]
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # now integers in the same order as the numbers
    keys = bits.to(torch.int64)
    keys <<= 32
    keys -= ids  # topk may take any of equal values, so they are made to differ
    return ids.gather(1, keys.topk(top, dim=-1).indices)


@frozen
class Tokens:
    """One token for each of some rows, on the host."""

    token_ids: NDArray[np.int64]  # [rows] int64; meaningless in bad rows
    bad_rows: dict[int, str] = field(default_factory=dict)  # rows that cannot be sampled, and why
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, if requested


@frozen
class Sampled:
    """The result of rows that were sampled together, on the device."""

    token_ids: Tensor  # [rows] int64; meaningless in bad rows, but a valid id
    bad_rows: dict[int, str]  # rows that are known to be bad
    # ([rows] largest logits, reason) pairs; a row fails with that reason if its logit is not
    # finite.
    unchecked: tuple[tuple[Tensor, str], ...]
    scores: Scores | None  # of the rows in `logprobs`
    # Row -> how many of the most likely tokens to report.
    logprobs: dict[int, int]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that `read` needs in addition to the tokens."""
        scores = () if self.scores is None else self.scores.tensors
        return (*[top for top, _ in self.unchecked], *scores)

    def read(self, token_ids: NDArray[np.int64], arrays: Sequence[NDArray[Any]]) -> Tokens:
        """Return the result on the host.

        Args:
            token_ids, arrays: contents of `token_ids` and `tensors`.
        """
        bad_rows = self.bad_rows.copy()
        for largest, (_, reason) in zip(arrays, self.unchecked, strict=False):
            _note_bad(bad_rows, largest, reason)
        if self.scores is None:
            return Tokens(token_ids, bad_rows)
        logprobs: dict[int, TokenLogprobs] = {}
        scored = to_host(arrays[len(self.unchecked) :])
        for (row, top), all_ in zip(self.logprobs.items(), scored, strict=True):
            if row not in bad_rows:
                logprobs[row] = TokenLogprobs(
                    all_.token_id, all_.logprob, all_.rank, all_.top[:top]
                )
        return Tokens(token_ids, bad_rows, logprobs)


NOT_FINITE = "the model's logits are not finite"


@frozen
class Guess:
    """Sampled drafts."""

    token_ids: Tensor  # [rows] int64
    # [rows, vocab] float32, the distribution of each draw, 0 in rows without a draw; None: no row
    # was drawn.
    probs: Tensor | None


class Sampler:
    def __init__(self, ops: Ops, *, checks_at_once: bool = True) -> None:
        """
        Args:
            checks_at_once: whether to check for bad rows at once, which waits for the device.
        """
        self._ops = ops
        self._checks_at_once = checks_at_once

    def sample(
        self, logits: Tensor, batch: SamplingBatch, largest: tuple[Tensor, Tensor] | None = None
    ) -> Sampled:
        """Sample each row. Works on any subset of a step's rows and changes nothing outside, so a
        caller may try again row by row after an exception.

        Args:
            logits: [rows, vocab], any float dtype. -inf marks an impossible token; NaN or +inf
                makes the row bad.
            largest: their `Ops.largest`, if known.
        """
        top, token_ids = largest or self._ops.largest(logits)
        shaped, unchecked = logits, [(top, NOT_FINITE)]
        if batch.ruled:
            shaped = self._shape(logits, batch)
            top, token_ids = self._ops.largest(shaped)
            unchecked.append((top, NOTHING_ALLOWED))
        bad_rows: dict[int, str] = {}
        if self._checks_at_once:
            for top, reason in unchecked:
                _note_bad(bad_rows, top.cpu().numpy(), reason)
            unchecked = []
            if bad_rows:
                bad = upload(np.fromiter(bad_rows, np.int64, len(bad_rows)), logits.device)
                shaped = shaped.index_fill(0, bad, 0.0)
        else:
            good = unchecked[0][0].isfinite() & top.isfinite()
            token_ids = torch.where(good, token_ids, 0)
            if not batch.takes_largest:
                shaped = torch.where(good[:, None], shaped, 0.0)
        random = batch.random
        if random is not None and random.rows is None:
            token_ids = self._ops.draw(shaped, random.draws)
        elif random is not None and random.rows is not None:
            drawn = self._ops.draw(shaped.index_select(0, random.rows), random.draws)
            token_ids = token_ids.index_copy(0, random.rows, drawn)
        if batch.guessed is not None:
            token_ids = self._judge(shaped, token_ids, batch.guessed)
        if batch.typical is not None:
            token_ids = self._take(shaped, token_ids, batch.typical)
        requested = {row: top for row, top in batch.logprobs.items() if row not in bad_rows}
        scores = None
        if requested:
            if batch.ruled and batch.beams is not None:
                by_rules = shaped.index_select(0, batch.beams)
                logits = logits.float().index_copy(0, batch.beams, by_rules)
            scores = _score(logits, token_ids, requested)
        return Sampled(token_ids, bad_rows, tuple(unchecked), scores, requested)

    def guess(
        self, logits: Tensor, batch: SamplingBatch, largest: tuple[Tensor, Tensor] | None = None
    ) -> Guess:
        """Sample drafts: each row like `sample`, and return the distributions.

        Args:
            logits: [rows, vocab], finite or -inf.
            largest: their `Ops.largest`, if known.
        """
        if batch.ruled:
            logits, largest = self._shape(logits, batch), None
        random = batch.random
        if random is not None and random.rows is None:
            return Guess(*self._guess(logits, random.draws))
        _, token_ids = largest or self._ops.largest(logits)
        if random is None or random.rows is None:
            return Guess(token_ids, None)
        drawn, shares = self._guess(logits.index_select(0, random.rows), random.draws)
        probs = logits.new_zeros(logits.shape, dtype=torch.float32)
        return Guess(
            token_ids.index_copy(0, random.rows, drawn), probs.index_copy_(0, random.rows, shares)
        )

    def _shape(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Apply the rules: [rows, vocab] float32. The result is a copy, unless the only change is a
        mask, which may be applied twice, and nothing else reads the logits."""
        masked = batch.edits is None and batch.penalties is None and not batch.logprobs
        shaped = logits.to(torch.float32, copy=not masked)
        if batch.edits is not None:
            batch.edits.apply(shaped)
        if batch.penalties is not None:
            self._ops.penalize(shaped, batch.penalties)
        if batch.masks is not None:
            self._ops.mask(shaped, batch.masks)
        return shaped

    def _guess(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        shares = self._probabilities(logits, draws)
        mass = shares.cumsum(-1, dtype=torch.float64)
        # Drawn from exactly the returned probabilities, so a token of probability 0 is never drawn.
        drawn = torch.searchsorted(mass, draws.uniforms[:, None] * mass[:, -1:], right=True)
        return drawn[:, 0], shares

    def _probabilities(self, logits: Tensor, draws: Draws) -> Tensor:
        return self._ops.probabilities(logits, draws.temperature, draws.truncation)

    def _judge(self, logits: Tensor, token_ids: Tensor, guessed: GuessedRows) -> Tensor:
        p = self._probabilities(logits.index_select(0, guessed.rows), guessed.draws)
        uniforms = guessed.draws.uniforms
        tokens = coupled(p, guessed.probs, guessed.token_ids, guessed.accept, uniforms)
        return token_ids.index_copy(0, guessed.rows, tokens)

    def _take(self, logits: Tensor, token_ids: Tensor, offered: TypicalRows) -> Tensor:
        rows = offered.rows
        p = self._probabilities(logits.index_select(0, rows), offered.draws)
        drawn = token_ids.index_select(0, rows)
        tokens = typical(p, drawn, offered.owners, offered.token_ids, offered.rule)
        return token_ids.index_copy(0, rows, tokens)


def _note_bad(bad_rows: dict[int, str], largest: NDArray[Any], reason: str) -> None:
    """Note the rows whose largest logit is NaN or infinite, and why they are bad."""
    for row in (~np.isfinite(largest)).nonzero()[0].tolist():
        bad_rows.setdefault(row, reason)


def _score(logits: Tensor, token_ids: Tensor, requested: dict[int, int]) -> Scores:
    """Score tokens by the model's own distribution, before any rule; those of beams after all.

    Args:
        requested: row -> how many of the most likely tokens.
    """
    top = max(requested.values())
    if len(requested) == len(logits):
        return score(logits, token_ids, top)
    rows = upload(np.fromiter(requested, np.int64, len(requested)), logits.device)
    return score(logits.index_select(0, rows), token_ids.index_select(0, rows), top)
