"""The reference operations, which all other implementations are tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvik.kernels.fp8 import round_activations
from kvik.kernels.ops import Gate, Ops
from kvik.kernels.reference.draw import draw, mask, penalize, probabilities
from kvik.kernels.reference.experts import expert_set, experts_by, route
from kvik.kernels.reference.states import causal_conv, recurrence
from kvik.kernels.rounding import round_tokens
from kvik.kernels.weights import (
    DTYPES,
    PAIRED,
    PER_OUTPUT,
    SILU_LIMIT,
    SWIGLU_LIMIT,
    SWIGLU_SLOPE,
    XIELU_SLOPE,
    Activation,
    Matrix,
    MatrixSpec,
    Weight,
)

# Normalisation. Everything is computed in fp32 and rounded once, at the end.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: [..., dim]. weight: [dim], or [heads, dim] of x [tokens, heads, dim].
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension (Ba et al. 2016).

    Args:
        x: [..., dim]. weight, bias: [dim], or [heads, dim] of x [tokens, heads, dim].
    """
    centred = x.float() - x.float().mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


def rescaled(x: Tensor, like: Tensor, least_square: float) -> Tensor:
    """x * rms(like) / sqrt(max(mean of x^2, least_square)) over the last dimension.

    Args:
        x: [tokens, parts, dim]. like: [tokens, dim].
    """
    wide = x.float()
    square = wide.square().mean(-1, keepdim=True).clamp(min=least_square)
    size = like.float().square().mean(-1)[:, None, None].sqrt()
    return (wide * (size / square.sqrt())).to(x.dtype)


# Rotary position embedding, applied to queries and keys.


