"""Every operation of a forward pass beside matrix products, behind one table.

A row of `Ops` is a contract; `reference/` holds the plain-torch meaning of each row, and faster
implementations (C++, Triton) replace rows without anyone above noticing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each operation.

    rms_norm(x [..., dim], weight [dim], eps) -> [..., dim]
    add_rms_norm(x, residual, weight, eps) -> (normed, x + residual)
    layer_norm(x, weight, bias, eps) -> [..., dim]
    rotary(q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim], cos, sin
        [tokens, head_dim / 2] fp32) -> (q, k), rotated in halves (not interleaved)
    silu_and_mul(gate_up [tokens, 2 * inner]) -> [tokens, inner]
    gelu_tanh(x) -> same shape
    store_kv(k, v [tokens, kv_heads, head_dim], k_cache, v_cache [blocks, block_size, kv_heads,
        head_dim], slot_mapping [tokens]) -> None
    copy_blocks(cache [blocks, ...], source [n], target [n]) -> None
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh: Callable[[Tensor], Tensor]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
