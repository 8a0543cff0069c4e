"""Layers that keep a state of each sequence: a short convolution, and the gated delta rule or a
state space.

They process token by token, so that results do not depend on how a prompt is cut into chunks. The
stored state covers no drafts; see `Sequences`.
Floor: memory. A state is read once and written once, and so are inputs and outputs; in between it
stays in registers. The tokens of a long prompt are processed in sequence, which takes longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.ops import Gate, Sequences, StateHeads
from kvik.kernels.triton.activation import MOST, sigmoid
from kvik.kernels.triton.launch import ceil_div, in_blocks, launch, power_of_two

CHANNELS = 256  # per program of the convolution
COLUMNS = 32  # of a head's state, per program
LOGGED = 1024  # numbers of a draft, per program
UNIT_EPS = 1e-6


@triton.jit
def gated_kernel(
    x, gate, out, columns, x_stride, gate_stride, width,
    BY: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [rows, blocks]; x [rows, columns], gate the same or, if SHARED, [rows, columns / width];
    BY: 0 nothing, 1 SiLU, 2 sigmoid"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    y = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    gates = gate + row * gate_stride + (at // width if SHARED else at)
    by = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    if BY == 0:
        y *= by
    elif BY == 1:
        y *= by * sigmoid(by)
    else:
        y *= sigmoid(by)
    tl.store(out + row * columns + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def entry(numbers, sequence):
    """A number of a sequence, 0 if there are none."""
    found = 0
    if numbers is not None:
        found = tl.load(numbers + sequence)
    return found


@triton.jit
def causal_conv_kernel(
    x, weight, bias, state, starts, lengths, rows, pending, drafts, out,
    channels, x_stride, state_stride,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [sequences, blocks of channels]; for the arguments see `Ops.causal_conv`"""
    sequence = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    row = tl.load(rows + sequence)
    first, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1)
    old = tl.load(lengths + sequence) > end - first  # it began in an earlier step
    kept = state + row.to(tl.int64) * state_stride + at
    before_first = kept + (WIDTH - 1 + entry(pending, sequence) - first) * channels
    guessed = entry(drafts, sequence)
    if (row >= 0) & (end > first):
        for i in range(0, (end - first).to(tl.int32)):
            token = first + i
            total = tl.zeros([BLOCK], tl.float32)
            if bias is not None:
                total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
            for tap in tl.static_range(WIDTH):
                source = token - (WIDTH - 1) + tap
                by = tl.load(weight + tap * channels + at, mask=inside, other=0.0).to(tl.float32)
                new = tl.load(
                    x + source * x_stride + at,
                    mask=inside & (source >= first),
                    other=0.0,
                ).to(tl.float32)
                before = tl.load(
                    before_first + source * channels,
                    mask=inside & (source < first) & old,
                    other=0.0,
                )
                total += (new + before) * by
            if SILU:
                total *= sigmoid(total)
            to = out + token * channels + at
            tl.store(to, total.to(out.dtype.element_ty), mask=inside)
        for tap in range(0, WIDTH - 1 + guessed):  # each is read before it is overwritten
            source = end - guessed - (WIDTH - 1) + tap
            new = tl.load(
                x + source * x_stride + at, mask=inside & (source >= first), other=0.0
            ).to(tl.float32)
            before = tl.load(
                before_first + source * channels,
                mask=inside & (source < first) & old,
                other=0.0,
            )
            tl.store(kept + tap * channels, new + before, mask=inside)


@triton.jit
def pass_token(
    s, own, gate, key, at, keys, columns, rate, offset, skip,
    key_head, head, key_heads, value_heads, key_dim, value_dim, scale, eps,
):  # fmt: skip
    """Take a head's state [KEYS, BLOCK] through one token, with inputs at `own` and gates at
    `gate`. Returns the state and the output [BLOCK]."""
    if skip is None:
        q_at, step_at = own + key_head * key_dim, gate + value_heads
        k_at, v_at = q_at + key_heads * key_dim, own + 2 * key_heads * key_dim
    else:
        k_at, v_at = own + value_heads * value_dim + key_head * key_dim, own
        q_at, step_at = k_at + key_heads * key_dim, gate
    q = tl.load(q_at + key, mask=keys, other=0.0).to(tl.float32)
    k = tl.load(k_at + key, mask=keys, other=0.0).to(tl.float32)
    v = tl.load(v_at + head * value_dim + at, mask=columns, other=0.0).to(tl.float32)
    alpha = tl.load(step_at).to(tl.float32) + offset
    step = tl.maximum(alpha, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(alpha)))
    s = s * tl.exp(-rate * step)
    if skip is None:
        q = q * tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
        k = k * tl.rsqrt(tl.sum(k * k, 0) + eps)
        change = sigmoid(tl.load(gate).to(tl.float32)) * (v - tl.sum(s * k[:, None], 0))
        s = s + k[:, None] * change[None, :]
        y = tl.sum(s * q[:, None], 0)
    else:
        s = s + k[:, None] * (step * v)[None, :]
        y = tl.sum(s * q[:, None], 0) + tl.load(skip + head) * v
    return s, y


