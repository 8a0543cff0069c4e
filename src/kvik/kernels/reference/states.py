"""Layers that keep a state: a short convolution, and the gated delta rule, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.kernels.ops import DeltaHeads, Sequences

NORM_EPS = 1e-6  # of the norms of queries and keys


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    sequences: Sequences,
    silu: bool,
) -> Tensor:
    """See `Ops.causal_conv`."""
    width = len(weight)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for tokens, row, fresh in each_sequence(sequences):
        before = torch.zeros_like(state[row]) if fresh else state[row]
        inputs = torch.cat((before, x[tokens].float()))  # [width - 1 + count, channels]
        windows = inputs.unfold(0, width, 1)  # [count, channels, width]
        sums = (windows * weight.float().t()).sum(-1)
        if bias is not None:
            sums = sums + bias.float()
        y[tokens] = (F.silu(sums) if silu else sums).to(x.dtype)
        state[row] = inputs[len(inputs) - width + 1 :]
    return y


def gated_delta(
    x: Tensor, gates: Tensor, heads: DeltaHeads, state: Tensor, sequences: Sequences
) -> Tensor:
    """See `Ops.gated_delta`."""
    q, k, v, beta, decay = delta_inputs(x, gates, heads, state)
    y = torch.empty(v.shape, dtype=x.dtype, device=x.device)
    for tokens, row, fresh in each_sequence(sequences):
        s = torch.zeros_like(state[row]) if fresh else state[row]
        for t in range(tokens.start, tokens.stop):
            s = s * decay[t, :, None, None].exp()
            seen = (s * k[t, :, :, None]).sum(1)
            change = beta[t, :, None] * (v[t] - seen)
            s = s + k[t, :, :, None] * change[:, None, :]
            y[t] = (s * q[t, :, :, None]).sum(1).to(x.dtype)
        state[row] = s
    return y.flatten(1)


def delta_inputs(
    x: Tensor, gates: Tensor, heads: DeltaHeads, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of the delta rule for each token, in fp32; arguments as in
    `Ops.gated_delta`.

    Returns:
        q, k [tokens, value_heads, key_dim] with the scale of scores, v [tokens, value_heads,
        value_dim], then [tokens, value_heads] each: beta, how far a value moves towards v, and the
        logarithm of the decay of the state.
    """
    _, value_heads, key_dim, value_dim = state.shape
    keys = heads.key_heads * key_dim
    q, k, v = x.float().split((keys, keys, value_heads * value_dim), 1)
    group = value_heads // heads.key_heads
    q = _unit(q.reshape(-1, heads.key_heads, key_dim)).repeat_interleave(group, 1) * key_dim**-0.5
    k = _unit(k.reshape(-1, heads.key_heads, key_dim)).repeat_interleave(group, 1)
    b, a = gates.float().chunk(2, 1)
    decay = -heads.decay.exp() * F.softplus(a + heads.bias)
    return q, k, v.reshape(-1, value_heads, value_dim), torch.sigmoid(b), decay


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def each_sequence(sequences: Sequences) -> Iterator[tuple[slice, int, bool]]:
    """Yield the tokens of each sequence, the row of its state, and whether it begins in this
    step."""
    starts, rows = sequences.starts.tolist(), sequences.rows.tolist()
    for i, (row, length) in enumerate(zip(rows, sequences.lengths.tolist(), strict=True)):
        count = starts[i + 1] - starts[i]
        if row >= 0 and count > 0:
            yield slice(starts[i], starts[i + 1]), row, length == count
