"""Layers that keep a state of each sequence: a short convolution, and the gated delta rule or a
state space.

The stored state covers no drafts; see `Sequences`.
Floor: memory. A state is read once and written once, and so are inputs and outputs; in between it
stays in registers. But a sequence's tokens follow one another: its time is that of a chain of
steps, which no other program shortens. In a sequence of few tokens these are tokens, each with two
sums over the keys. From `LONG` tokens of bfloat16 on they are chunks of 2^LEVELS tokens, with one
update of the state each (Yang et al. 2024, section 3.3; Dao and Gu 2024, section 6), unless parts
of a state have their own decay. Products of a chunk follow one another too: two in a state space,
and nine in the delta rule, which are scores of keys, six that invert a triangle, the changes and
the update. The last two wait for the chunk before and for one product with its state. Every block
of columns repeats the others. Which form a sequence takes depends on itself only, not on its batch.
"""

from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.ops import Gate, Sequences, StateHeads
from kvik.kernels.triton.activation import MOST, sigmoid
from kvik.kernels.triton.launch import ceil_div, in_blocks, launch, power_of_two
from kvik.kernels.triton.words import INTERPRETED

CHANNELS = 256  # per program of the convolution
COLUMNS = 32  # of a head's state, per program
LEVELS = 4  # chunks are of 2^LEVELS tokens; the factors of 32 would not fit in registers
LONG = 64  # bfloat16 tokens of a sequence in a step, from which on it takes chunks
NEVER = 1 << 30  # tokens; for wider inputs, and more keys, whose factors would not fit in registers
MAX_KEYS = 256  # of a head, in chunks
LOGGED = 1024  # numbers of a draft, per program
UNIT_EPS = 1e-6


