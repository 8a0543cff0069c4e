"""Allocates the KV cache, whose pool of blocks all layers share, and the pool of states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvik.attention.base import LayerKV
from kvik.kernels.kv_rounding import SCALES, movable
from kvik.kernels.weights import DTYPES
from kvik.spec.kv import KVGroup, StateSpec
from kvik.spec.model import SHORT_DTYPES

FLOATS = {short: DTYPES[name] for name, short in SHORT_DTYPES.items()}
ROUNDED: Mapping[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}


# Allocates zeroed memory, as torch.zeros. The system provides pages when they are first written, so
# unused blocks take no memory.
Zeros = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class KVCache:
    """The KV cache of a model."""

    layers: tuple[LayerKV, ...]  # the cache of each layer that stores keys and values, in order
    # [num_blocks, ...], all memory of the blocks, in dtypes that torch can copy.
    storages: tuple[torch.Tensor, ...]
    positions: Mapping[int, int]  # layer -> index in `layers`

    def of(self, layer: int) -> LayerKV:
        """Return the cache of a layer."""
        return self.layers[self.positions[layer]]


def allocate_kv(
    groups: Sequence[KVGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    zeros: Zeros = torch.zeros,
    *,
    separate: bool = False,
    slots: int = 0,
    heads: Callable[[int], int] = lambda layer: 0,
) -> KVCache:
    """Return the zeroed cache of every layer. Zeroed, as a masked key has weight 0, and 0 times
    garbage may be NaN.

    A block belongs to one group at a time, so layers of different groups share a storage if their
    format is the same: there are as many storages as the group with the most layers needs.

    Args:
        dtype: of the model, for layers of the format "auto".
        zeros: allocates the memory.
        separate: a block belongs to all groups at once, so no two layers share a storage.
        slots, heads: number of request slots, and of the query heads of a layer, for layers with a
            budget.
    """
    storages: dict[object, torch.Tensor] = {}

    def storage(key: object, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the [num_blocks, size] storage of a key."""
        if key not in storages:
            # Allocated as bytes: not every `Zeros` supports fp8.
            raw = zeros(num_blocks, size * dtype.itemsize, dtype=torch.uint8, device=device)
            storages[key] = raw.view(dtype)
        return storages[key]

    by_layer: dict[int, LayerKV] = {}
    for number, group in enumerate(groups):
        owner, shares = number if separate else None, group.shares
        places: Counter[str] = Counter()  # layers so far, by format; and with an index
        for layer, spec in zip(group.layers, group.specs, strict=True):
            place, part = divmod(places[spec.format], shares)
            places[spec.format] += 1
            stored = ROUNDED.get(spec.format) or FLOATS.get(spec.format, dtype)
            width = spec.head_dim // 2 if stored == torch.uint8 else spec.head_dim
            shape = (block_size, spec.num_kv_heads, width)
            numbers, scales = [], []
            for kind in "k" if spec.latent else "kv":
                size = math.prod(shape) * shares
                memory = storage((owner, spec.format, size, place, kind), size, stored)
                numbers.append(_part(memory, part, shape))
                if spec.format in ROUNDED:
                    size = math.prod(shape[:2]) * shares
                    key = owner, spec.format, shape, place, kind
                    scales.append(_part(storage(key, size, SCALES[stored]), part, shape[:2]))
            if spec.latent:
                numbers.append(numbers[0][..., :0])
                scales += [scale[..., :0] for scale in scales]
            index = None
            if spec.index_bytes:
                of_index = block_size, 1, spec.index_bytes // dtype.itemsize
                of = owner, "index", places["index"]
                places["index"] += 1
                index = _part(storage(of, math.prod(of_index), dtype), 0, of_index)
            recent = None
            if spec.budget is not None:
                ring = slots, spec.budget.last, heads(layer), spec.head_dim
                recent = zeros(*ring, dtype=torch.float32, device=device)
            stored_layer = LayerKV(*numbers, *scales)
            by_layer[layer] = replace(stored_layer, queries=recent, index=index)
    order = sorted(by_layer)
    return KVCache(
        tuple(by_layer[layer] for layer in order),
        tuple(map(movable, storages.values())),
        {layer: position for position, layer in enumerate(order)},
    )


def _part(storage: torch.Tensor, part: int, shape: tuple[int, ...]) -> torch.Tensor:
    """View [num_blocks, size] as [smaller blocks, *shape], starting at part `part` of block 0."""
    size = math.prod(shape)
    flat = storage.flatten()[part * size :]
    return flat[: len(flat) // size * size].view(-1, *shape)


# States, which some layers keep in place of keys and values.


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer."""

    # [rows, width - 1 + most drafts, channels] fp32, inputs of its convolution: the last of known
    # tokens, then those of drafts.
    convolved: torch.Tensor
    # [rows, value_heads, key_dim, value_dim] fp32, of its recurrence, if any.
    matrices: torch.Tensor
    log: torch.Tensor  # [rows, most drafts, inputs + gates] fp32, inputs of the recurrence


@dataclass(frozen=True, slots=True)
class States:
    """The states of all layers."""

    pool: torch.Tensor  # [rows, numbers] fp32; a row is the state of one request, or a copy of it
    layers: tuple[LayerStates, ...]  # of each layer that keeps one, in order: views of the pool

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows: each source to its target, in order. A stage may have no layer with states."""
        for source, target in pairs if self.layers else ():
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
        sizes = spec.convolved, spec.matrices, spec.logged
        convolved, matrices, log = pool[:, first : first + spec.size].split(sizes, 1)
        layers.append(
            LayerStates(
                convolved.view(rows, spec.width - 1 + spec.drafts, spec.channels),
                matrices.view(rows, spec.value_heads, spec.key_dim, spec.value_dim),
                log.view(rows, spec.drafts, spec.logged // max(1, spec.drafts)),
            )
        )
        first += spec.size
    return States(pool, tuple(layers))
