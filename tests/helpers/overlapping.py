"""Several steps in flight on a CPU, where what a step found is kept from the host for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from torch import Tensor

from kvik import launch
from kvik.config.config import ResolvedConfig
from kvik.worker.request_table import Expected, RequestTable
from kvik.worker.worker import Worker

POISON = -(10**6)  # no token; whoever reads it early computes it, and fails


class LateCopies:
    """What a step found can be read once it is waited for, and not before. Its own tensors may be
    overwritten by then, as those of a device are."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.unread = self.most_unread = 0

    def start(self, tensors: Sequence[Tensor]) -> Late:
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        return Late(self, [tensor.clone() for tensor in tensors])


class Late:
    def __init__(self, copies: LateCopies, tensors: list[Tensor]) -> None:
        self._copies = copies
        self._tensors = tensors

    def wait(self) -> list[np.ndarray]:
        self._copies.unread -= 1
        return [tensor.numpy() for tensor in self._tensors]


@contextmanager
def steps_in_flight(depth: int) -> Iterator[list[LateCopies]]:
    """Engines that are made within have so many, with the copies of each; 1 is what they are."""
    made: list[LateCopies] = []
    if depth == 1:
        yield made
        return

    def load(
        resolved: ResolvedConfig,
        clock: Callable[[], float] = time.monotonic,
        ahead: object = None,
        token: bytes = b"",
    ) -> Worker:
        made.append(LateCopies(depth))
        return Worker(resolved, clock, made[-1], grammars=launch.grammars_of(resolved))

    expect = RequestTable.expect

    def poisoned(self: RequestTable, slots: np.ndarray) -> Expected:
        found = expect(self, slots)
        self.token_ids[found.slots, found.places] = POISON
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "load_worker", load)
        patch.setattr(RequestTable, "expect", poisoned)
        yield made
