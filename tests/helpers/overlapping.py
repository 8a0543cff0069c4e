"""Several steps in flight on a CPU: the results of a step reach the host late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from kvik.worker.request_table import Expected, RequestTable
from kvik.worker.step_inputs import Arrival

POISON = -(10**6)  # no token: a forward that reads it fails


class LateCopies:
    """Copies that the host reads when it waits for them; the tensors of the step may be
    overwritten by then, as on a GPU."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.unread = self.most_unread = 0

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        copies = [tensor.clone() for tensor in tensors]

        def wait() -> list[np.ndarray]:
            self.unread -= 1
            return [copy.cpu().numpy() for copy in copies]

        return wait


@contextmanager
def steps_in_flight(depth: int) -> Iterator[list[LateCopies]]:
    """Let engines that are made in the context have `depth` steps in flight; yields the copies of
    each engine, none if depth is 1."""
    made: list[LateCopies] = []
    if depth == 1:
        yield made
        return

    def copies(device: torch.device) -> LateCopies:
        made.append(LateCopies(depth))
        return made[-1]

    expect = RequestTable.expect

    def poisoned(self: RequestTable, slots: np.ndarray) -> Expected:
        found = expect(self, slots)
        self.token_ids[found.slots, found.places] = POISON
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvik.worker.worker.best_copies", copies)
        patch.setattr(RequestTable, "expect", poisoned)
        yield made
