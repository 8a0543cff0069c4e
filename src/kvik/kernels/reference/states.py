"""Layers that keep a state: a short convolution, and a recurrence, token by token.

Each value head has a state S [key_dim, value_dim]. A token with q, k [key_dim] and v [value_dim], a
decay d in (0, 1) and a factor b changes it and reads it, with k^T x the outer product:

    S = d S
    S = S + k^T b (v - k S)    the gated delta rule (Yang et al. 2024, arXiv 2412.06464)
    S = S + k^T b v            a state space (Mamba-2; Dao and Gu 2024, arXiv 2405.21060)
    y = q S                    for a state space, y = q S + skip v

The delta rule replaces what the state returns for k by v. In Kimi Linear (2025, arXiv 2510.26692) d
is a number for each row of S. In Mamba (Gu and Dao 2023, arXiv 2312.00752) a state space has a d
for each number of S, and a b and a skip for each column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.kernels.ops import Sequences, StateHeads

NORM_EPS = 1e-6  # of the norms of queries and keys


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, sequences: Sequences, silu: bool
) -> Tensor:
    """See `Ops.causal_conv`."""
    width = len(weight)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for tokens, row, fresh, pending, drafts in each_sequence(sequences):
        before = state[row, pending : pending + width - 1]
        before = torch.zeros_like(before) if fresh else before
        inputs = torch.cat((before, x[tokens].float()))  # [width - 1 + count, channels]
        windows = inputs.unfold(0, width, 1)  # [count, channels, width]
        sums = (windows * weight.float().t()).sum(-1)
        if bias is not None:
            sums = sums + bias.float()
        y[tokens] = (F.silu(sums) if silu else sums).to(x.dtype)
        kept = inputs[len(inputs) - width + 1 - drafts :]
        state[row, : len(kept)] = kept
    return y


# Of one sequence: x, gates, state before them -> outputs [tokens, value_heads * value_dim] of the
# dtype of x, and the state after them.
Rule = Callable[[Tensor, Tensor, StateHeads, Tensor], tuple[Tensor, Tensor]]


def recurrence_by(rule: Rule) -> Callable[..., Tensor]:
    """Return `Ops.recurrence` for a rule of one sequence."""

    def recurrence(
        x: Tensor,
        gates: Tensor,
        heads: StateHeads,
        state: Tensor,
        log: Tensor,
        sequences: Sequences,
    ) -> Tensor:
        width = x.shape[1]
        y = x.new_empty(len(x), state.shape[1] * state.shape[3])
        for tokens, row, fresh, pending, drafts in each_sequence(sequences):
            s = torch.zeros_like(state[row]) if fresh else state[row]
            if pending:
                again = log[row, :pending]
                _, s = rule(again[:, :width], again[:, width:], heads, s)
            certain = slice(tokens.start, tokens.stop - drafts)
            y[certain], s = rule(x[certain], gates[certain], heads, s)
            state[row] = s
            if drafts:
                guessed = slice(certain.stop, tokens.stop)
                y[guessed], _ = rule(x[guessed], gates[guessed], heads, s)
                log[row, :drafts, :width] = x[guessed].float()
                log[row, :drafts, width:] = gates[guessed].float()
        return y

    return recurrence


def token_by_token(x: Tensor, gates: Tensor, heads: StateHeads, s: Tensor) -> tuple[Tensor, Tensor]:
    """A `Rule`."""
    q, k, v, beta, step = head_inputs(x, gates, heads, s)
    rate = rates(heads)
    y = torch.empty(v.shape, dtype=x.dtype, device=x.device)
    for t in range(len(x)):
        s = s * (rate * step[t]).exp()
        new = v[t] if heads.skip is not None else v[t] - (s * k[t, :, :, None]).sum(1)
        change = beta[t] * new
        s = s + k[t, :, :, None] * change[:, None, :]
        out = (s * q[t, :, :, None]).sum(1)
        y[t] = (out if heads.skip is None else out + skips(heads) * v[t]).to(x.dtype)
    return y.flatten(1), s


recurrence = recurrence_by(token_by_token)


def rates(heads: StateHeads) -> Tensor:
    """Return how fast the heads forget, below 0: [value_heads, key_dim or 1, value_dim or 1]."""
    if heads.bound:
        return torch.full_like(heads.decay, heads.bound)[:, None, None]
    return -heads.decay.exp().view(-1, *(heads.decay.shape[1:] or (1, 1)))


def skips(heads: StateHeads) -> Tensor:
    """Return the factors of the values of a state space, [value_heads, value_dim or 1]."""
    assert heads.skip is not None
    return heads.skip.view(len(heads.decay), -1)


def head_inputs(
    x: Tensor, gates: Tensor, heads: StateHeads, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of each token, in fp32; arguments as in `Ops.recurrence`, of one sequence.

    Returns:
        q, k [tokens, value_heads, key_dim] with the scale of scores, v [tokens, value_heads,
        value_dim], beta [tokens, value_heads, 1 or value_dim], the factor of the change, and the
        step [tokens, value_heads, 1 or key_dim, 1 or value_dim], which times `rates` is the
        logarithm of the decay.
    """
    value_heads, key_dim, value_dim = state.shape
    keys, values = heads.key_heads * key_dim, value_heads * value_dim
    group = value_heads // heads.key_heads
    if heads.skip is None:
        q, k, v = x.float().split((keys, keys, values), 1)
        b, a = gates.float().tensor_split((value_heads,), 1)
    else:
        v, k, q = x.float().split((values, keys, keys), 1)
        a = gates.float()
    q, k = (part.reshape(-1, heads.key_heads, key_dim) for part in (q, k))
    step = (a + heads.bias).unflatten(1, (value_heads, -1))
    step = (step * heads.decay.exp()[:, None]).sigmoid() if heads.bound else F.softplus(step)
    if heads.skip is None:
        q, k = _unit(q) * key_dim**-0.5, _unit(k)
        beta = heads.beta_scale * torch.sigmoid(b)[..., None]
    else:
        beta = step
    q, k = (part.repeat_interleave(group, 1) for part in (q, k))
    step = step[:, :, None] if heads.by_channel else step[..., None]
    return q, k, v.reshape(-1, value_heads, value_dim), beta, step


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def each_sequence(sequences: Sequences) -> Iterator[tuple[slice, int, bool, int, int]]:
    """Yield the tokens of each sequence, the row of its state, whether it begins in this step, and
    its numbers of pending tokens and of drafts."""
    starts, rows = sequences.starts.tolist(), sequences.rows.tolist()
    none = [0] * len(rows)
    pending = none if sequences.pending is None else sequences.pending.tolist()
    drafts = none if sequences.drafts is None else sequences.drafts.tolist()
    for i, (row, length) in enumerate(zip(rows, sequences.lengths.tolist(), strict=True)):
        count = starts[i + 1] - starts[i]
        if row >= 0 and count > 0:
            yield slice(starts[i], starts[i + 1]), row, length == count, pending[i], drafts[i]
