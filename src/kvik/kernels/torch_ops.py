"""The same operations with the fewest torch calls: on small models the calls are the time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.kernels.ops import Ops


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    # Rolling by half a head puts every partner in place: out = x * [c, c] + roll(x) * [-s, s].
    half = cos.shape[-1]
    c = torch.cat((cos, cos), dim=-1).unsqueeze(1)
    s = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    return (
        torch.addcmul(q * c, q.roll(half, -1), s).to(q.dtype),
        torch.addcmul(k * c, k.roll(half, -1), s).to(k.dtype),
    )


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    token_shape = k_cache.shape[2:]
    k_cache.view(-1, *token_shape).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *token_shape).index_copy_(0, slot_mapping, v)


def _copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    cache.index_copy_(0, target, cache.index_select(0, source))


TORCH = Ops(
    rms_norm=_rms_norm,
    add_rms_norm=_add_rms_norm,
    layer_norm=_layer_norm,
    rotary=_rotary,
    silu_and_mul=_silu_and_mul,
    gelu_tanh=_gelu_tanh,
    store_kv=_store_kv,
    copy_blocks=_copy_blocks,
)
