"""Eight-bit weights times x rounded to eight bits, both int8 or both E4M3.

Tensor cores multiply the codes directly. Integers are summed in 32 bits: over all inputs if an
output and a token have one scale each (Dettmers et al. 2022, "LLM.int8()", section 2.1), else over
a group of inputs. E4M3 is summed in the accumulators of the tensor cores for at most 128 inputs,
then in fp32 (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2).

Groups of 16 integers are too short for the int8 tensor cores, so they are multiplied as fp16, in
which they and their products are exact. The same applies to E4M3, also if the device cannot
multiply it: its bits are those of fp16 numbers that are 2^8 times smaller.

Floor: for few tokens the bytes of the weights, for many 2 * tokens * rows * inputs operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvik.kernels.triton.linear_end import end_and_store, sum_of_splits, tile_at

# How codes are multiplied.
INT8 = tl.constexpr(0)
INT8_IN_FP16 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E4M3_IN_FP16 = tl.constexpr(3)


@triton.jit
def small_fp16(codes):
    """Convert bits of E4M3, int8, to fp16 numbers that are 2^8 times smaller."""
    wide = codes.to(tl.int16)
    return (((wide & 0x7F) << 7) | (wide & -0x8000)).to(tl.float16, bitcast=True)


@triton.jit
def sums_of_bytes(
    x, x_scales, values, scales, o, known,
    tokens, inputs, begin, end, scale_stride,
    HOW: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return rows o [BO] of a weight times rows `known` [BT] of x, over steps begin..end: [BO, BT]
    fp32, or int32 if integers have no groups. Apply `scaled` to it. Sizes as in `bytes_kernel`."""
    BO: tl.constexpr = o.shape[0]
    BT: tl.constexpr = known.shape[0]
    k = tl.arange(0, SPAN)
    lines = values + o.to(tl.int64)[:, None] * inputs + k[None, :]
    columns = x + known.to(tl.int64)[None, :] * inputs + k[:, None]

    IN_ALL: tl.constexpr = HOW == INT8 and GROUP == 0 and X_GROUP == 0
    sums = tl.zeros((BO, BT), tl.int32 if IN_ALL else tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        for s in tl.static_range(128 // SPAN):
            start = step * 128 + s * SPAN
            w, xs = tl.load(lines + start), tl.load(columns + start)
            if IN_ALL:
                sums = tl.dot(w, xs, sums, out_dtype=tl.int32)
            else:
                if HOW == INT8:
                    part = tl.dot(w, xs, out_dtype=tl.int32).to(tl.float32)
                elif HOW == INT8_IN_FP16:
                    part = tl.dot(w.to(tl.float16), xs.to(tl.float16))
                elif HOW == E4M3:
                    part = tl.dot(w, xs)
                else:
                    part = tl.dot(small_fp16(w), small_fp16(xs)) * 65536.0
                if GROUP:
                    part *= tl.load(scales + start // GROUP * scale_stride + o)[:, None]
                if X_GROUP:
                    part *= tl.load(x_scales + start // X_GROUP * tokens + known)[None, :]
                sums += part
    return sums


@triton.jit
def scaled(sums, x_scales, scales, o, known, GROUP: tl.constexpr, X_GROUP: tl.constexpr):
    """Multiply sums by the scales that all inputs share: [BO, BT] fp32."""
    z = sums.to(tl.float32)
    if GROUP == 0:
        z *= tl.load(scales + o)[:, None]
    if X_GROUP == 0:
        z *= tl.load(x_scales + known)[None, :]
    return z


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["tokens"])
def bytes_kernel(
    x, x_scales, values, scales, bias, residual, y, partials, arrivals,
    tokens, rows, steps, split_steps, residual_stride, scale_stride,
    HOW: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, SPAN: tl.constexpr,
    ACTIVATION: tl.constexpr, SPLITS: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """grid [tiles, SPLITS]; x [tokens, 128 * steps], values [filled rows, 128 * steps], both int8,
    or float8_e4m3fn if they are multiplied as that.

    scales: [groups, scale_stride], or [scale_stride] if GROUP is 0. x_scales: [groups, tokens], or
    [tokens] if X_GROUP is 0.
    """
    pid, split = tl.program_id(0), tl.program_id(1)
    first, first_token = tile_at(pid, rows, tokens, BO, BT)
    o, t = first + tl.arange(0, BO), first_token + tl.arange(0, BT)
    known = tl.minimum(t, tokens - 1)
    begin = split * split_steps
    end = tl.minimum(begin + split_steps, steps)
    sums = sums_of_bytes(
        x, x_scales, values, scales, o, known,
        tokens, steps * 128, begin, end, scale_stride,
        HOW, GROUP, X_GROUP, SPAN, STAGES,
    )  # fmt: skip

    if SPLITS == 1:
        last, total = True, sums
    else:
        last, total = sum_of_splits(sums, t < tokens, partials, arrivals, pid, split, SPLITS)
    if last:
        z = scaled(total, x_scales, scales, o, known, GROUP, X_GROUP)
        end_and_store(z, first, t, bias, residual, y, tokens, rows, residual_stride, ACTIVATION)
