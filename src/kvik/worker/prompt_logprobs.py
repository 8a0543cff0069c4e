"""Log probabilities of a prompt's own tokens, from the hidden states of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvik.config.memory import POOLED_ROWS, PROMPT_COPIED_ROWS, PROMPT_ROWS
from kvik.core.plan import NewRequest
from kvik.core.types import TokenLogprobs
from kvik.kernels.upload import upload
from kvik.worker.graphs import EngineNetwork
from kvik.worker.input_batch import InputBatch
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import Scores, describe, score, told
from kvik.worker.step_inputs import Arrival, Copies

# One vector of a whole prompt, from the hidden states of its chunks.


@dataclass(slots=True)
class _Pooled:
    """Attributes:
    kind: as in `NewRequest.pooling`.
    sums: [hidden] float64, of the chunks that were read; None: none was.
    """

    kind: str
    num_prompt: int
    sums: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """Hidden states on their way to the host.

    Attributes:
        row: of the step.
        pooled: what they belong to.
        arrival: of their bits: [tokens, hidden].
        dtype: whose bits they are.
        ends: the prompt is through.
    """

    row: int
    pooled: _Pooled
    arrival: Arrival
    dtype: torch.dtype
    ends: bool


def read_pooled(chunks: Sequence[PooledChunk], errors: dict[int, str]) -> dict[int, list[float]]:
    """Waits for them. Steps are read in their order.

    Args:
        errors: by row, which may get more.

    Returns:
        By row, the vectors [hidden] of prompts that are through, in single precision.
    """
    done: dict[int, list[float]] = {}
    for chunk in chunks:
        try:
            (bits,) = chunk.arrival.wait()
            hidden, pooled = torch.from_numpy(bits).view(chunk.dtype), chunk.pooled
            if pooled.kind == "mean":
                pooled.sums = _sum(pooled.sums, hidden)
                if chunk.ends:
                    mean = pooled.sums / pooled.num_prompt
                    done[chunk.row] = mean.astype(np.float32).tolist()
            else:
                done[chunk.row] = hidden[-1].float().tolist()
        except Exception as error:
            errors[chunk.row] = describe(error)
    return done


class Pooling:
    """Sums are taken in double precision, token after token. So a mean does not depend on how its
    prompt was cut into chunks, as far as the hidden states do not."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._wanted: dict[int, _Pooled] = {}  # by slot

    def enter(self, new: NewRequest) -> None:
        """A request stands in its slot. A preempted one begins anew, since nothing of a prompt
        whose mean is wanted is found cached."""
        if new.pooling is not None:
            self._wanted[new.slot] = _Pooled(new.pooling, new.num_prompt_tokens)

    def leave(self, slot: int) -> None:
        self._wanted.pop(slot, None)

    def launch(
        self, batch: InputBatch, hidden: Tensor, table: RequestTable, errors: dict[int, str]
    ) -> list[PooledChunk]:
        """Have the hidden states brought that are wanted.

        Args:
            hidden: [tokens, hidden], normalised; read before the next step, or copied till then.
            table: which counts the step's tokens as computed.
            errors: by row; those that have one are passed over, others may get one.
        """
        chunks: list[PooledChunk] = []
        if not self._wanted:
            return chunks
        for row, slot in enumerate(batch.slots.tolist()):
            pooled = self._wanted.get(slot)
            if pooled is None or row in errors:
                continue
            start, end = int(batch.starts[row]), int(batch.starts[row + 1])
            ends = bool(table.num_computed[slot] == pooled.num_prompt)
            if pooled.kind == "last":
                start = end - 1
            if pooled.kind == "mean" or ends:
                try:
                    arrival = self._copies.start([_bits(hidden[start:end])])
                except Exception as error:
                    errors[row] = describe(error)
                    continue
                chunks.append(PooledChunk(row, pooled, arrival, hidden.dtype, ends))
        return chunks


def _bits(numbers: Tensor) -> Tensor:
    """As integers of the same size: numpy, which results come in, knows no bfloat16."""
    return numbers.view(torch.int32 if numbers.element_size() == 4 else torch.int16)


