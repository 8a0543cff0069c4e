"""The reference's operations with few torch calls, which dominate the time of small models.

Quantised weights stay quantised, and are dequantised a few rows at a time: a fallback that saves
memory, not time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.kernels.fp8 import PIECE
from kvik.kernels.ops import Draws, Ops, StateHeads, Truncation
from kvik.kernels.reference.draw import probabilities
from kvik.kernels.reference.experts import experts_by
from kvik.kernels.reference.ops import (
    REFERENCE,
    as_multiplied,
    clamped_gate,
    clipped_gate,
    factor_of,
    layer_norm,
    limited_gate,
    relu_squared,
    rms_norm,
    stored_weight,
)
from kvik.kernels.reference.states import (
    head_inputs,
    rates,
    recurrence_by,
    skips,
    token_by_token,
)
from kvik.kernels.weights import PAIRED, Activation, Matrix, Weight


def _linear(x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
    spec, weight, bias = matrix.spec, stored_weight(matrix), matrix.bias
    if not weight.kind.floats:
        y = _quantized_product(x, weight, bias)
    elif residual is None or spec.activation or bias is not None:
        y = F.linear(x, weight.values, bias)
    elif spec.out_dtype == x.dtype == residual.dtype:
        return torch.addmm(residual, x, weight.values.t())
    else:
        y = F.linear(x, weight.values)
    if spec.activation is not None:
        y = _activate(y, spec.activation)
    if residual is not None:
        y = y.add_(residual)
    return y.to(spec.out_dtype)


def _quantized_product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias, [tokens, outputs] fp32."""
    wide, weight = as_multiplied(x, weight)
    y = wide.new_empty(len(x), weight.outputs)
    rows = max(1, PIECE // weight.inputs)
    for start in range(0, weight.outputs, rows):
        piece = slice(start, start + rows)
        y[:, piece] = wide @ weight.rows(piece).dequantized().t()
    return y if bias is None else y.add_(bias)


def _linear_each(x: Tensor, matrix: Matrix, outputs: int) -> Tensor:
    weight = stored_weight(matrix).values.view(x.shape[1], -1, x.shape[2])[:, :outputs]
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()


CHUNK = 64  # tokens of a recurrence at a time: its products grow with the square
ROWS_CHUNK = 16  # if each row of a state has its own decay, so that two tokens have one for each


def _in_chunks(x: Tensor, gates: Tensor, heads: StateHeads, s: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `CHUNK` tokens at a time (Yang et al. 2024, "Gated Delta Networks", section 3.3).

    A token adds its key times a change to the state. The changes of a chunk solve a triangular
    system, or in a state space are known, so the states in between are not computed. If each number
    of a state has its own rate, two tokens have a decay for each number: then token by token.
    """
    if heads.by_channel:
        return token_by_token(x, gates, heads, s)
    *parts, step = head_inputs(x, gates, heads, s)
    parts.append((rates(heads) * step)[..., 0])
    y = torch.empty(parts[2].shape, dtype=x.dtype, device=x.device)
    size = ROWS_CHUNK if heads.by_row else CHUNK
    for first in range(0, len(x), size):
        chunk = slice(first, first + size)
        q, k, v, beta, decay = (part[chunk].transpose(0, 1) for part in parts)  # head by head
        left = decay.cumsum(1).exp()  # [heads, tokens, 1 or rows], of the state before the chunk
        # Of each change, [heads, 1 or rows, tokens, tokens]: not by differences of sums from the
        # start, which lack the bits that a token takes which forgets everything.
        steps = decay.mT[..., None].repeat(1, 1, 1, decay.shape[1])
        since = steps.tril(-1).cumsum(2).exp().tril()
        change = beta * v
        if heads.skip is None:
            before = beta * _decayed(k, k, since)  # on the diagonal: read as ones
            change -= beta * ((left * k) @ s)
            change = torch.linalg.solve_triangular(before, change, upper=False, unitriangular=True)
        out = (left * q) @ s + _decayed(q, k, since) @ change
        if heads.skip is not None:
            out += skips(heads)[:, None] * v
        y[chunk] = out.transpose(0, 1).to(x.dtype)
        s = left[:, -1, :, None] * s + (k * since[:, :, -1].mT).mT @ change
    return y.flatten(1), s


def _decayed(q: Tensor, k: Tensor, since: Tensor) -> Tensor:
    """Multiply each token of q with each one of k [heads, tokens, rows], decayed in between by
    `since` [heads, 1 or rows, tokens, tokens]."""
    if since.shape[1] == 1:
        return (q @ k.mT) * since[:, 0]
    return torch.einsum("hir,hjr,hrij->hij", q, k, since)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    if logits.device.type != "cpu":
        top, ids = logits.max(dim=-1)
        return top.float(), ids
    # numpy searches with vector instructions, torch does not: 2 to 5 times faster in total.
    wide = logits.float()
    return wide.amax(-1), torch.from_numpy(wide.numpy().argmax(-1))


def _probabilities(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
    if truncation == Truncation():
        return (logits.float() / temperature[:, None]).softmax(-1)
    return probabilities(logits, temperature, truncation)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype != x.dtype or weight.dim() > 1:
        return rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if weight.dim() == 2:
        return layer_norm(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _rotary(q: Tensor, k: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    # Rolling by half a head aligns the pairs: out = x * [c, c] + roll(x) * [-s, s].
    cos, sin = rotation.unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    c = torch.cat((cos, cos), dim=-1)
    s = torch.cat((-sin, sin), dim=-1)
    return (
        torch.addcmul(q * c, q.roll(half, -1), s).to(q.dtype),
        torch.addcmul(k * c, k.roll(half, -1), s).to(k.dtype),
    )


def _activate(x: Tensor, activation: Activation) -> Tensor:
    act = _ACTIVATIONS[activation]
    if activation not in PAIRED:
        return act(x)
    gate, up = x.chunk(2, dim=-1)
    return act(gate).mul_(factor_of(activation, up))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu_tanh_and_mul": _gelu_tanh,
    "gelu": F.gelu,
    "gelu_and_mul": F.gelu,
    "relu": F.relu,
    "relu_squared": relu_squared,
    "clamped_swiglu": clamped_gate,
    "tanh": torch.tanh,
    "limited_swiglu": limited_gate,
    "clipped_swiglu": clipped_gate,
}


TORCH = replace(
    REFERENCE,
    linear=_linear,
    experts=experts_by(_linear),
    linear_each=_linear_each,
    recurrence=recurrence_by(_in_chunks),
    largest=_largest,
    probabilities=_probabilities,
    rms_norm=_rms_norm,
    layer_norm=_layer_norm,
    rotary=_rotary,
    activate=_activate,
)


# Rows with a truncation that a kernel does not implement are drawn by torch.


def with_torch_for_others(ops: Ops, applied: Collection[str]) -> Ops:
    """Extend operations whose kernels apply some rules of `Truncation` to all rules.

    So a new rule works everywhere once it is defined in torch.

    Args:
        applied: their names.
    """
    if all(rule.name in applied for rule in fields(Truncation)):
        return ops

    def draw(logits: Tensor, draws: Draws) -> Tensor:
        asks = draws.truncation.beyond(applied)
        if asks is None:
            return ops.draw(logits, draws)
        return _split_rows(
            asks,
            lambda rows: TORCH.draw(logits[rows], draws.of(rows)),
            lambda rows: ops.draw(logits[rows], draws.of(rows)),
        )

    def probabilities(logits: Tensor, temperature: Tensor, rules: Truncation) -> Tensor:
        asks = rules.beyond(applied)
        if asks is None:
            return ops.probabilities(logits, temperature, rules)
        return _split_rows(
            asks,
            lambda rows: TORCH.probabilities(logits[rows], temperature[rows], rules.of(rows)),
            lambda rows: ops.probabilities(logits[rows], temperature[rows], rules.of(rows)),
        )

    return replace(ops, draw=draw, probabilities=probabilities)


_Way = Callable[[Tensor], Tensor]  # from row numbers to the result for these rows


def _split_rows(asks: Tensor, torchs: _Way, kernels: _Way) -> Tensor:
    """Compute each row with the same function in every batch, since the two may differ in the last
    bit of a sum.

    Args:
        asks: [n] bool, the rows for `torchs`.

    Returns:
        [n, ...], the results of the two.
    """
    ways = ((torchs, asks), (kernels, ~asks))
    numbers = [(way, rows) for way, mine in ways if len(rows := mine.nonzero()[:, 0])]
    results = torch.cat([way(rows) for way, rows in numbers])
    return torch.empty_like(results).index_copy_(0, torch.cat([r for _, r in numbers]), results)
