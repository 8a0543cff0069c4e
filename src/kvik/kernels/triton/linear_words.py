"""Weights of four or eight bits times unrounded x: outputs are the rows of the tensor cores'
product, so that weights unpacked in registers stay there, and tokens are its columns.

Unpacking adds 16 to integers of four bits. This is subtracted together with the zero point: from
every weight, which is exact, or, for few tokens, from the sum of a group, times the sum of its x,
which otherwise idle tensor cores add. Scales are applied in fp32 to the sums of a group, not to
weights.

Floor: for few tokens the bytes of the words and scales, once; for many 2 * tokens * rows * inputs
FLOPs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvik.kernels.triton.linear_end import end_and_store, sum_of_splits, tile_at
from kvik.kernels.triton.words import (
    INTERPRETED,
    MINIMUM,
    NO_OFFSET,
    ZERO,
    alike,
    fp16_pair,
    load_scale,
    planes_of,
    plus_pairs,
    scale_and_zero,
    weights_of,
)


@triton.jit
def dot(w, xs, sums):
    """sums + w xs, summed in fp32."""
    if INTERPRETED:
        return tl.dot(w.to(tl.float32), xs.to(tl.float32), sums)
    return tl.dot(w, xs, sums, input_precision="ieee")


@triton.jit
def sums_of_words(
    x, words, scales, factors, o, known, here,
    inputs, steps, begin, end, x_stride, scale_stride,
    FORMAT: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    WHOLE: tl.constexpr, SUBTRACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return outputs o [BO] of a weight times rows `known` [BT] int64 of x, over steps begin..end:
    [BO, BT] fp32, of any values where not `here` [BT]. Constants and sizes as in
    `words_kernel`."""
    BO: tl.constexpr = o.shape[0]
    BT: tl.constexpr = known.shape[0]
    TILES: tl.constexpr = 4 // planes_of(FORMAT)
    dtype: tl.constexpr = x.dtype.element_ty
    at = (o // 64 * steps * (1024 * TILES) + o % 64 * 16)[:, None] + tl.arange(0, 16)[None, :]
    k = tl.arange(0, SPAN)
    columns = x + known[None, :] * x_stride + k[:, None]
    if OFFSET == MINIMUM:
        scale_factor, minimum_factor = tl.load(factors + o), tl.load(factors + scale_stride + o)

    nothing = tl.zeros((BO, BT), tl.float32)
    one = tl.full((BO, 1), 1.0, tl.float32).to(dtype)
    sums = nothing
    for step in tl.range(begin, end, num_stages=STAGES):
        tile = words + at + step * (1024 * TILES)
        w0 = tl.load(tile)
        w1 = tl.load(tile + 1024) if TILES == 2 else w0
        for s in tl.static_range(128 // SPAN):
            start = step * 128 + s * SPAN
            if WHOLE and BT > 16:
                xs = tl.load(columns + start)
            else:  # x of one token is few bytes, but in all columns as many as half of the words
                inside = here[None, :] & (WHOLE or (start + k < inputs)[:, None])
                xs = tl.load(columns + start, mask=inside, other=0.0)
            w = weights_of(w0, w1, s, SPAN, FORMAT, dtype)
            if GROUP == 0:
                # Otherwise each product of 16 inputs would wait for the one before.
                sums = tl.fma(dot(w, xs, nothing), 1.0, sums)
            elif OFFSET == NO_OFFSET:
                scale = load_scale(scales + start // GROUP * scale_stride + o, FORMAT)
                sums += dot(w, xs, nothing) * scale[:, None]
            elif OFFSET == ZERO:
                scale, zero = scale_and_zero(tl.load(scales + start // GROUP * scale_stride + o))
                beyond = (-16 - zero).to(tl.float32)[:, None]
                if SUBTRACT:
                    part = dot(plus_pairs(w, beyond.to(dtype)), xs, nothing)
                else:
                    of_x = dot(alike(one, SPAN), xs, nothing)
                    part = tl.fma(beyond, of_x, dot(w, xs, nothing))
                sums += part * scale[:, None]
            else:
                word = tl.load(scales + start // GROUP * scale_stride + o)
                scale, minimum = fp16_pair(word)
                scale, minimum = scale * scale_factor, minimum * minimum_factor
                of_x = dot(alike(one, SPAN), xs, nothing)
                part = dot(w, xs, nothing) - 16.0 * of_x
                sums += part * scale[:, None] - of_x * minimum[:, None]
    return sums


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["tokens"])
def words_kernel(
    x, words, scales, factors, bias, residual, y, partials, arrivals,
    inputs, x_stride, tokens, rows, steps, split_steps, residual_stride, scale_stride,
    FORMAT: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    WHOLE: tl.constexpr, SUBTRACT: tl.constexpr, ACTIVATION: tl.constexpr, SPLITS: tl.constexpr,
    BO: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid [tiles, SPLITS]. A step is 128 inputs: one tile [64, 16] of words for each 64 outputs,
    or two of eight bits.

    scales: [groups, scale_stride] words, fp32, or bytes for E2M1; [scale_stride] fp32 if GROUP is
        0.
    factors: [2, scale_stride] fp32, for MINIMUM: factors of scales and minima.
    WHOLE: inputs are whole steps. SUBTRACT: subtract 16 + zero from every weight.
    """
    pid, split = tl.program_id(0), tl.program_id(1)
    first, first_token = tile_at(pid, rows, tokens, BO, BT)
    o, t = first + tl.arange(0, BO), first_token + tl.arange(0, BT)
    # Tokens after the last read the last one again; their results are not stored.
    known = tl.minimum(t, tokens - 1).to(tl.int64)
    begin = split * split_steps
    end = tl.minimum(begin + split_steps, steps)
    sums = sums_of_words(
        x, words, scales, factors, o, known, t < tokens,
        inputs, steps, begin, end, x_stride, scale_stride,
        FORMAT, OFFSET, GROUP, SPAN, WHOLE, SUBTRACT, STAGES,
    )  # fmt: skip

    last = True
    if SPLITS > 1:
        last, sums = sum_of_splits(sums, t < tokens, partials, arrivals, pid, split, SPLITS)
    if last:
        if GROUP == 0:
            sums *= tl.load(scales + o)[:, None]
        end_and_store(sums, first, t, bias, residual, y, tokens, rows, residual_stride, ACTIVATION)
