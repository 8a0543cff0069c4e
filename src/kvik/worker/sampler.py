"""From logits to one token per row.

Order of the rules: single-token edits, penalties, then `Ops.draw`: temperature, truncation and one
draw by inverse CDF with one uniform number per row. All of it is row by row in effect: a row's
token does not depend on the other rows. A row that judges a draft which was drawn takes that draft
or another token so that its own distribution stays what it is (`worker/rejection.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.config.memory import SAMPLER_BYTES
from kvik.core.types import TokenLogprobs
from kvik.frozen import frozen
from kvik.kernels.ops import Draws, Ops
from kvik.kernels.upload import upload
from kvik.worker.graphs import StepOutput
from kvik.worker.rejection import coupled, typical
from kvik.worker.sampling_batch import (
    NOTHING,
    GuessedRows,
    Guesses,
    Offers,
    SamplingBatch,
    Supposed,
    TypicalRows,
)
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.step_inputs import Arrival, Copies

# Log probabilities of tokens, and of the most likely ones beside them.


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one token in each of some rows.

    Attributes:
        token_ids: [rows] int64.
        own: [rows] float32, log probability of the token.
        ranks: [rows] int64, 1 is the most likely token.
        top_ids, top: [rows, n] int64 and float32, the most likely tokens; of equals the lower ids
            first.
    """

    token_ids: Tensor
    own: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    @staticmethod
    def room(rows: int, top: int, device: torch.device) -> Scores:
        """For some that come in pieces: what is made between large tensors and kept would leave
        holes where they were, too small for the next ones."""
        number, words = torch.float32, torch.int64
        return Scores(
            torch.empty(rows, dtype=words, device=device),
            torch.empty(rows, dtype=number, device=device),
            torch.empty(rows, dtype=words, device=device),
            torch.empty(rows, top, dtype=words, device=device),
            torch.empty(rows, top, dtype=number, device=device),
        )

    def put(self, first: int, piece: Scores) -> None:
        """A piece, from this row on."""
        for whole, part in zip(self.tensors, piece.tensors, strict=True):
            whole[first : first + len(part)] = part

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.token_ids, self.own, self.ranks, self.top_ids, self.top)


