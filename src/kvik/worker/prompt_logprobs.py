"""Log probabilities of a prompt's own tokens, from the hidden states of its chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kvik.config.memory import PROMPT_COPIED_ROWS, PROMPT_ROWS
from kvik.core.plan import NewRequest
from kvik.core.types import TokenLogprobs
from kvik.worker.copies import upload
from kvik.worker.graphs import Network
from kvik.worker.input_batch import InputBatch
from kvik.worker.request_table import RequestTable
from kvik.worker.scores import token_logprobs
from kvik.worker.step_sampler import describe


@dataclass(slots=True)
class _Wanted:
    """Gathered chunk by chunk, handed over once the prompt is through."""

    top: int
    found: list[TokenLogprobs] = field(default_factory=list)


class PromptLogprobs:
    """They are read while the step runs, which waits for it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._wanted: dict[int, _Wanted] = {}  # by slot

    def enter(self, new: NewRequest) -> None:
        """A request stands in its slot."""
        if new.params.prompt_logprobs is not None:
            self._wanted[new.slot] = _Wanted(new.params.prompt_logprobs)

    def leave(self, slot: int) -> None:
        self._wanted.pop(slot, None)

    def read(
        self, batch: InputBatch, hidden: Tensor, table: RequestTable, errors: dict[int, str]
    ) -> dict[int, list[TokenLogprobs]]:
        """Those of the prompt tokens that this step's positions predict, where asked for.

        Args:
            hidden: [tokens, hidden], normalised.
            table: which counts the step's tokens as computed.
            errors: by row; those that have one are passed over, others may get one.

        Returns:
            By row, of the prompts that are through.
        """
        done: dict[int, list[TokenLogprobs]] = {}
        if not self._wanted:
            return done
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
                for i in range(0, last - first, PROMPT_ROWS):
                    rows = hidden[start + i : start + last - first][:PROMPT_ROWS]
                    wanted.found += self._score(rows, ids[i : i + PROMPT_ROWS], wanted.top)
            except Exception as error:
                errors[row] = describe(error)
                continue
            if first + end - start >= num_prompt:
                done[row] = self._wanted.pop(slot).found
        return done

    def _score(self, hidden: Tensor, ids: Tensor, top: int) -> list[TokenLogprobs]:
        """Logprobs of given tokens. Their logits are gone when it returns.

        Args:
            hidden: [rows, hidden]. ids: [rows] int64.
        """
        logits = self._network.model.logits(hidden)  # [rows, vocab]
        parts = zip(logits.split(PROMPT_COPIED_ROWS), ids.split(PROMPT_COPIED_ROWS), strict=True)
        return [found for part in parts for found in token_logprobs(*part, top)]
