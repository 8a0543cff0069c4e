"""Writes into the paged KV cache."""

from __future__ import annotations

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's K and V at its position.

    Args:
        k, v: [tokens, kv_heads, head_dim].
        k_cache, v_cache: [blocks, block_size, kv_heads, head_dim].
        slot_mapping: [tokens], block_id * block_size + offset; no position twice.
    """
    block_size = k_cache.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, offset] = k
    v_cache[block, offset] = v


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """cache[target[i]] = cache[source[i]], as if all were read before any is written.

    Args:
        cache: [blocks, ...]. source, target: [n] block ids; no target twice.
    """
    cache[target] = cache[source]
