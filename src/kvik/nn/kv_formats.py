"""How K and V are stored, and the pool of blocks that all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvik.attention.base import LayerKV
from kvik.config.kv_spec import KVCacheSpec, KVGroup


class Zeros(Protocol):
    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


class KVFormat(Protocol):
    """Storage of the KV cache."""

    name: str

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's K and V in one layer, scales included."""
        ...

    def allocate(
        self, num_blocks: int, block_size: int, spec: KVCacheSpec, device: torch.device
    ) -> LayerKV:
        """Storage of one layer."""
        ...


class DenseKV:
    """K and V as floats."""

    name = "dense"

    def __init__(self, dtype: torch.dtype, zeros: Zeros = torch.zeros) -> None:
        """
        Args:
            zeros: where the memory comes from.
        """
        self.dtype = dtype
        self._zeros = zeros

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        return 2 * num_kv_heads * head_dim * self.dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, spec: KVCacheSpec, device: torch.device
    ) -> LayerKV:
        """Zeros, because a masked key has weight 0 and 0 times garbage may be NaN. The system hands
        out zero pages only when they are first written, so an unused block costs nothing."""
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        return LayerKV(
            k=self._zeros(*shape, dtype=self.dtype, device=device),
            v=self._zeros(*shape, dtype=self.dtype, device=device),
        )


def allocate_kv(
    groups: Sequence[KVGroup],
    num_blocks: int,
    block_size: int,
    format: KVFormat,
    device: torch.device,
) -> tuple[LayerKV, ...]:
    """The cache of every layer, for `ForwardContext.kv`.

    A block belongs to one group at a time, so the i-th layers of all groups share one storage: the
    pool has as many storages as the largest group has layers.
    """
    shapes = {(g.spec.num_kv_heads, g.spec.head_dim) for g in groups}
    if len(shapes) != 1:
        raise ValueError(f"KV groups that share a pool must have one head shape, not {shapes}")
    storages = [
        format.allocate(num_blocks, block_size, groups[0].spec, device)
        for _ in range(max(len(group.layers) for group in groups))
    ]
    by_layer = {
        layer: storage
        for group in groups
        for layer, storage in zip(group.layers, storages, strict=False)
    }
    return tuple(by_layer[layer] for layer in range(len(by_layer)))