def rotations(high: Tensor, low: Tensor, positions: Tensor, last: int) -> Tensor:
    """Cosines and sines of the angles at some positions, by the angle addition theorems.

    Args:
        high: [multiples, head_dim] fp32, cosines and then sines at multiples of n.
        low: [n, head_dim], the same at 0..n - 1.
        positions: [tokens].
        last: larger positions count as this one.
    """
    positions = positions.clamp(max=last)
    cos, sin = high[positions // len(low)].chunk(2, dim=-1)
    low_cos, low_sin = low[positions % len(low)].chunk(2, dim=-1)
    return torch.cat((cos * low_cos - sin * low_sin, cos * low_sin + sin * low_cos), dim=-1)


def rotary(q: Tensor, k: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each head in halves: dimension i turns with dimension i + head_dim / 2
    (Su et al. 2021, in the layout of the published checkpoints; not interleaved pairs).

    Args:
        q: [tokens, heads, head_dim]. k: [tokens, kv_heads, head_dim].
        rotation: [tokens, head_dim] fp32, cosines and then sines of the angles.
    """
    cos, sin = rotation[:, None, :].chunk(2, dim=-1)  # the same for every head
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


# Small operations on whole rows.


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table [rows, dim], ids [n] -> [n, dim]."""
    return table.index_select(0, ids)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of the same shape and dtype."""
    return x + y


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] -> the largest of each row in fp32 and the first token that has it.

    A row with NaN has NaN as its largest.
    """
    return logits.amax(-1).float(), logits.argmax(-1)


# Writes into the paged KV cache.


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's K and V at its position.

    Args:
        k, v: [tokens, kv_heads, head_dim].
        k_cache, v_cache: [blocks, block_size, kv_heads, head_dim].
        slot_mapping: [tokens], block_id * block_size + offset; no position twice.
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy cache[target[i]] = cache[source[i]], as if all were read before any is written.

    Args:
        cache: [blocks, ...]. source, target: [n] block ids; no target twice.
    """
    cache.index_copy_(0, target, cache.index_select(0, source))


# Activations of the feed-forward layers, computed in fp32 and rounded once.


def activate(x: Tensor, activation: Activation) -> Tensor:
    """See `Ops`: SwiGLU and GEGLU (Shazeer 2020), GELU (Hendrycks and Gimpel 2016), ReLU or its
    square (So et al. 2021).

    Args:
        x: [tokens, dim]; for a paired activation the gate first.
    """
    act, wide = _ACTIVATIONS[activation], x.float()
    if activation not in PAIRED:
        return act(wide).to(x.dtype)
    gate, up = wide.chunk(2, dim=-1)
    return (act(gate) * factor_of(activation, up)).to(x.dtype)


def activate_top(x: Tensor, activation: Activation, deviations: float) -> Tensor:
    """See `Ops`: the largest gates of a token, if they are distributed normally."""
    gate, up = x.float().chunk(2, dim=-1)
    centred = gate - gate.mean(-1, keepdim=True)
    std = centred.square().mean(-1, keepdim=True).sqrt()
    top = torch.relu(centred - deviations * std)
    return activate(torch.cat((top, up), -1), activation).to(x.dtype)


def relu_squared(x: Tensor) -> Tensor:
    return x.relu().square()


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU, which GPT-2 was trained with."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3))))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def clamped_gate(x: Tensor) -> Tensor:
    """The gate of gpt-oss."""
    x = x.clamp(max=SWIGLU_LIMIT)
    return x * torch.sigmoid(SWIGLU_SLOPE * x)


def limited_gate(x: Tensor) -> Tensor:
    """The gate of DeepSeek-V4 and Hy4."""
    return silu(x.clamp(max=SILU_LIMIT))


def clipped_gate(x: Tensor) -> Tensor:
    """The gate of Step 3.7."""
    return silu(x).clamp(max=SWIGLU_LIMIT)


def factor_of(activation: Activation, up: Tensor) -> Tensor:
    """Return the factor of the gate."""
    if activation == "limited_swiglu":
        return up.clamp(-SILU_LIMIT, SILU_LIMIT)
    if activation not in ("clamped_swiglu", "clipped_swiglu"):
        return up
    return up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + (activation == "clamped_swiglu")


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": silu,
    "gelu_tanh": gelu_tanh,
    "gelu_tanh_and_mul": gelu_tanh,
    "gelu": gelu,
    "gelu_and_mul": gelu,
    "relu": torch.relu,
    "relu_squared": relu_squared,
    "clamped_swiglu": clamped_gate,
    "tanh": torch.tanh,
    "limited_swiglu": limited_gate,
    "clipped_swiglu": clipped_gate,
}


def xielu(x: Tensor, positive: float, negative: float) -> Tensor:
    """See `Ops`: xIELU (Huang and Schlag 2024, arXiv 2411.13010), in fp32 and rounded once."""
    wide = x.float()
    curved = torch.where(wide > 0, positive * wide.square(), negative * (wide.expm1() - wide))
    return (curved + XIELU_SLOPE * wide).to(x.dtype)


def scaled(x: Tensor, factor: float) -> Tensor:
    """x * factor, which torch computes in fp32 and rounds once."""
    return x * factor


def clipped(x: Tensor, limit: float) -> Tensor:
    """See `Ops`."""
    return x.clamp(-limit, limit)


def joined(x: Tensor, y: Tensor) -> Tensor:
    """The columns of x, then of y."""
    return torch.cat((x, y), 1)


def weighted_sums(x: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """See `Ops`; the parts of x are added in their order."""
    _, sums, parts = weights.shape
    added = x.float().chunk(parts, 1)
    start = torch.zeros_like(added[0]).repeat(1, sums) if residual is None else residual.float()
    total = start.unflatten(1, (sums, -1))
    for number, part in enumerate(added):
        total = total + weights[:, :, number, None] * part[:, None]
    return total.flatten(1).to(x.dtype)


def stream_weights(
    x: Tensor, logits: Tensor, factors: Tensor, eps: float, streams: int, rounds: int
) -> Tensor:
    """See `Ops`."""
    gains, biases, largest, smallest = factors
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    inputs, single = logits * scale * gains + biases, logits.shape[1] - streams**2
    weights = largest * torch.sigmoid(inputs) + smallest
    if not streams:
        return weights
    matrix = inputs[:, single:].unflatten(1, (streams, streams)).softmax(2) + smallest[-1]
    for turn in range(2 * rounds - 1):
        matrix = matrix / (matrix.sum(1 + turn % 2, keepdim=True) + smallest[-1])
    return torch.cat((weights[:, :single], matrix.mT.flatten(1)), 1)


def softcap(x: Tensor, cap: float) -> None:
    """cap * tanh(x / cap), in place."""
    x.div_(cap).tanh_().mul_(cap)


def gated(x: Tensor, gate: Tensor, by: Gate) -> Tensor:
    """x * by(gate), each gate for as many columns."""
    each = _GATES[by](gate.float()).repeat_interleave(x.shape[1] // gate.shape[1], 1)
    return (x.float() * each).to(x.dtype)


_GATES: Mapping[Gate, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "none": lambda gate: gate,
}

# Matrix products and what follows them, computed in fp32 and rounded once.


def matrix(spec: MatrixSpec) -> Matrix:
    """See `Ops.matrix`; the data is the `Weight` unchanged."""
    bias = None
    if spec.bias:
        dtype = DTYPES[spec.kind.codes] if spec.kind.floats else torch.float32
        bias = torch.empty(spec.rows, dtype=dtype, device=spec.device)
    return Matrix(spec, bias, Weight.empty(spec.kind, spec.rows, spec.inputs, spec.device))


def pack_rows(matrix: Matrix, first: int, weight: Weight) -> None:
    """Copy a weight to rows first.. of the matrix."""
    to = stored_weight(matrix).rows(slice(first, first + weight.outputs)).tensors
    for name, part in weight.tensors.items():
        if name in PER_OUTPUT:
            to[name].copy_(part)
    fill_shared(weight, to.get("order"), to.get("input_scale"))


def fill_shared(weight: Weight, order: Tensor | None, input_scale: Tensor | None) -> None:
    """Set what all rows of a matrix share from some of its rows.

    The rows of fused layers read the same inputs. With the largest of their scales, no input is
    clamped more than with one of the others.

    Args:
        order, input_scale: of the matrix, zeros until then; None: as in the weight.

    Raises:
        ValueError: rows packed before have another order.
    """
    if weight.order is not None:
        assert order is not None
        if bool(order.any()) and not torch.equal(order, weight.order):
            raise ValueError("rows of one matrix have their inputs in different orders")
        order.copy_(weight.order)
    if weight.input_scale is not None:
        assert input_scale is not None
        torch.maximum(input_scale, weight.input_scale.to(input_scale), out=input_scale)


def linear(x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
    """activation(x W^T + bias) + residual.

    Args:
        x: [tokens, inputs]. residual: [tokens, outputs].
    """
    spec, (wide, weight) = matrix.spec, as_multiplied(x, stored_weight(matrix))
    y = wide @ weight.dequantized().t()
    if matrix.bias is not None:
        y = y + matrix.bias.float()
    if spec.activation is not None:
        y = activate(y, spec.activation)
    if residual is not None:
        y = y + residual.float()
    return y.to(spec.out_dtype)


def linear_each(x: Tensor, matrix: Matrix, outputs: int) -> Tensor:
    """x [tokens, heads, inputs] -> [tokens, heads, outputs]: x W^T with a separate W per head."""
    weight = stored_weight(matrix).dequantized().view(x.shape[1], -1, x.shape[2])[:, :outputs]
    return torch.einsum("thi,hoi->tho", x.float(), weight).to(x.dtype).contiguous()


def as_multiplied(x: Tensor, weight: Weight) -> tuple[Tensor, Weight]:
    """Return x [tokens, inputs] in fp32, ordered and rounded for the product, and the weight in the
    order of x."""
    kind = weight.kind
    if weight.order is not None:
        x, weight = x[:, weight.order], weight.plain()
    if kind.activations == "float":
        return x.float(), weight
    group = kind.group if kind.activations == "group" else 0
    if kind.codes == "int8":
        return round_tokens(x, group), weight
    return round_activations(x, group, weight.input_scale), weight


def matrix_rows(matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of the weight: ids [n] -> [n, inputs]."""
    weight = stored_weight(matrix)
    if weight.kind.floats:
        return weight.values.index_select(0, ids).to(dtype)
    return weight.rows(ids).dequantized().to(dtype)


def stored_weight(matrix: Matrix) -> Weight:
    """Return the `Weight` of a matrix made by `matrix`."""
    assert isinstance(matrix.data, Weight)
    return matrix.data


REFERENCE = Ops(
    matrix=matrix,
    pack_rows=pack_rows,
    linear=linear,
    route=route,
    expert_set=expert_set,
    experts=experts_by(linear),
    linear_each=linear_each,
    matrix_rows=matrix_rows,
    gather_rows=gather_rows,
    add=add,
    largest=largest,
    penalize=penalize,
    mask=mask,
    draw=draw,
    probabilities=probabilities,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    rescaled=rescaled,
    rotations=rotations,
    rotary=rotary,
    activate=activate,
    activate_top=activate_top,
    xielu=xielu,
    scaled=scaled,
    clipped=clipped,
    joined=joined,
    weighted_sums=weighted_sums,
    stream_weights=stream_weights,
    softcap=softcap,
    gated=gated,
    causal_conv=causal_conv,
    recurrence=recurrence,
    store_kv=store_kv,
    copy_blocks=copy_blocks,
)
