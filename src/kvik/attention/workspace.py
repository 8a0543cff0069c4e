"""Memory for gathered keys and values, kept between layers and steps.

A fresh megabyte from the system costs a page fault per 4 KiB, which is several times the gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.attention.base import LayerKV
from kvik.attention.stored import read


class Workspace:
    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def gather(self, kv: LayerKV, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of some positions; valid until the next call.

        Args:
            keys: [n] int64, KV positions.

        Returns:
            Each [n, kv_heads, head_dim] of `dtype`.
        """
        if kv.k.dtype != dtype:
            k, v = read(kv.k, kv.k_scales, keys), read(kv.v, kv.v_scales, keys)
            return k.to(dtype), v.to(dtype)
        token_shape = kv.k.shape[2:]
        shape = (2, keys.shape[0], *token_shape)
        size = 2 * keys.shape[0] * token_shape.numel()
        buffer = self._buffer
        if buffer.numel() < size or buffer.dtype != kv.k.dtype or buffer.device != kv.k.device:
            self._buffer = kv.k.new_empty(size)
        k, v = self._buffer[:size].view(shape).unbind()
        torch.index_select(kv.k.view(-1, *token_shape), 0, keys, out=k)
        torch.index_select(kv.v.view(-1, *token_shape), 0, keys, out=v)
        return k, v