def _sum(before: np.ndarray | None, hidden: Tensor) -> np.ndarray:
    """Rows [tokens, hidden] added to [hidden] float64, one after another."""
    sums = np.zeros(hidden.shape[1]) if before is None else before
    for rows in hidden.split(POOLED_ROWS):
        # Along an axis that is not the innermost one numpy adds in order.
        sums = np.add.reduce(np.concatenate([sums[None], rows.float().numpy()]), axis=0)
    return sums


@dataclass(slots=True)
class _Wanted:
    """Gathered chunk by chunk, handed over once the prompt is through."""

    top: int
    found: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Logprobs that the device has or will have.

    Attributes:
        row: of the step.
        wanted: what they are added to.
        arrival: of `Scores.tensors`.
        ends: the prompt is through.
    """

    row: int
    wanted: _Wanted
    arrival: Arrival
    ends: bool


def read_prompt_logprobs(
    chunks: Sequence[ScoredChunk], errors: dict[int, str]
) -> dict[int, list[TokenLogprobs]]:
    """Waits for them. Steps are read in their order.

    Args:
        errors: by row, which may get more.

    Returns:
        By row, of the prompts that are through.
    """
    done: dict[int, list[TokenLogprobs]] = {}
    for chunk in chunks:
        try:
            chunk.wanted.found += told(chunk.arrival.wait())
        except Exception as error:
            errors[chunk.row] = describe(error)
            continue
        if chunk.ends:
            done[chunk.row] = chunk.wanted.found
    return done


class PromptLogprobs:
    def __init__(self, network: EngineNetwork, copies: Copies) -> None:
        self._network = network
        self._copies = copies
        self._wanted: dict[int, _Wanted] = {}  # by slot

    def enter(self, new: NewRequest) -> None:
        """A request stands in its slot."""
        if new.params.prompt_logprobs is not None:
            self._wanted[new.slot] = _Wanted(new.params.prompt_logprobs)

    def leave(self, slot: int) -> None:
        self._wanted.pop(slot, None)

    def launch(
        self, batch: InputBatch, hidden: Tensor, table: RequestTable, errors: dict[int, str]
    ) -> list[ScoredChunk]:
        """Begin to compute those of the prompt tokens that this step's positions predict, where
        asked for.

        Args:
            hidden: [tokens, hidden], normalised.
            table: which counts the step's tokens as computed.
            errors: by row; those that have one are passed over, others may get one.
        """
        chunks: list[ScoredChunk] = []
        if not self._wanted:
            return chunks
        for row, slot in enumerate(batch.slots.tolist()):
            wanted = self._wanted.get(slot)
            if wanted is None or row in errors:
                continue
            num_prompt = int(table.num_prompt[slot])
            start, end = int(batch.starts[row]), int(batch.starts[row + 1])
            first = int(table.num_computed[slot]) - (end - start)  # position of `start`
            last = min(first + end - start, num_prompt - 1)  # this one predicts no prompt token
            try:
                targets = table.token_ids[slot, first + 1 : last + 1].astype(np.int64)
                ids = upload(targets, hidden.device)
                rows = hidden[start : start + last - first]
                arrival = self._copies.start(self._scores(rows, ids, wanted.top).tensors)
            except Exception as error:
                errors[row] = describe(error)
                continue
            ends = first + end - start >= num_prompt
            if ends:
                del self._wanted[slot]
            chunks.append(ScoredChunk(row, wanted, arrival, ends))
        return chunks

    def _scores(self, hidden: Tensor, ids: Tensor, top: int) -> Scores:
        """Of given tokens. The logits of a piece are gone when the next one is begun.

        Args:
            hidden: [rows, hidden]. ids: [rows] int64.
        """
        found = None
        for first in range(0, len(ids), PROMPT_ROWS):
            # [rows, vocab]
            logits = self._network.model.logits(hidden[first : first + PROMPT_ROWS])
            if found is None:
                found = Scores.room(len(ids), min(top, logits.shape[-1]), hidden.device)
            for i in range(0, len(logits), PROMPT_COPIED_ROWS):
                some = ids[first + i : first + i + PROMPT_COPIED_ROWS][: len(logits) - i]
                found.put(first + i, score(logits[i : i + len(some)], some, top))
            del logits
        return found or Scores.room(0, 0, hidden.device)
