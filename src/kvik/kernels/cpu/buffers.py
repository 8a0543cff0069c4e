"""Memory for the native kernels: on huge pages, and for a tape's intermediate results."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.cpu import _native

# Weights share chunks of this size. Only the used huge pages of a chunk are in memory, so larger
# chunks waste less.
CHUNK = 512 << 20
ALIGNMENT = 4096

CPU = torch.device("cpu")


def zeros(*shape: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Allocate zeros on separate pages, which take no memory until they are written."""
    memory = _native.allocate(max(1, math.prod(shape) * dtype.itemsize), huge=True)
    return torch.from_numpy(memory).view(dtype)[: math.prod(shape)].view(shape)


def give_back(tensor: Tensor, runs: Iterable[tuple[int, int]]) -> int:
    """Give the memory of parts of a tensor of `zeros` back to the system; they are zeros again.

    Args:
        tensor: [rows, ...], dense.
        runs: first row and number of rows.

    Returns:
        Bytes: whole pages only.
    """
    start, row = tensor.data_ptr(), tensor.stride(0) * tensor.itemsize
    return sum(_native.give_back(start + first * row, count * row) for first, count in runs)


class WeightMemory:
    """Memory of weights, allocated one after the other and released only as a whole.

    So small weights are on huge pages too, and large ones do not leave partly used pages.

    Args:
        first: memory to use before any is allocated: [bytes] uint8 zeros; None: none.
    """

    def __init__(self, first: np.ndarray | None = None) -> None:
        self._chunk = np.empty(0, np.uint8) if first is None else first
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Allocate [num_bytes] uint8 zeros, aligned to a page."""
        if self._used + num_bytes > len(self._chunk):
            if num_bytes >= CHUNK // 2:
                return torch.from_numpy(_native.allocate(num_bytes, huge=True))
            self._chunk, self._used = _native.allocate(CHUNK, huge=True), 0
        start = self._used
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return torch.from_numpy(self._chunk[start : start + num_bytes])


class BufferPool:
    """Buffers for the results of recorded calls. A buffer is free for later calls once the last
    tensor on it is deleted, so a tape needs as little memory as a run would. Buffers have the size
    of the largest step, and are on small pages, so that small steps take little memory."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the smallest free buffer that fits without wasting half, or a new one."""
        size = max(1, math.prod(shape) * dtype.itemsize)
        fitting = [b for b in self._free if size <= len(b) <= 2 * size]
        if fitting:
            buffer = min(fitting, key=len)
            self._free = [b for b in self._free if b is not buffer]
        else:
            buffer = _native.allocate(size, huge=False)
        view = buffer[:size]  # lives as long as a tensor uses its storage
        weakref.finalize(view, self._free_again, buffer).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _free_again(self, buffer: np.ndarray) -> None:
        self._free.append(buffer)
