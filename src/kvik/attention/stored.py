"""Keys and values in and out of the cache, in whatever it is stored, by torch's operations."""

from __future__ import annotations

from torch import Tensor

from kvik.attention.base import LayerKV
from kvik.kernels.kv_rounding import movable, round_vectors, unround_vectors
from kvik.kernels.ops import Ops


def store(
    ops: Ops, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write each token's K and V at its position.

    Args:
        k, v: [tokens, kv_heads, head_dim].
        slot_mapping: [tokens].

    Returns:
        k and v as a later read of the cache returns them.
    """
    if kv.k_scales is None or kv.v_scales is None:
        stored = k.to(kv.k.dtype), v.to(kv.v.dtype)
        ops.store_kv(*stored, kv.k, kv.v, slot_mapping)
        return stored[0].to(k.dtype), stored[1].to(v.dtype)
    keys, key_scales = round_vectors(k, kv.k.dtype)
    values, value_scales = round_vectors(v, kv.v.dtype)
    ops.store_kv(movable(keys), movable(values), movable(kv.k), movable(kv.v), slot_mapping)
    ops.store_kv(key_scales, value_scales, kv.k_scales, kv.v_scales, slot_mapping)
    return (
        unround_vectors(keys, key_scales).to(k.dtype),
        unround_vectors(values, value_scales).to(v.dtype),
    )


def read(stored: Tensor, scales: Tensor | None, at: Tensor) -> Tensor:
    """Keys, or values, of some positions.

    Args:
        stored, scales: of a `LayerKV`.
        at: [n] int64, KV positions.

    Returns:
        [n, kv_heads, head_dim]: fp32, or as stored where they are floats.
    """
    numbers = stored.flatten(0, 1).index_select(0, at)
    if scales is None:
        return numbers
    return unround_vectors(numbers, scales.flatten(0, 1).index_select(0, at))


def move(kv: LayerKV, source: Tensor, target: Tensor) -> None:
    """See `AttentionBackend.move`."""
    for tensor in kv.tensors:
        tokens = tensor.flatten(0, 1)
        tokens.index_copy_(0, target, tokens.index_select(0, source))