def score(logits: Tensor, token_ids: Tensor, top: int) -> Scores:
    """Nothing here looks at a value, so a device need not be waited for.

    Args:
        logits: [rows, vocab]. token_ids: [rows] int64.
        top: how many of the most likely tokens.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])  # [rows, 1]
    ranks = (logprobs > own).sum(-1) + 1
    top_ids = _most_likely(logprobs, min(top, logprobs.shape[-1]))
    return Scores(token_ids, own[:, 0], ranks, top_ids, logprobs.gather(1, top_ids))


def told(arrays: Sequence[NDArray[np.generic]]) -> list[TokenLogprobs]:
    """What `Scores.tensors` hold, on the host."""
    token_ids, own, ranks, top_ids, top = (array.tolist() for array in arrays)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids, values, strict=True)))
        for token, logprob, rank, ids, values in zip(
            token_ids, own, ranks, top_ids, top, strict=True
        )
    ]


def _most_likely(logprobs: Tensor, top: int) -> Tensor:
    """[rows, top] int64. topk may take any of equal values, so they are made to differ."""
    vocab = logprobs.shape[-1]
    if top == 0:
        return torch.empty(len(logprobs), 0, dtype=torch.int64, device=logprobs.device)
    bits = (logprobs + 0.0).view(torch.int32)  # -0.0 is 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # as integers they are ordered as the numbers are
    keys = bits.to(torch.int64)
    keys <<= 32
    keys += torch.arange(vocab - 1, -1, -1, device=logprobs.device)
    return keys.topk(top, dim=-1).indices


# Tokens for the rows of logits of a step: many at once, row by row if one breaks that.
#
# A step is sampled when its forward was begun, and read later: by then the next one may run.


@frozen
class StepTokens:
    """Attributes:
    token_ids: [rows] int64 on the host; meaningless in bad rows.
    bad_rows: rows that could not be sampled, and why.
    logprobs: by row, where asked for.
    """

    token_ids: np.ndarray
    bad_rows: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


@frozen
class LaunchedTokens:
    """Tokens that the device has or will have.

    Attributes:
        token_ids: [rows] int64 on the device; meaningless in bad rows, but a token.
        bad_rows: rows whose sampling could not be begun, and why.
        parts: by first row.
        arrival: of the tokens, and of what the parts read.
    """

    token_ids: Tensor
    bad_rows: dict[int, str]
    parts: list[tuple[int, Sampled]]
    arrival: Arrival

    def read(self) -> StepTokens:
        """Waits for them."""
        token_ids, *arrays = self.arrival.wait()
        if not arrays and not self.bad_rows and not any(part.bad_rows for _, part in self.parts):
            return StepTokens(token_ids, {}, {})  # as nearly always, and a greedy step is short
        bad_rows, used = dict(self.bad_rows), 0
        logprobs: dict[int, TokenLogprobs] = {}
        for first, part in self.parts:
            own = arrays[used : used + len(part.tensors)]
            used += len(own)
            found = part.read(token_ids[first : first + len(part.token_ids)], own)
            logprobs |= {first + i: entry for i, entry in found.logprobs.items()}
            bad_rows |= {first + i: why for i, why in found.bad_rows.items()}
        return StepTokens(token_ids, bad_rows, logprobs)


class StepSampler:
    def __init__(
        self, ops: Ops, sampling: SamplingTable, device: torch.device, copies: Copies
    ) -> None:
        self.sampling = sampling
        self._copies = copies
        self._sampler = Sampler(ops, looks=copies.depth == 1)
        self._room = SAMPLER_BYTES[device.type]

    def sample(
        self,
        output: StepOutput,
        slots: np.ndarray,
        positions: np.ndarray,
        supposed: Supposed = NOTHING,
        judged: Guesses | Offers | None = None,
    ) -> StepTokens:
        """`launch`, read at once."""
        return self.launch(output, slots, positions, supposed, judged).read()

    def launch(
        self,
        output: StepOutput,
        slots: np.ndarray,
        positions: np.ndarray,
        supposed: Supposed = NOTHING,
        judged: Guesses | Offers | None = None,
    ) -> LaunchedTokens:
        """
        Args:
            output: of the step, with as many rows of logits.
            slots, positions: [rows], whose token each row is, and where it will stand.
            supposed: drafts that rows take to have been put out before theirs.
            judged: drafts that were drawn, or that may be taken though they were not, by the rows
                that judge them.
        """

        rows = len(slots)

        def sample(first: int, last: int) -> Sampled:
            if first == 0 and last == rows:  # as nearly always
                batch = self.sampling.batch(slots, positions, supposed, judged)
                return self._sampler.sample(output.logits, batch, (output.top, output.top_ids))
            part = slice(first, last)
            batch = self.sampling.batch(
                slots[part],
                positions[part],
                supposed.part(first, last),
                None if judged is None else judged.part(first, last),
            )
            largest = (output.top[part], output.top_ids[part])
            return self._sampler.sample(output.logits[part], batch, largest)

        size = self.sampling.rows_at_once(slots, self._room, shares=judged is not None)
        parts: list[tuple[int, Sampled]] = []
        bad_rows: dict[int, str] = {}
        for first in range(0, rows, size):
            last = min(first + size, rows)
            try:
                parts.append((first, sample(first, last)))
            except Exception:
                for i in range(first, last):
                    try:
                        parts.append((i, sample(i, i + 1)))
                    except Exception as error:
                        bad_rows[i] = describe(error)
        if len(parts) == 1 and not bad_rows:
            token_ids = parts[0][1].token_ids
        else:
            token_ids = torch.zeros(rows, dtype=torch.int64, device=output.logits.device)
            for first, part in parts:
                token_ids[first : first + len(part.token_ids)] = part.token_ids
        tensors = [token_ids, *(tensor for _, part in parts for tensor in part.tensors)]
        return LaunchedTokens(token_ids, bad_rows, parts, self._copies.start(tensors))


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Attributes:
    token_ids: [rows] int64; meaningless in bad rows.
    bad_rows: rows that cannot be sampled, and why.
    logprobs: by row, where asked for.
    """

    token_ids: NDArray[np.integer]
    bad_rows: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