@triton.jit
def recurrence_kernel(
    x, gates, decay, bias, skip, state, log, starts, lengths, rows, pending, drafts, out,
    x_stride, gates_stride, state_stride, log_stride, gates_width,
    key_heads, value_heads, key_dim, value_dim, scale, eps,
    KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [sequences, value heads, blocks of columns]; for the arguments see `Ops.recurrence`.
    The log is only read."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, at = tl.arange(0, KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + sequence)
    first, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1)
    old = tl.load(lengths + sequence) > end - first  # it began in an earlier step
    keys, columns = key < key_dim, at < value_dim
    both = keys[:, None] & columns[None, :]
    kept = state + row.to(tl.int64) * state_stride + head * key_dim * value_dim
    kept = kept + key[:, None] * value_dim + at[None, :]
    key_head = head // (value_heads // key_heads)
    certain = (end - first).to(tl.int32) - entry(drafts, sequence)
    if (row >= 0) & (end > first):
        s = tl.load(kept, mask=both & old, other=0.0)
        rate = tl.exp(tl.load(decay + head))
        offset = tl.load(bias + head)
        if pending is not None:
            width = 2 * key_heads * key_dim + value_heads * value_dim
            own = log + row.to(tl.int64) * log_stride
            for _ in range(0, tl.load(pending + sequence)):
                s, _ = pass_token(
                    s, own, own + width + head, key, at, keys, columns, rate, offset, skip,
                    key_head, head, key_heads, value_heads, key_dim, value_dim, scale, eps,
                )  # fmt: skip
                own += width + gates_width
        for i in range(0, (end - first).to(tl.int32)):
            token = first + i
            s, y = pass_token(
                s, x + token * x_stride, gates + token * gates_stride + head, key, at, keys,
                columns, rate, offset, skip,
                key_head, head, key_heads, value_heads, key_dim, value_dim, scale, eps,
            )  # fmt: skip
            to = out + token * value_heads * value_dim + head * value_dim + at
            tl.store(to, y.to(out.dtype.element_ty), mask=columns)
            if i + 1 == certain:
                tl.store(kept, s, mask=both)


@triton.jit
def log_drafts_kernel(
    x, gates, log, starts, rows, drafts,
    x_stride, gates_stride, log_stride, width, gates_width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [sequences, blocks of columns]; writes the log of `Ops.recurrence`"""
    sequence = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, guessed = tl.load(rows + sequence), tl.load(drafts + sequence)
    begin = tl.load(starts + sequence + 1).to(tl.int64) - guessed
    inputs, columns = at < width, at < width + gates_width
    to = log + row.to(tl.int64) * log_stride + at
    if row >= 0:
        for i in range(0, guessed):
            token = begin + i
            own = tl.load(x + token * x_stride + at, mask=inputs, other=0.0).to(tl.float32)
            gate = tl.load(
                gates + token * gates_stride + at - width, mask=columns & (at >= width), other=0.0
            ).to(tl.float32)
            tl.store(to + i * (width + gates_width), own + gate, mask=columns)


def gated(x: Tensor, gate: Tensor, by: Gate) -> Tensor:
    """See `Ops`."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block, blocks = in_blocks(columns, MOST)
    width = columns // gate.shape[1]
    numbers = (columns, x.stride(0), gate.stride(0), width)
    constants = (("none", "silu", "sigmoid").index(by), width > 1, block)
    launch(gated_kernel, (rows, blocks), (x, gate, out), numbers, constants)
    return out


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    sequences: Sequences,
    silu: bool,
) -> Tensor:
    """See `Ops`."""
    width, channels = weight.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    block, blocks = in_blocks(channels, CHANNELS)
    launch(
        causal_conv_kernel, (len(sequences.rows), blocks),
        (
            x, weight, bias, state, sequences.starts, sequences.lengths, sequences.rows,
            sequences.pending, sequences.drafts, out,
        ),
        (channels, x.stride(0), state.stride(0)), (width, silu, block),
    )  # fmt: skip
    return out


def recurrence(
    x: Tensor, gates: Tensor, heads: StateHeads, state: Tensor, log: Tensor, sequences: Sequences
) -> Tensor:
    """See `Ops`."""
    _, value_heads, key_dim, value_dim = state.shape
    out = torch.empty(len(x), value_heads * value_dim, dtype=x.dtype, device=x.device)
    block, blocks = in_blocks(value_dim, COLUMNS)
    strides = x.stride(0), gates.stride(0)
    launch(
        recurrence_kernel, (len(sequences.rows), value_heads, blocks),
        (
            x, gates, heads.decay, heads.bias, heads.skip, state, log, sequences.starts,
            sequences.lengths, sequences.rows, sequences.pending, sequences.drafts, out,
        ),
        (
            *strides, state.stride(0), log.stride(0), gates.shape[1],
            heads.key_heads, value_heads, key_dim, value_dim, key_dim**-0.5, UNIT_EPS,
        ),
        (power_of_two(key_dim), block),
    )  # fmt: skip
    if sequences.drafts is not None:  # every program above has read the log
        width, gates_width = x.shape[1], gates.shape[1]
        launch(
            log_drafts_kernel, (len(sequences.rows), ceil_div(width + gates_width, LOGGED)),
            (x, gates, log, sequences.starts, sequences.rows, sequences.drafts),
            (*strides, log.stride(0), width, gates_width), (LOGGED,),
        )  # fmt: skip
    return out
