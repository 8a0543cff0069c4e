"""Tokens for the rows of logits of a step: many at once, row by row if one breaks that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvik.config.memory import SAMPLER_BYTES
from kvik.core.types import TokenLogprobs
from kvik.kernels.ops import Ops
from kvik.worker.graphs import StepOutput
from kvik.worker.sampler import Sampler, SampleResult
from kvik.worker.sampling_batch import NOTHING, Guesses, Offers, Supposed
from kvik.worker.sampling_table import SamplingTable


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Attributes:
    token_ids: [rows] int64 on the host; meaningless in bad rows.
    bad_rows: rows that could not be sampled, and why.
    logprobs: by row, where asked for.
    """

    token_ids: np.ndarray
    bad_rows: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


class StepSampler:
    def __init__(self, ops: Ops, sampling: SamplingTable, device: torch.device) -> None:
        self.sampling = sampling
        self._sampler = Sampler(ops)
        self._room = SAMPLER_BYTES[device.type]

    def sample(
        self,
        output: StepOutput,
        slots: np.ndarray,
        positions: np.ndarray,
        supposed: Supposed = NOTHING,
        judged: Guesses | Offers | None = None,
    ) -> StepTokens:
        """
        Args:
            output: of the step, with as many rows of logits.
            slots, positions: [rows], whose token each row is, and where it will stand.
            supposed: drafts that rows take to have been put out before theirs.
            judged: drafts that were drawn, or that may be taken though they were not, by the rows
                that judge them.
        """

        def sample(first: int, last: int) -> SampleResult:
            part = slice(first, last)
            batch = self.sampling.batch(
                slots[part],
                positions[part],
                supposed.part(first, last),
                None if judged is None else judged.part(first, last),
            )
            largest = (output.top[part], output.top_ids[part])
            return self._sampler.sample(output.logits[part], batch, largest)

        rows = len(slots)
        size = self.sampling.rows_at_once(slots, self._room, shares=judged is not None)
        parts: list[tuple[int, SampleResult]] = []
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
            _, result = parts[0]
            return StepTokens(result.token_ids.cpu().numpy(), result.bad_rows, result.logprobs)
        token_ids = np.zeros(rows, np.int64)
        logprobs: dict[int, TokenLogprobs] = {}
        for first, result in parts:
            token_ids[first : first + len(result.token_ids)] = result.token_ids.cpu().numpy()
            logprobs |= {first + i: found for i, found in result.logprobs.items()}
            bad_rows |= {first + i: why for i, why in result.bad_rows.items()}
        return StepTokens(token_ids, bad_rows, logprobs)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
