"""Log probabilities of a prompt's own tokens, from the hidden states of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kvik.config.memory import PROMPT_COPIED_ROWS, PROMPT_ROWS
from kvik.core.plan import NewRequest
from kvik.core.types import TokenLogprobs
from kvik.kernels.upload import upload
from kvik.worker.copies import Arrival, Copies
from kvik.worker.graphs import Network
from kvik.worker.input_batch import InputBatch
from kvik.worker.request_table import RequestTable
from kvik.worker.scores import Scores, score, told
from kvik.worker.step_sampler import describe


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
    def __init__(self, network: Network, copies: Copies) -> None:
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
