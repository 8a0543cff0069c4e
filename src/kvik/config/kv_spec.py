"""Layers that share one block table: the shape of the KV cache as the control trunk sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KVKind(StrEnum):
    FULL = "full"
    SLIDING_WINDOW = "sliding_window"


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer stores per token.

    Attributes:
        kind: which keys stay visible.
        num_kv_heads, head_dim: shape of one token's K (and V).
        bytes_per_token: K and V of one layer, scales included.
        window: visible keys, the query's own included (`SLIDING_WINDOW` only).
    """

    kind: KVKind
    num_kv_heads: int
    head_dim: int
    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with equal specs. Every group of a model draws blocks from one shared pool: block b
    holds the K/V of `block_size` tokens for all layers of the one group that owns b."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


def group_layers(specs: list[KVCacheSpec]) -> tuple[KVGroup, ...]:
    """Group equal layers. `specs[i]` belongs to layer i; groups are ordered by first layer.

    A block is as large as the largest group's layers need, so when group sizes differ by a
    multiple (five window layers to one full layer, say) the larger one is cut into equal parts
    and no memory is lost to padding.
    """
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    smallest = min((len(layers) for layers in by_spec.values()), default=0)
    groups = []
    for spec, layers in by_spec.items():
        parts = len(layers) // smallest if len(layers) % smallest == 0 else 1
        size = len(layers) // parts
        groups += [KVGroup(spec, tuple(layers[i : i + size])) for i in range(0, len(layers), size)]
    return tuple(sorted(groups, key=lambda g: g.layers[0]))


def block_bytes(groups: tuple[KVGroup, ...], block_size: int) -> int:
    """Bytes of one block of the shared pool."""
    return max(len(g.layers) * g.spec.bytes_per_token for g in groups) * block_size


def max_blocks(spec: KVCacheSpec, num_tokens: int, chunk: int, block_size: int) -> int:
    """Most blocks a request of `num_tokens` ever holds at once when a step adds at most `chunk`."""
    blocks = -(-num_tokens // block_size)
    if spec.kind is KVKind.FULL or spec.window is None:
        return blocks
    # window - 1 keys before the chunk and the chunk itself, both cut by block borders
    return min(blocks, -(-(spec.window - 1 + chunk) // block_size) + 1)
