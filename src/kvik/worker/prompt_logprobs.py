"""Log probabilities of a prompt's own tokens, from the hidden states of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvik.config.memory import PROMPT_COPIED_ROWS, PROMPT_ROWS
from kvik.core.plan import NewRequest
from kvik.core.types import TokenLogprobs
from kvik.worker.copies import Arrival, Copies, upload
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
        arrivals: of `Scores.tensors`, one after the other.
        ends: the prompt is through.
    """

    row: int
    wanted: _Wanted
    arrivals: list[Arrival]
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
            for arrival in chunk.arrivals:
                chunk.wanted.found += told(arrival.wait())
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
                arrivals = []
                for i in range(0, last - first, PROMPT_ROWS):
                    rows = hidden[start + i : start + last - first][:PROMPT_ROWS]
                    scores = self._score(rows, ids[i : i + PROMPT_ROWS], wanted.top)
                    arrivals.append(self._copies.start(scores))
            except Exception as error:
                errors[row] = describe(error)
                continue
            ends = first + end - start >= num_prompt
            if ends:
                del self._wanted[slot]
            chunks.append(ScoredChunk(row, wanted, arrivals, ends))
        return chunks

    def _score(self, hidden: Tensor, ids: Tensor, top: int) -> list[Tensor]:
        """Logprobs of given tokens. Their logits are gone when it returns.

        Args:
            hidden: [rows, hidden]. ids: [rows] int64.

        Returns:
            As `Scores.tensors`.
        """
        logits = self._network.model.logits(hidden)  # [rows, vocab]
        parts = zip(logits.split(PROMPT_COPIED_ROWS), ids.split(PROMPT_COPIED_ROWS), strict=True)
        scores: list[Scores] = [score(*part, top) for part in parts]
        return [torch.cat(same) for same in zip(*(part.tensors for part in scores), strict=True)]