@frozen
class Sampled:
    """What was sampled, on the device.

    Attributes:
        token_ids: [rows] int64; meaningless in bad rows, but a token.
        bad_rows: rows that are known to be bad.
        unseen: largest logits [rows] that were not checked yet: a row is bad where one is not
            finite; and why it is.
        scores: of the rows that `logprobs` says.
        logprobs: row -> how many of the most likely tokens to report.
    """

    token_ids: Tensor
    bad_rows: dict[int, str] = field(default_factory=dict)
    unseen: tuple[tuple[Tensor, str], ...] = ()
    scores: Scores | None = None
    logprobs: dict[int, int] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that `read` wants to know of, beside the tokens."""
        scores = () if self.scores is None else self.scores.tensors
        return (*(top for top, _ in self.unseen), *scores)

    def read(self, token_ids: NDArray[np.integer], arrays: Sequence[NDArray[Any]]) -> SampleResult:
        """
        Args:
            token_ids, arrays: what the tokens and `tensors` hold.
        """
        bad_rows = self.bad_rows.copy()
        for largest, (_, why) in zip(arrays, self.unseen, strict=False):
            for row in np.flatnonzero(~np.isfinite(largest)).tolist():
                bad_rows.setdefault(row, why)
        if self.scores is None:
            return SampleResult(token_ids, bad_rows)
        logprobs: dict[int, TokenLogprobs] = {}
        found = told(arrays[len(self.unseen) :])
        for (row, top), all_ in zip(self.logprobs.items(), found, strict=True):
            if row not in bad_rows:
                logprobs[row] = TokenLogprobs(
                    all_.token_id, all_.logprob, all_.rank, all_.top[:top]
                )
        return SampleResult(token_ids, bad_rows, logprobs)


NOT_FINITE = "the model's logits are not finite"
NOTHING_ALLOWED = "the request's rules allow no token"


@frozen
class Guess:
    """Attributes:
    token_ids: [rows] int64.
    probs: [rows, vocab] float32, what each was drawn from, 0 in rows that are not drawn; None: no
        row is.
    """

    token_ids: Tensor
    probs: Tensor | None


class Sampler:
    def __init__(self, ops: Ops, *, looks: bool = True) -> None:
        """
        Args:
            looks: whether to look for bad rows at once, which waits for the device.
        """
        self._ops = ops
        self._looks = looks

    def sample(
        self, logits: Tensor, batch: SamplingBatch, largest: tuple[Tensor, Tensor] | None = None
    ) -> Sampled:
        """Sample each row. Works on any subset of a step's rows and changes nothing outside, so a
        caller may try again row by row after an exception.

        Args:
            logits: [rows, vocab], any float dtype. -inf marks an impossible token; NaN or +inf
                makes the row bad.
            largest: what `Ops.largest` says of them, if that is known.
        """
        bad_rows: dict[int, str] = {}
        top, token_ids = largest or self._ops.largest(logits)
        unseen: list[tuple[Tensor, str]] = []
        if self._looks:
            logits = _discard(logits, top, bad_rows, NOT_FINITE)
        else:
            unseen.append((top, NOT_FINITE))
            good = top.isfinite()
            token_ids = torch.where(good, token_ids, 0)
            if not batch.takes_largest:
                logits = torch.where(good[:, None], logits, 0.0)
        shaped = logits
        if batch.edits is not None or batch.penalties is not None:
            shaped = self._shape(logits, batch)
            top, token_ids = self._ops.largest(shaped)
            if self._looks:
                shaped = _discard(shaped, top, bad_rows, NOTHING_ALLOWED)
            else:
                unseen.append((top, NOTHING_ALLOWED))
                good = top.isfinite()
                token_ids = torch.where(good, token_ids, 0)
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
        wanted = {row: top for row, top in batch.logprobs.items() if row not in bad_rows}
        scores = _score(logits, token_ids, wanted) if wanted else None
        return Sampled(token_ids, bad_rows, tuple(unseen), scores, wanted)

    def guess(
        self, logits: Tensor, batch: SamplingBatch, largest: tuple[Tensor, Tensor] | None = None
    ) -> Guess:
        """Sample each row like `sample`, and say from what: for drafts.

        Args:
            logits: [rows, vocab], finite or -inf.
            largest: what `Ops.largest` says of them, if that is known.
        """
        if batch.edits is not None or batch.penalties is not None:
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
        """[rows, vocab] float32, a copy with edits and penalties."""
        shaped = logits.to(torch.float32, copy=True)
        if batch.edits is not None:
            batch.edits.apply(shaped)
        if batch.penalties is not None:
            self._ops.penalize(shaped, batch.penalties)
        return shaped

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


def _discard(logits: Tensor, top: Tensor, bad_rows: dict[int, str], why: str) -> Tensor:
    """Note the rows whose largest logit is NaN or infinite, and make them harmless."""
    finite = np.isfinite(top.cpu().numpy())  # a greedy step is too short for many torch calls
    if finite.all():
        return logits
    for row in np.flatnonzero(~finite).tolist():
        bad_rows.setdefault(row, why)
    bad = upload(~finite, logits.device)
    return logits.masked_fill(bad[:, None], 0.0)


def _score(logits: Tensor, token_ids: Tensor, wanted: dict[int, int]) -> Scores:
    """Of the model's own distribution, before any rule.

    Args:
        wanted: row -> how many of the most likely tokens.
    """
    rows = upload(np.fromiter(wanted, np.int64, len(wanted)), logits.device)
    found = token_ids.index_select(0, rows)
    return score(logits.index_select(0, rows), found, max(wanted.values()))
