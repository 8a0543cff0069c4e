"""Outputs about prompts, from the hidden states of their chunks: one vector of the whole prompt,
and log probabilities of the prompt's own tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvik.config.memory import POOLED_ROWS
from kvik.config.step_memory import PROMPT_COPIED_ROWS, PROMPT_ROWS
from kvik.core.plan import NewRequest
from kvik.core.types import SCORE, TokenLogprobs
from kvik.errors import describe
from kvik.kernels.upload import upload
from kvik.worker.graphs import EngineNetwork
from kvik.worker.model_runner import Participant, RunningStep
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import Scores, score, to_host
from kvik.worker.step_inputs import Arrival, Copies


@dataclass(slots=True)
class _Pooled:
    """The pooled vector of one prompt, in progress."""

    kind: str  # one of `POOLINGS`
    scored: bool  # the result is a score
    num_prompt: int
    # [hidden] float64 sums over the chunks read so far, or their maxima in fp32; None: no chunk was
    # read.
    sums: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """Hidden states on their way to the host."""

    row: int  # row of the step
    pooled: _Pooled  # the vector that they belong to
    arrival: Arrival  # arrival of their bits: [tokens, hidden]
    # dtype, device: of the hidden states.
    dtype: torch.dtype
    device: torch.device
    ends: bool  # it is the last chunk of the prompt


class Pooling(Participant[list[PooledChunk]]):
    """Pools a prompt's hidden states into one vector, and applies the model's head, for requests
    that embed or score.

    Sums are computed in double precision, token after token. So if hidden states do not depend on
    how the prompt is cut into chunks, neither does their mean.
    """

    def __init__(self, network: EngineNetwork, copies: Copies) -> None:
        self._network = network
        self._copies = copies
        self._requests: dict[int, _Pooled] = {}  # by slot

    def enter(self, new: NewRequest) -> None:
        # A preempted request starts again: a prompt whose mean is computed is never cached.
        if new.pooling is not None:
            pooling, kind = self._network.pooling, new.pooling
            scored = kind == SCORE
            if scored:
                assert pooling is not None
                kind = pooling.kind
            self._requests[new.slot] = _Pooled(kind, scored, new.num_prompt_tokens)

    def leave(self, slot: int) -> None:
        self._requests.pop(slot, None)

    def launch(self, step: RunningStep) -> list[PooledChunk] | None:
        """Begin to copy the needed hidden states to the host."""
        if not self._requests or step.output is None:
            return None
        chunks: list[PooledChunk] = []
        batch, hidden = step.batch, step.output.hidden  # [tokens, hidden], normalised
        for row, slot in enumerate(batch.slots.tolist()):
            pooled = self._requests.get(slot)
            if pooled is None or row in step.result.errors:
                continue
            start, end = int(batch.starts[row]), int(batch.starts[row + 1])
            ends = bool(batch.ends[row] == pooled.num_prompt)
            first = int(batch.ends[row]) == end - start
            if pooled.kind == "last":
                start = end - ends
            elif pooled.kind == "cls":
                end = start + first
            if ends or end > start:
                try:
                    arrival = self._copies.start([_bits(hidden[start:end])])
                except Exception as error:
                    step.result.errors[row] = describe(error)
                    continue
                chunks.append(PooledChunk(row, pooled, arrival, hidden.dtype, hidden.device, ends))
        return chunks

    def read(self, step: RunningStep, launched: list[PooledChunk] | None) -> None:
        """Add up the chunks. The vectors [hidden] of finished prompts are in single precision."""
        for chunk in launched or ():
            try:
                (bits,) = chunk.arrival()
                hidden, pooled = torch.from_numpy(bits).view(chunk.dtype), chunk.pooled
                if pooled.kind == "mean":
                    pooled.sums = _sum(pooled.sums, hidden)
                elif len(hidden):
                    largest = hidden.float().amax(0).numpy()  # of one row, this row
                    before = pooled.sums
                    pooled.sums = largest if before is None else np.maximum(before, largest)
                if chunk.ends and pooled.sums is not None:
                    total = pooled.num_prompt if pooled.kind == "mean" else 1
                    vector = torch.from_numpy((pooled.sums / total).astype(np.float32))
                    step.result.embeddings[chunk.row] = self._finished(vector, chunk)
            except Exception as error:
                step.result.errors[chunk.row] = describe(error)

    def _finished(self, vector: Tensor, chunk: PooledChunk) -> list[float]:
        """Return the embedding or score of a pooled vector, [hidden] fp32."""
        network, vector = self._network, vector.to(chunk.device)
        tokens = network.pooling.score_tokens if network.pooling else None
        if chunk.pooled.scored and tokens is not None:
            yes, no = tokens
            logits = network.logits(vector[None].to(chunk.dtype))[0]
            return [float(logits[yes]) - (0.0 if no is None else float(logits[no]))]
        if network.pooled is not None:
            vector = network.pooled(vector)
        values: list[float] = vector.tolist()
        return values


def _bits(numbers: Tensor) -> Tensor:
    """View numbers as integers of the same size: results come as numpy arrays, and numpy has no
    bfloat16."""
    return numbers.view(torch.int32 if numbers.element_size() == 4 else torch.int16)


def _sum(before: np.ndarray | None, hidden: Tensor) -> np.ndarray:
    """Add rows [tokens, hidden] to [hidden] float64, one after another."""
    sums = np.zeros(hidden.shape[1]) if before is None else before
    for rows in hidden.split(POOLED_ROWS):
        # numpy adds in order along an axis that is not the innermost one.
        sums = np.add.reduce(np.concatenate([sums[None], rows.float().numpy()]), axis=0)
    return sums


@dataclass(slots=True)
class _ScoreRequest:
    """Logprobs of one prompt, gathered chunk by chunk."""

    top: int  # how many of the most likely tokens to report for each position
    start: int  # index of the first token to score
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Logprobs that the device has or will have."""

    row: int  # row of the step
    request: _ScoreRequest  # log probabilities to which they are added
    arrival: Arrival  # arrival of `Scores.tensors`
    ends: bool  # it is the last chunk of the prompt


