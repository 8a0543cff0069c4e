"""Tokens for the rows of logits of a step: many at once, row by row if one breaks that.

A step is sampled when its forward was begun, and read later: by then the next one may run.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvik.config.memory import SAMPLER_BYTES
from kvik.core.types import TokenLogprobs
from kvik.frozen import frozen
from kvik.kernels.ops import Ops
from kvik.worker.copies import Arrival, Copies
from kvik.worker.graphs import StepOutput
from kvik.worker.sampler import Sampled, Sampler
from kvik.worker.sampling_batch import NOTHING, Guesses, Offers, Supposed
from kvik.worker.sampling_table import SamplingTable


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
