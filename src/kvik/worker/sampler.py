"""From logits to one token per row.

Order of the rules: single-token edits, penalties, then `Ops.draw`: temperature, truncation and one
draw by inverse CDF with one uniform number per row. All of it is row by row in effect: a row's
token does not depend on the other rows. A row that judges a draft which was drawn takes that draft
or another token so that its own distribution stays what it is (`worker/rejection.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from kvik.core.types import TokenLogprobs
from kvik.kernels.draws import Draws
from kvik.kernels.ops import Ops
from kvik.worker.rejection import coupled, typical
from kvik.worker.sampling_batch import GuessedRows, SamplingBatch, TypicalRows


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Attributes:
    token_ids: [rows] int64; meaningless in bad rows.
    bad_rows: rows that cannot be sampled, and why.
    logprobs: by row, where asked for.
    """

    token_ids: Tensor
    bad_rows: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Guess:
    """Attributes:
    token_ids: [rows] int64.
    probs: [rows, vocab] float32, what each was drawn from, 0 in rows that are not drawn; None: no
        row is.
    """

    token_ids: Tensor
    probs: Tensor | None


class Sampler:
    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def sample(
        self, logits: Tensor, batch: SamplingBatch, largest: tuple[Tensor, Tensor] | None = None
    ) -> SampleResult:
        """Sample each row. Works on any subset of a step's rows and changes nothing outside, so a
        caller may try again row by row after an exception.

        Args:
            logits: [rows, vocab], any float dtype. -inf marks an impossible token; NaN or +inf
                makes the row bad.
            largest: what `Ops.largest` says of them, if that is known.
        """
        bad_rows: dict[int, str] = {}
        top, token_ids = largest or self._ops.largest(logits)
        logits = _discard(logits, top, bad_rows, "the model's logits are not finite")
        shaped = logits
        if batch.edits is not None or batch.penalties is not None:
            shaped = _shape(logits, batch)
            top, token_ids = self._ops.largest(shaped)
            shaped = _discard(shaped, top, bad_rows, "the request's rules allow no token")
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
        return SampleResult(token_ids, bad_rows, _report(logits, token_ids, batch, bad_rows))

    def guess(
        self, logits: Tensor, batch: SamplingBatch, largest: tuple[Tensor, Tensor] | None = None
    ) -> Guess:
        """Sample each row like `sample`, and say from what: for drafts.

        Args:
            logits: [rows, vocab], finite or -inf.
            largest: what `Ops.largest` says of them, if that is known.
        """
        if batch.edits is not None or batch.penalties is not None:
            logits, largest = _shape(logits, batch), None
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

    def _guess(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        shares = self._ops.probabilities(logits, draws.temperature, draws.truncation)
        mass = shares.cumsum(-1, dtype=torch.float64)
        # Of the very numbers that are handed out: no other token may ever be drawn.
        drawn = torch.searchsorted(mass, draws.uniforms[:, None] * mass[:, -1:], right=True)
        return drawn[:, 0], shares

    def _judge(self, logits: Tensor, token_ids: Tensor, guessed: GuessedRows) -> Tensor:
        draws = guessed.draws
        p = self._ops.probabilities(
            logits.index_select(0, guessed.rows), draws.temperature, draws.truncation
        )
        tokens = coupled(p, guessed.probs, guessed.token_ids, guessed.accept, draws.uniforms)
        return token_ids.index_copy(0, guessed.rows, tokens)

    def _take(self, logits: Tensor, token_ids: Tensor, offered: TypicalRows) -> Tensor:
        rows, draws = offered.rows, offered.draws
        p = self._ops.probabilities(
            logits.index_select(0, rows), draws.temperature, draws.truncation
        )
        drawn = token_ids.index_select(0, rows)
        tokens = typical(p, drawn, offered.owners, offered.token_ids, offered.rule)
        return token_ids.index_copy(0, rows, tokens)


def _shape(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[rows, vocab] float32, a copy with edits and penalties."""
    shaped = logits.to(torch.float32, copy=True)
    if batch.edits is not None:
        batch.edits.apply(shaped)
    if batch.penalties is not None:
        batch.penalties.apply(shaped)
    return shaped


def token_logprobs(logits: Tensor, token_ids: Tensor, top: int) -> list[TokenLogprobs]:
    """Log probabilities of given tokens and of the `top` most likely ones.

    Args:
        logits: [rows, vocab]. token_ids: [rows] int64.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])  # [rows, 1]
    ranks = (logprobs > own).sum(-1) + 1
    columns = (token_ids.tolist(), own[:, 0].tolist(), ranks.tolist(), _most_likely(logprobs, top))
    return [TokenLogprobs(*row) for row in zip(*columns, strict=True)]


def _most_likely(logprobs: Tensor, top: int) -> list[tuple[tuple[int, float], ...]]:
    """The `top` tokens of each row, of equals the lower ids first (topk may take any of them)."""
    if top == 0:
        return [()] * len(logprobs)
    top = min(top, logprobs.shape[-1])
    last = logprobs.topk(top, dim=-1).values[:, -1:]
    near = logprobs >= last  # with all that equal the last one: of a flat row the whole vocabulary
    if int(near.sum()) > top * len(logprobs):
        equal = logprobs == last
        room = top - (logprobs > last).sum(-1, keepdim=True)
        near &= ~equal | (equal.cumsum(-1, dtype=torch.int32) <= room)
    ids = iter(near.nonzero()[:, 1].tolist())
    values = iter(logprobs[near].tolist())
    found = []
    for count in near.sum(-1).tolist():
        row = list(zip(islice(ids, count), islice(values, count), strict=True))
        found.append(tuple(sorted(row, key=lambda item: -item[1])))  # keeps equals in order
    return found


def _discard(logits: Tensor, top: Tensor, bad_rows: dict[int, str], why: str) -> Tensor:
    """Note the rows whose largest logit is NaN or infinite, and make them harmless."""
    finite = np.isfinite(top.cpu().numpy())  # a greedy step is too short for many torch calls
    if finite.all():
        return logits
    for row in np.flatnonzero(~finite).tolist():
        bad_rows.setdefault(row, why)
    bad = torch.from_numpy(~finite).to(logits.device)
    return logits.masked_fill(bad[:, None], 0.0)


def _report(
    logits: Tensor, token_ids: Tensor, batch: SamplingBatch, bad_rows: dict[int, str]
) -> dict[int, TokenLogprobs]:
    """Of the model's own distribution, before any rule."""
    wanted = {row: top for row, top in batch.logprobs.items() if row not in bad_rows}
    if not wanted:
        return {}
    rows = torch.tensor(list(wanted), device=logits.device)
    found = token_logprobs(logits[rows], token_ids[rows], max(wanted.values()))
    return {
        row: TokenLogprobs(all_.token_id, all_.logprob, all_.rank, all_.top[:top])
        for (row, top), all_ in zip(wanted.items(), found, strict=True)
    }