class PromptLogprobs(Participant[list[ScoredChunk]]):
    """Computes log probabilities of a prompt's own tokens, if requested."""

    def __init__(self, network: EngineNetwork, table: RequestTable, copies: Copies) -> None:
        self._network = network
        self._table = table
        self._copies = copies
        self._requests: dict[int, _ScoreRequest] = {}  # by slot

    def enter(self, new: NewRequest) -> None:
        if new.params.prompt_logprobs is not None:
            self._requests[new.slot] = _ScoreRequest(
                new.params.prompt_logprobs, new.params.prompt_logprobs_start
            )

    def leave(self, slot: int) -> None:
        self._requests.pop(slot, None)

    def launch(self, step: RunningStep) -> list[ScoredChunk] | None:
        """Begin to score the prompt tokens that this step's positions predict."""
        if not self._requests or step.output is None:
            return None
        chunks: list[ScoredChunk] = []
        table, batch, hidden = self._table, step.batch, step.output.hidden
        for row, slot in enumerate(batch.slots.tolist()):
            requested = self._requests.get(slot)
            if requested is None or row in step.result.errors:
                continue
            num_prompt = int(table.num_prompt[slot])
            start, end = int(batch.starts[row]), int(batch.starts[row + 1])
            first = int(batch.ends[row]) - (end - start)  # position of `start`
            last = min(first + end - start, num_prompt - 1)  # the end of those that predict one
            scored = min(max(first, requested.start - 1), last)  # first position to score
            try:
                targets = table.token_ids[slot, scored + 1 : last + 1].astype(np.int64)
                ids = upload(targets, hidden.device)
                rows = hidden[start + scored - first : start + last - first]
                arrival = self._copies.start(self._scores(rows, ids, requested.top).tensors)
            except Exception as error:
                step.result.errors[row] = describe(error)
                continue
            ends = first + end - start >= num_prompt
            if ends:
                del self._requests[slot]
            chunks.append(ScoredChunk(row, requested, arrival, ends))
        return chunks

    def read(self, step: RunningStep, launched: list[ScoredChunk] | None) -> None:
        for chunk in launched or ():
            try:
                chunk.request.logprobs += to_host(chunk.arrival())
            except Exception as error:
                step.result.errors[chunk.row] = describe(error)
                continue
            if chunk.ends:
                step.result.prompt_logprobs[chunk.row] = chunk.request.logprobs

    def _scores(self, hidden: Tensor, ids: Tensor, top: int) -> Scores:
        """Score given tokens, in parts. The logits of a part are freed before the next one.

        Args:
            hidden: [rows, hidden]. ids: [rows] int64.
        """
        scores = None
        for first in range(0, len(ids), PROMPT_ROWS):
            # [rows, vocab]
            logits = self._network.logits(hidden[first : first + PROMPT_ROWS])
            if scores is None:
                scores = Scores.empty(len(ids), min(top, logits.shape[-1]), hidden.device)
            for i in range(0, len(logits), PROMPT_COPIED_ROWS):
                some = ids[first + i : first + i + PROMPT_COPIED_ROWS][: len(logits) - i]
                scores.put(first + i, score(logits[i : i + len(some)], some, top))
            del logits
        return scores or Scores.empty(0, 0, hidden.device)
