"""The memory of a KV cache in one piece, so that nothing of it lies between other tensors."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, of each part
MARGIN = 1 << 20  # bytes for it, of some hundred parts


class KVPool:
    """`nn.kv_formats.Zeros` that hands out parts of one allocation, which is made for the first."""

    def __init__(self, size: int) -> None:
        """
        Args:
            size: bytes that were planned for all parts.
        """
        self._size = size + MARGIN
        self._memory: Tensor | None = None
        self._used = 0

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._memory is None:
            self._memory = torch.zeros(self._size, dtype=torch.uint8, device=device)
        first, size = self._used, prod(shape) * dtype.itemsize
        self._used = -(-(first + size) // ALIGNMENT) * ALIGNMENT
        if self._used > self._size:
            raise RuntimeError(
                f"the KV cache takes more than the {self._size} bytes planned for it"
            )
        return self._memory[first : first + size].view(dtype).view(shape)