@triton.jit
def gated_kernel(
    x, gate, out, columns, x_stride, gate_stride, width,
    BY: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [rows, blocks]; x [rows, columns], gate the same or, if SHARED, [rows, columns / width];
    BY: 0 nothing, 1 SiLU, 2 sigmoid, 3 softplus"""
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
    elif BY == 2:
        y *= sigmoid(by)
    else:
        y *= softplus(by)
    tl.store(out + row * columns + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def entry(numbers, sequence):
    """A number of a sequence, 0 if there are none."""
    found = 0
    if numbers is not None:
        found = tl.load(numbers + sequence)
    return found


@triton.jit
def place_of(starts, lengths, rows, sequence):
    """The row of a sequence's state, its first token and number of tokens in this step, and whether
    it began in an earlier step."""
    first = tl.load(starts + sequence).to(tl.int64)
    count = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    return tl.load(rows + sequence), first, count, tl.load(lengths + sequence) > count


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
    row, first, count, old = place_of(starts, lengths, rows, sequence)
    kept = state + row.to(tl.int64) * state_stride + at
    before_first = kept + (WIDTH - 1 + entry(pending, sequence) - first) * channels
    guessed = entry(drafts, sequence)
    if (row >= 0) & (count > 0):
        for i in range(0, count):
            token = first + i
            total = tl.zeros([BLOCK], tl.float32)
            if bias is not None:
                total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
            for tap in tl.static_range(WIDTH):
                source = token - (WIDTH - 1) + tap
                by = tl.load(weight + tap * channels + at, mask=inside, other=0.0).to(tl.float32)
                new = tl.load(
                    x + source * x_stride + at, mask=inside & (source >= first), other=0.0
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
            source = first + count - guessed - (WIDTH - 1) + tap
            new = tl.load(
                x + source * x_stride + at, mask=inside & (source >= first), other=0.0
            ).to(tl.float32)
            before = tl.load(
                before_first + source * channels, mask=inside & (source < first) & old, other=0.0
            )
            tl.store(kept + tap * channels, new + before, mask=inside)


@triton.jit
def inputs_at(own, head, skip, key_heads, value_heads, key_dim, value_dim):
    """Where the query, key and value of a head are in the inputs at `own`."""
    key_head = head // (value_heads // key_heads)
    if skip is None:
        q_at = own + key_head * key_dim
        k_at, v_at = q_at + key_heads * key_dim, own + 2 * key_heads * key_dim
    else:
        k_at, v_at = own + value_heads * value_dim + key_head * key_dim, own
        q_at = k_at + key_heads * key_dim
    return q_at, k_at, v_at + head * value_dim


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def gates_at(gate, rate, offset, beta_scale, skip, value_heads):
    """The factor of a change and the logarithm of the decay, by a head's gates at `gate`."""
    alpha = tl.load(gate + value_heads if skip is None else gate).to(tl.float32) + offset
    step = softplus(alpha)
    beta = step
    if skip is None:
        beta = beta_scale * sigmoid(tl.load(gate).to(tl.float32))
    return beta, -rate * step


@triton.jit
def row_gates_at(gate, rate, offset, beta_scale, bound, head, key, value_heads, key_dim):
    """The same, with the logarithm of the decay of each row of the state."""
    alpha_at = gate + value_heads + head * (key_dim - 1) + key
    alpha = tl.load(alpha_at, mask=key < key_dim, other=0.0).to(tl.float32) + offset
    lost = tl.where(bound < 0, bound * sigmoid(rate * alpha), -rate * softplus(alpha))
    return beta_scale * sigmoid(tl.load(gate).to(tl.float32)), lost


@triton.jit
def channel_steps_at(gate, offset, head, at, value_dim):
    """The step of each channel of a head's value [BLOCK], by its gates at `gate`."""
    alpha_at = gate + head * (value_dim - 1) + at
    return softplus(tl.load(alpha_at, mask=at < value_dim, other=0.0).to(tl.float32) + offset)


@triton.jit
def parameters_at(
    decay, bias, skip, head, key, at, key_dim, value_dim,
    BY_ROW: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The rate, offset and skip of a head: each a number, but if BY_CHANNEL [KEYS, BLOCK], [BLOCK]
    and [BLOCK], and if BY_ROW the offset is [KEYS]."""
    if BY_CHANNEL:
        rate_at, both = state_at(decay, head * 0, head, key, at, 0, key_dim, value_dim)
        rate = tl.exp(tl.load(rate_at, mask=both, other=0.0))
        offset = tl.load(bias + head * value_dim + at, mask=at < value_dim, other=0.0)
        skipped = tl.load(skip + head * value_dim + at, mask=at < value_dim, other=0.0)
    else:
        rate = tl.exp(tl.load(decay + head))
        if BY_ROW:
            offset = tl.load(bias + head * key_dim + key, mask=key < key_dim, other=0.0)
        else:
            offset = tl.load(bias + head)
        skipped = 0.0
        if skip is not None:
            skipped = tl.load(skip + head)
    return rate, offset, skipped


@triton.jit
def state_at(state, row, head, key, at, state_stride, key_dim, value_dim):
    """Where the numbers [keys, columns] of a head's state are, and whether it has them."""
    kept = state + row.to(tl.int64) * state_stride + head * key_dim * value_dim
    kept = kept + key[:, None] * value_dim + at[None, :]
    return kept, (key < key_dim)[:, None] & (at < value_dim)[None, :]


@triton.jit
def pass_token(
    s, own, gate, head, key, at, rate, offset, skipped, beta_scale, bound, skip,
    key_heads, value_heads, key_dim, value_dim, scale, eps,
    BY_ROW: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Take a head's state [KEYS, BLOCK] through one token, with inputs at `own`, gates at `gate`,
    and what `parameters_at` returned. Returns the state and the output [BLOCK]."""
    q_at, k_at, v_at = inputs_at(own, head, skip, key_heads, value_heads, key_dim, value_dim)
    q = tl.load(q_at + key, mask=key < key_dim, other=0.0).to(tl.float32)
    k = tl.load(k_at + key, mask=key < key_dim, other=0.0).to(tl.float32)
    v = tl.load(v_at + at, mask=at < value_dim, other=0.0).to(tl.float32)
    if BY_ROW:
        beta, lost = row_gates_at(
            gate, rate, offset, beta_scale, bound, head, key, value_heads, key_dim
        )
        s = s * tl.exp(lost)[:, None]
    elif BY_CHANNEL:
        beta = channel_steps_at(gate, offset, head, at, value_dim)
        s = s * tl.exp(-rate * beta[None, :])
    else:
        beta, lost = gates_at(gate, rate, offset, beta_scale, skip, value_heads)
        s = s * tl.exp(lost)
    if skip is None:
        q = q * tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
        k = k * tl.rsqrt(tl.sum(k * k, 0) + eps)
        change = beta * (v - tl.sum(s * k[:, None], 0))
    else:
        change = beta * v
    s = s + k[:, None] * change[None, :]
    return s, tl.sum(s * q[:, None], 0) + skipped * v


@triton.jit
def product(a, b, total):
    """total + a @ b, summed in fp32; total may be None."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="tf32x3")  # of fp32, 22 bits


@triton.jit
def times(a, b):
    """a @ b for b of fp32, of which tensor cores lose no more than the last bits: a bfloat16 number
    is multiplied by three of them whose sum is b."""
    if tl.bfloat16 == a.dtype:
        first = b.to(tl.bfloat16)
        lacking = b - first.to(tl.float32)
        second = lacking.to(tl.bfloat16)
        third = (lacking - second.to(tl.float32)).to(tl.bfloat16)
        total = product(a, first, product(a, second, product(a, third, None)))
    else:
        total = product(a, b, None)
    return total


@triton.jit
def inverse(a, LEVELS: tl.constexpr):
    """(1 + a)^-1, for a strictly lower triangular a of 2^LEVELS rows.

    The inverse of [[L, 0], [M, N]] is [[L', 0], [-N' M L', N']]; blocks double from one row on. All
    numbers here are parts of inverses. In the equal (1 - a) (1 + a^2) (1 + a^4) ... powers of a
    grow to thousands if 16 keys are equal, and cancel.
    """
    row, column = tl.arange(0, 1 << LEVELS)[:, None], tl.arange(0, 1 << LEVELS)[None, :]
    inverted = tl.where(row == column, 1.0, tl.where(row ^ column == 1, -a, 0.0))
    for level in tl.static_range(1, LEVELS):
        between = tl.where((row >> level) ^ (column >> level) == 1, a, 0.0)  # M of each pair
        inverted -= times(times(inverted, between), inverted)
    return inverted


@triton.jit
def unit(x, eps):
    """What makes the norm of each row 1."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + eps)


@triton.jit
def pass_chunk(
    s, own, gate, inside, head, key, at, rate, offset, beta_scale, skip,
    key_heads, value_heads, key_dim, value_dim, scale, eps,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Take a head's state [KEYS, BLOCK] through 2^LEVELS tokens, with inputs at `own` and gates at
    `gate`; tokens that are not `inside` change nothing. Returns the state and the outputs [tokens,
    BLOCK]."""
    q_at, k_at, v_at = inputs_at(own, head, skip, key_heads, value_heads, key_dim, value_dim)
    keys, columns = (key < key_dim)[None, :], (at < value_dim)[None, :]
    q = tl.load(q_at[:, None] + key[None, :], mask=keys, other=0.0)
    k = tl.load(k_at[:, None] + key[None, :], mask=keys, other=0.0)
    v = tl.load(v_at[:, None] + at[None, :], mask=columns, other=0.0).to(tl.float32)
    beta, lost = gates_at(gate, rate, offset, beta_scale, skip, value_heads)
    beta, lost = tl.where(inside, beta, 0.0)[:, None], tl.where(inside, lost, 0.0)
    i = tl.arange(0, 1 << LEVELS)
    after = i[:, None] > i[None, :]
    # Decays from a token (column) to another (row) add up what is lost between them. Differences of
    # sums from the start would lack the bits that a token takes which forgets everything.
    later = tl.where(after, lost[:, None], 0.0)
    since = tl.where(i[:, None] < i[None, :], 0.0, tl.exp(tl.cumsum(later, 0)))
    left = tl.exp(tl.cumsum(lost, 0))[:, None]  # of the state before the chunk, at each token
    rest = tl.exp(tl.sum(later, 0))[:, None]  # of each change, at the end
    change, q_unit = beta * v, 1.0
    read = product(q, tl.trans(k), None) * since
    if skip is None:
        q_unit, k_unit = unit(q, eps)[:, None] * scale, unit(k, eps)
        read *= k_unit[None, :]
        rest *= k_unit[:, None]
        beta *= k_unit[:, None]
        among = product(k, tl.trans(k), None) * since * k_unit[None, :] * beta
        among = tl.where(after, among, 0.0)
        change = times(inverse(among, LEVELS), change - beta * left * times(k, s))
    y = (left * times(q, s) + times(read, change)) * q_unit
    if skip is not None:
        y += tl.load(skip + head) * v
    return s * tl.exp(tl.sum(lost, 0)) + times(tl.trans(k), change * rest), y


@triton.jit
def in_chunks(count, pending, drafts, sequence, LONG: tl.constexpr):
    """Whether a sequence takes chunks: it has many tokens, and none was or is a draft."""
    return (count >= LONG) & (entry(pending, sequence) + entry(drafts, sequence) == 0)


@triton.jit
def recurrence_kernel(
    x, gates, decay, bias, skip, state, log, starts, lengths, rows, pending, drafts, out,
    x_stride, gates_stride, state_stride, log_stride, gates_width,
    key_heads, value_heads, key_dim, value_dim, scale, eps, beta_scale, bound,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
    BY_ROW: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """grid [sequences, value heads, blocks of columns]; for the arguments see `Ops.recurrence`.
    Leaves out sequences that take chunks. The log is only read."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, at = tl.arange(0, KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row, first, count, old = place_of(starts, lengths, rows, sequence)
    kept, both = state_at(state, row, head, key, at, state_stride, key_dim, value_dim)
    certain = count - entry(drafts, sequence)
    if (row >= 0) & (count > 0) & (not in_chunks(count, pending, drafts, sequence, LONG)):
        s = tl.load(kept, mask=both & old, other=0.0)
        rate, offset, skipped = parameters_at(
            decay, bias, skip, head, key, at, key_dim, value_dim, BY_ROW, BY_CHANNEL
        )
        if pending is not None:
            width = 2 * key_heads * key_dim + value_heads * value_dim
            own = log + row.to(tl.int64) * log_stride
            for _ in range(0, tl.load(pending + sequence)):
                s, _ = pass_token(
                    s, own, own + width + head, head, key, at, rate, offset, skipped, beta_scale,
                    bound, skip, key_heads, value_heads, key_dim, value_dim, scale, eps,
                    BY_ROW, BY_CHANNEL,
                )  # fmt: skip
                own += width + gates_width
        for i in range(0, count):
            token = first + i
            s, y = pass_token(
                s, x + token * x_stride, gates + token * gates_stride + head, head, key, at,
                rate, offset, skipped, beta_scale, bound, skip,
                key_heads, value_heads, key_dim, value_dim, scale, eps, BY_ROW, BY_CHANNEL,
            )  # fmt: skip
            to = out + token * value_heads * value_dim + head * value_dim + at
            tl.store(to, y.to(out.dtype.element_ty), mask=at < value_dim)
            if i + 1 == certain:
                tl.store(kept, s, mask=both)


@triton.jit
def chunks_kernel(
    x, gates, decay, bias, skip, state, starts, lengths, rows, pending, drafts, out,
    x_stride, gates_stride, state_stride,
    key_heads, value_heads, key_dim, value_dim, scale, eps, beta_scale,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """grid [sequences, value heads, blocks of columns]; `recurrence_kernel` for sequences that take
    chunks"""
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, at = tl.arange(0, KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row, first, count, old = place_of(starts, lengths, rows, sequence)
    kept, both = state_at(state, row, head, key, at, state_stride, key_dim, value_dim)
    if (row >= 0) & in_chunks(count, pending, drafts, sequence, LONG):
        s = tl.load(kept, mask=both & old, other=0.0)
        rate = tl.exp(tl.load(decay + head))
        offset = tl.load(bias + head)
        for begin in range(0, count, 1 << LEVELS):
            place = begin + tl.arange(0, 1 << LEVELS)
            inside = place < count
            token = first + tl.minimum(place, count - 1)  # the last one again has no effect
            s, y = pass_chunk(
                s, x + token * x_stride, gates + token * gates_stride + head, inside, head, key,
                at, rate, offset, beta_scale, skip,
                key_heads, value_heads, key_dim, value_dim, scale, eps, LEVELS,
            )  # fmt: skip
            to = out + token[:, None] * value_heads * value_dim + head * value_dim + at[None, :]
            tl.store(
                to, y.to(out.dtype.element_ty), mask=inside[:, None] & (at < value_dim)[None, :]
            )
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
    constants = (get_args(Gate).index(by), width > 1, block)
    launch(gated_kernel, (rows, blocks), (x, gate, out), numbers, constants)
    return out


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, sequences: Sequences, silu: bool
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
    strides = x.stride(0), gates.stride(0), state.stride(0)
    inputs = (x, gates, heads.decay, heads.bias, heads.skip, state)
    places = (sequences.starts, sequences.lengths, sequences.rows)
    drafted = (sequences.pending, sequences.drafts)
    sizes = (heads.key_heads, value_heads, key_dim, value_dim)
    factors = (key_dim**-0.5, UNIT_EPS, heads.beta_scale)
    keys = power_of_two(key_dim)
    block, blocks = in_blocks(value_dim, COLUMNS)
    # Chunks are for one decay of a state: with several, two tokens have one for each part of it.
    together = not (heads.by_row or heads.by_channel)
    in_products = x.dtype == torch.bfloat16 and keys <= MAX_KEYS and together
    long = LONG if in_products else NEVER
    launch(
        recurrence_kernel, (len(sequences.rows), value_heads, blocks),
        (*inputs, log, *places, *drafted, out),
        (*strides, log.stride(0), gates.shape[1], *sizes, *factors, heads.bound),
        (keys, block, long, heads.by_row, heads.by_channel),
    )  # fmt: skip
    if sequences.longest >= long:
        launch(
            chunks_kernel, (len(sequences.rows), value_heads, blocks),
            (*inputs, *places, *drafted, out), (*strides, *sizes, *factors),
            (max(16, keys), max(16, block), long, LEVELS),
        )  # fmt: skip  # tensor cores take 16 numbers at least
    if sequences.drafts is not None:  # every program above has read the log
        width, gates_width = x.shape[1], gates.shape[1]
        launch(
            log_drafts_kernel, (len(sequences.rows), ceil_div(width + gates_width, LOGGED)),
            (x, gates, log, sequences.starts, sequences.rows, sequences.drafts),
            (*strides[:2], log.stride(0), width, gates_width), (LOGGED,),
        )  # fmt: skip
    return out
