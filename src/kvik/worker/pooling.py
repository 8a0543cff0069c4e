"""One vector of a whole prompt, from the hidden states of its chunks."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvik.config.memory import POOLED_ROWS
from kvik.core.plan import NewRequest
from kvik.worker.input_batch import InputBatch
from kvik.worker.request_table import RequestTable
from kvik.worker.step_sampler import describe


class Pooling:
    """Sums are taken in double precision, token after token. So a mean does not depend on how its
    prompt was cut into chunks, as far as the hidden states do not."""

    def __init__(self) -> None:
        self._wanted: dict[int, str] = {}  # by slot
        self._sums: dict[int, np.ndarray] = {}  # by slot, [hidden] float64

    def enter(self, new: NewRequest) -> None:
        """A request stands in its slot. A preempted one begins anew, since nothing of a prompt
        whose mean is wanted is found cached."""
        if new.pooling is not None:
            self._wanted[new.slot] = new.pooling

    def leave(self, slot: int) -> None:
        self._wanted.pop(slot, None)
        self._sums.pop(slot, None)

    def read(
        self, batch: InputBatch, hidden: Tensor, table: RequestTable, errors: dict[int, str]
    ) -> dict[int, list[float]]:
        """Take in a step.

        Args:
            hidden: [tokens, hidden], normalised.
            table: which counts the step's tokens as computed.
            errors: by row; those that have one are passed over, others may get one.

        Returns:
            By row, the vectors [hidden] of prompts that are through.
        """
        done: dict[int, list[float]] = {}
        if not self._wanted:
            return done
        for row, slot in enumerate(batch.slots.tolist()):
            wanted = self._wanted.get(slot)
            if wanted is None or row in errors:
                continue
            start, end = int(batch.starts[row]), int(batch.starts[row + 1])
            num_prompt = int(table.num_prompt[slot])
            try:
                if wanted == "mean":
                    self._sums[slot] = _sum(self._sums.get(slot), hidden[start:end])
                if table.num_computed[slot] == num_prompt:
                    done[row] = self._vector(slot, hidden[end - 1], num_prompt)
            except Exception as error:
                errors[row] = describe(error)
        return done

    def _vector(self, slot: int, last: Tensor, num_prompt: int) -> list[float]:
        """In single precision.

        Args:
            last: [hidden], of the last token.
        """
        if self._wanted[slot] == "last":
            found: list[float] = last.float().tolist()
        else:
            found = (self._sums[slot] / num_prompt).astype(np.float32).tolist()
        return found


def _sum(before: np.ndarray | None, hidden: Tensor) -> np.ndarray:
    """Rows [tokens, hidden] added to [hidden] float64, one after another."""
    sums = np.zeros(hidden.shape[1]) if before is None else before
    for rows in hidden.split(POOLED_ROWS):
        # Along an axis that is not the innermost one numpy adds in order.
        sums = np.add.reduce(np.concatenate([sums[None], rows.float().cpu().numpy()]), axis=0)
    return sums
