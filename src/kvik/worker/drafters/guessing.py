"""The drafts of a draft model, from its logits."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvik.kernels.draws import Draws
from kvik.kernels.upload import upload
from kvik.worker.drafters.base import DraftRows
from kvik.worker.noise import DRAFT, SAMPLE
from kvik.worker.sampler import Guess, Sampler
from kvik.worker.sampling_batch import NOTHING, RandomRows, SamplingBatch, Supposed
from kvik.worker.sampling_table import SamplingTable

_PLAIN = SamplingBatch()
Tokens = np.ndarray | Tensor  # int64 on the host; or on a GPU, which nobody waits for


class Guessing:
    """One draft of each row after the other, as many as it gets.

    A request that brought a seed draws its drafts with the very numbers that its tokens will be
    drawn with: where the two models agree, so do the tokens.

    On a GPU a draft goes from one forward to the next without passing by the host, unless rules
    want to know of it there.

    Attributes:
        probs: [sum of drafts, vocab], as `Drafts.probs`; None if none is read of them.
    """

    def __init__(
        self,
        sampler: Sampler,
        sampling: SamplingTable,
        rows: DraftRows,
        chosen: np.ndarray,
        known: np.ndarray,
        counts: np.ndarray,
        room: int,
    ) -> None:
        """
        Args:
            sampling: of the target.
            chosen: indices of the rows that get drafts, those that get more first. All that is
                said of rows below is in this order.
            known, counts: [all rows], tokens and drafts of each.
            room: bytes that sampling may take beside logits and probabilities.
        """
        self._sampler = sampler
        self._sampling = sampling
        self._slots = slots = rows.slots[chosen]
        self._counts = counts[chosen]
        self._found = np.empty((len(slots), int(self._counts[0])), np.int64)
        self._found.fill(-1)
        self._there: Tensor | None = None  # the same on a GPU, which has it all
        self.probs: Tensor | None = None
        self._plain = sampling.plain(slots)
        if self._plain:
            return
        self._positions = known[chosen]
        self._first = (counts.cumsum() - counts)[chosen]  # row of `probs`
        certain = sampling.certain(slots)
        self._keeps = not certain.all()
        self._streams = np.where(certain, SAMPLE, DRAFT)
        self._at_once = sampling.rows_at_once(slots, room, shares=True)
        self._reads_output = sampling.reads_output(slots)
        self._alike = _PLAIN  # what the first `_planned` rows draw with
        self._planned = 0
        self._uniforms: list[Tensor] = []  # numbers of the depths to go, the next one last

    def draft(self, depth: int, logits: Tensor, largest: tuple[Tensor, Tensor] | None) -> Tokens:
        """
        Args:
            depth: drafts that the rows have already.
            logits: [rows, vocab], of the first rows. largest: what `Ops.largest` says of them, if
                that is known.

        Returns:
            [rows], one more draft of each; to be read before the next forward.
        """
        guess, rows = self._sampler.guess, len(logits)
        if not depth and logits.device.type != "cpu":
            self._there = upload(self._found, logits.device)
        if self._plain:
            found = largest[1] if largest is not None else guess(logits, _PLAIN).token_ids
            if self._there is not None:
                self._there[:rows, depth] = found
                return found
            tokens: np.ndarray = found.numpy()
            self._found[:rows, depth] = tokens
            return tokens
        if rows <= self._at_once and not self._reads_output:
            self._take(depth, 0, guess(logits, self._same_again(depth, rows), largest))
        else:
            for begin in range(0, rows, self._at_once):
                part = slice(begin, min(begin + self._at_once, rows))
                some = None if largest is None else (largest[0][part], largest[1][part])
                self._take(depth, begin, guess(logits[part], self._batch(depth, part), some))
        if self._there is not None:
            return self._there[:rows, depth]
        return self._found[:rows, depth].copy()

    def told(self) -> np.ndarray:
        """[rows, depths] int64, the drafts; -1 where a row gets no more. A GPU is waited for."""
        return self._found if self._there is None else self._there.cpu().numpy()

    def _take(self, depth: int, begin: int, guess: Guess) -> None:
        """Of the rows from `begin` on."""
        part, depths = slice(begin, begin + len(guess.token_ids)), self._found.shape[1]
        if self._there is not None:
            self._there[part, depth] = guess.token_ids
        else:
            self._found[part, depth] = guess.token_ids.numpy()
        if guess.probs is None or not self._keeps:
            return
        if self.probs is None:
            self.probs = guess.probs.new_empty(int(self._counts.sum()), guess.probs.shape[1])
        if self._counts[-1] == depths:  # all rows get as many
            self.probs.view(-1, depths, guess.probs.shape[1])[part, depth].copy_(guess.probs)
        else:
            at = upload(self._first[part] + depth, self.probs.device)
            self.probs.index_copy_(0, at, guess.probs)

    def _batch(self, depth: int, part: slice) -> SamplingBatch:
        """Of rows whose rules may look at the drafts before."""
        slots, supposed = self._slots[part], NOTHING
        if self._reads_output and depth:
            before = self.told()[part, :depth]
            supposed = Supposed(np.arange(len(slots)).repeat(depth), before.reshape(-1))
        positions = self._positions[part] + depth
        return self._sampling.batch(slots, positions, supposed, stream=self._streams[part])

    def _same_again(self, depth: int, rows: int) -> SamplingBatch:
        """Of rows that draw one draft as they draw the next, only with other numbers, which are
        made for all drafts at once."""
        if rows != self._planned:
            self._planned, part = rows, slice(rows)
            self._alike = self._batch(depth, part)
            random = self._alike.random
            if random is not None:
                left = np.arange(depth, self._found.shape[1])[:, None]
                positions, streams = self._positions[part] + left, self._streams[part]
                numbers = self._sampling.uniforms(self._slots[part], positions, streams)
                if random.rows is not None:
                    numbers = numbers.index_select(1, random.rows)
                self._uniforms = list(numbers.unbind(0))[::-1]
        random = self._alike.random
        if random is None:
            return self._alike
        draws = Draws(random.draws.temperature, self._uniforms.pop(), random.draws.truncation)
        return SamplingBatch(random=RandomRows(random.rows, draws))
