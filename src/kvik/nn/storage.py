"""Where the memory of a model's weights comes from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.weights import Matrix, MatrixSpec


class Storage(Protocol):
    """Names are those of the checkpoint; a matrix has those of its layers in one."""

    @property
    def names(self) -> Collection[str]:
        """Of all that it holds the values of; none: its memory is new."""
        ...

    def matrix(self, name: str, spec: MatrixSpec) -> Matrix:
        """Of the size and with what follows the product as `spec` says."""
        ...

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...


class FreshStorage:
    """New memory, to be filled by a loader. It keeps what it gave."""

    names: Collection[str] = ()

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.matrices: dict[str, Matrix] = {}
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, spec: MatrixSpec) -> Matrix:
        self.matrices[name] = self._ops.matrix(spec)
        return self.matrices[name]

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self.tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        return self.tensors[name]
