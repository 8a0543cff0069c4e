"""How results come from the device to the host while steps run, and nobody waits.

On a CPU both are the same memory. On a GPU a copy that the host does not wait for needs pinned
memory on its side, and a result may be read only once its copy has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.frozen import frozen


class Arrival(Protocol):
    """Results that are on their way to the host."""

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, once they are there."""
        ...


class Copies(Protocol):
    """How results come to the host.

    Attributes:
        depth: steps worth having in flight: 1 where a result is there when its step was begun, else
            results are read when later steps have begun.
    """

    depth: int

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        """Copy what the tensors hold once all that was begun before is done."""
        ...


class AtOnce:
    """Results are read where they are, which waits for them."""

    depth = 1

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        return _There(tensors)


@frozen
class _There:
    tensors: Sequence[Tensor]

    def wait(self) -> list[NDArray[Any]]:
        return [tensor.cpu().numpy() for tensor in self.tensors]


class PinnedCopies:
    """The device copies results into pinned memory behind the kernels that make them, so that the
    next step may be begun before."""

    depth = 2  # one runs, one is ready to: more would only make decisions earlier

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        copies = []
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
        arrived = torch.cuda.Event()
        arrived.record()
        return _OnItsWay(copies, arrived)


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    copies: list[Tensor]
    arrived: torch.cuda.Event

    def wait(self) -> list[NDArray[Any]]:
        self.arrived.synchronize()
        return [copy.numpy() for copy in self.copies]
