"""How K and V are stored, and the pool of blocks that all layers share; the pool of states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvik.attention.base import LayerKV
from kvik.kernels.kv_rounding import SCALES
from kvik.spec.kv import AUTO, KVCacheSpec, KVGroup, formats_of
from kvik.spec.states import StateSpec

FLOATS: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
ROUNDED: Mapping[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}


class Zeros(Protocol):
    """Memory full of zeros. The system hands out zero pages only when they are first written, so an
    unused block costs nothing."""

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


class KVFormat(Protocol):
    """Storage of the KV cache."""

    def allocate(
        self, num_blocks: int, block_size: int, spec: KVCacheSpec, device: torch.device
    ) -> LayerKV:
        """Storage of one layer: zeros, because a masked key has weight 0, and 0 times garbage may
        be NaN."""
        ...


class DenseKV:
    """K and V as floats."""

    def __init__(self, dtype: torch.dtype, zeros: Zeros = torch.zeros) -> None:
        self._dtype = dtype
        self._zeros = zeros

    def allocate(
        self, num_blocks: int, block_size: int, spec: KVCacheSpec, device: torch.device
    ) -> LayerKV:
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        k = self._zeros(*shape, dtype=self._dtype, device=device)
        if spec.latent:
            return LayerKV(k, k[..., :0])
        return LayerKV(k, self._zeros(*shape, dtype=self._dtype, device=device))


class RoundedKV:
    """K and V in few bits, with a scale for each token and head."""

    def __init__(self, dtype: torch.dtype, zeros: Zeros = torch.zeros) -> None:
        """
        Args:
            dtype: of `kernels.kv_rounding`.
        """
        self._dtype = dtype
        self._zeros = zeros

    def allocate(
        self, num_blocks: int, block_size: int, spec: KVCacheSpec, device: torch.device
    ) -> LayerKV:
        places = (num_blocks, block_size, spec.num_kv_heads)
        width = spec.head_dim // 2 if self._dtype == torch.uint8 else spec.head_dim

        def numbers() -> torch.Tensor:
            # By their bytes: not every way to zeros knows the narrow floats.
            return self._zeros(*places, width, dtype=torch.uint8, device=device).view(self._dtype)

        def scales() -> torch.Tensor:
            return self._zeros(*places, dtype=SCALES[self._dtype], device=device)

        if spec.latent:
            k, k_scales = numbers(), scales()
            return LayerKV(k, k[..., :0], k_scales, k_scales[..., :0])
        return LayerKV(numbers(), numbers(), scales(), scales())


def kv_format(name: str, dtype: torch.dtype, zeros: Zeros = torch.zeros) -> KVFormat:
    """By its name in `config.kv_formats`.

    Args:
        dtype: of the model, for "auto".
        zeros: where the memory comes from.
    """
    if name in ROUNDED:
        return RoundedKV(ROUNDED[name], zeros)
    return DenseKV(dtype if name == AUTO else FLOATS[name], zeros)


def allocate_kv(
    groups: Sequence[KVGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    zeros: Zeros = torch.zeros,
) -> tuple[LayerKV, ...]:
    """Return the cache of every layer that attends, for `ForwardContext.kv`.

    A block belongs to one group at a time, so layers of different groups take turns in one storage,
    if their format is the same: of each format the pool has as many storages as the group with most
    of its layers needs.
    """
    shapes = {(g.spec.num_kv_heads, g.spec.head_dim, g.spec.latent) for g in groups}
    if len(shapes) != 1:
        raise ValueError(f"KV groups that share a pool must have one head shape, not {shapes}")
    by_layer: dict[int, LayerKV] = {}
    for name in formats_of(groups):
        format = kv_format(name, dtype, zeros)
        sharing = [group.layers_in(name) for group in groups]
        storages = [
            format.allocate(num_blocks, block_size, groups[0].spec, device)
            for _ in range(max(map(len, sharing)))
        ]
        for layers in sharing:
            by_layer |= zip(layers, storages, strict=False)
    return tuple(by_layer[layer] for layer in sorted(by_layer))


def allocate_apart(
    groups: Sequence[KVGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    zeros: Zeros = torch.zeros,
) -> tuple[LayerKV, ...]:
    """The same where a block belongs to all groups at once, so that no two layers can share."""
    specs = {
        layer: spec
        for group in groups
        for layer, spec in zip(group.layers, group.specs, strict=True)
    }
    return tuple(
        kv_format(specs[layer].format, dtype, zeros).allocate(
            num_blocks, block_size, specs[layer], device
        )
        for layer in sorted(specs)
    )


# States, which other layers keep in place of keys and values.


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer.

    Attributes:
        convolved: [rows, width - 1, channels] fp32, the last inputs of its convolution.
        matrices: [rows, value_heads, key_dim, value_dim] fp32, of its gated delta net, if any.
    """

    convolved: torch.Tensor
    matrices: torch.Tensor


@dataclass(frozen=True, slots=True)
class States:
    """The states of all layers.

    Attributes:
        pool: [rows, numbers] fp32; a row is the state of one request, or a copy of it.
        layers: of each layer that keeps one, in order: views of the pool.
    """

    pool: torch.Tensor
    layers: tuple[LayerStates, ...]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows: each source to its target, in order."""
        for source, target in pairs:
            self.pool[target].copy_(self.pool[source])


NO_STATES = States(torch.empty(0, 0), ())


def allocate_states(
    specs: Sequence[StateSpec], rows: int, device: torch.device, zeros: Zeros = torch.zeros
) -> States:
    """Return the states of the layers that keep one."""
    if not specs:
        return NO_STATES
    total = sum(spec.size for spec in specs)
    pool = zeros(rows, total, dtype=torch.float32, device=device)
    layers, first = [], 0
    for spec in specs:
        convolved, matrices = pool[:, first : first + spec.size].split(
            (spec.convolved, spec.size - spec.convolved), 1
        )
        layers.append(
            LayerStates(
                convolved.view(rows, spec.width - 1, spec.channels),
                matrices.view(rows, spec.value_heads, spec.key_dim, spec.value_dim),
            )
        )
        first += spec.size
    return States(pool, tuple(layers))
