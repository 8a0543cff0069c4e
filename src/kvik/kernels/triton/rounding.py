"""Rounding of x, and of K and V with exactly the bits of kernels/kv_rounding.py.

Everything is explicit: products are not fused with sums (launch with enable_fp_fusion=False),
divisions follow IEEE, and E4M3 and bfloat16 are computed from the bits of fp32, so that Ampere,
Hopper and Triton's interpreter give the same bits. A vector is in two tiles of equal shape, low
[rows, half] and high [rows, half], the halves that a rotation mixes; elements after its end are 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.kv_rounding import LEAST as _LEAST
from kvik.kernels.kv_rounding import MOST as _MOST
from kvik.kernels.triton.launch import ceil_div, launch, power_of_two

# x rounded to eight bits, with a scale for each token and group of inputs, for products with int8
# and E4M3 matrices.
#
# Scales are absmax / 127 or / 448, by an IEEE division, or 1 if all values are 0; integers are
# rounded half to even. The scale of a token with NaN or infinity is NaN, and so is its result. If
# the scale is given, infinity is clamped, and NaN is NaN in E4M3 too, because a library with one
# scale for all tokens could not represent it otherwise. Floor: memory; x is read twice, the second
# time from a cache.

MAX_STEPS = 4096  # numbers that a program processes at a time, of one or more tokens or groups


@triton.jit
def _finite(x):
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def _codes(x, scale, E4M3: tl.constexpr):
    """Round x / scale to int32 in -127..127, or to the bits of E4M3. scale: broadcasts to x."""
    q = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    q = tl.where(q == q, q, 0.0)  # its scale is NaN
    if E4M3:
        return tl.where(x == x, e4m3_bits(tl.clamp(q, -448.0, 448.0)), 0x7F)
    return nearest(q).to(tl.int32)


@triton.jit
def _scale(size, nothing, E4M3: tl.constexpr):
    """Return the scale for absmax; nothing: 0, or NaN if a number is NaN or infinite."""
    most: tl.constexpr = 448.0 if E4M3 else 127.0
    scale = tl.div_rn(size, tl.full(size.shape, most, tl.float32))
    return tl.where(scale == 0.0, 1.0, scale) + nothing


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["tokens"])
def round_tokens_kernel(
    x, given, out, scales, tokens, inputs, filled, x_stride,
    E4M3: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [tokens / TOKENS]; x [tokens, inputs], out [tokens, filled] bytes, scales [tokens].
    given: fp32 scales, [1] or, with EACH, [tokens]; None: computed here."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    here = token < tokens
    rows, here_too = x + token[:, None] * x_stride, here[:, None]
    k = tl.arange(0, BLOCK)[None, :]
    if given is None:
        sizes = tl.zeros((TOKENS, BLOCK), tl.float32)
        nothing = tl.zeros((TOKENS, BLOCK), tl.float32)
        for start in range(0, inputs, BLOCK):
            at = start + k
            wide = tl.load(rows + at, mask=here_too & (at < inputs), other=0.0).to(tl.float32)
            sizes = tl.maximum(sizes, tl.abs(wide))
            nothing = tl.where(_finite(wide), nothing, float("nan"))
        scale = _scale(tl.max(sizes, 1), tl.sum(nothing, 1), E4M3)
    else:
        which = tl.minimum(token, tokens - 1) if EACH else tl.zeros((TOKENS,), tl.int32)
        scale = tl.load(given + which)
        nothing = tl.zeros((TOKENS, BLOCK), tl.float32)
    for start in range(0, filled, BLOCK):
        at = start + k
        wide = tl.load(rows + at, mask=here_too & (at < inputs), other=0.0).to(tl.float32)
        codes = _codes(wide, scale[:, None], E4M3)
        to = out + token[:, None] * filled + at
        tl.store(to, codes.to(tl.int8), mask=here_too & (at < filled))
        if given is not None:
            nothing = tl.where(wide == wide, nothing, float("nan"))
    if given is not None:
        scale += tl.sum(nothing, 1)
    tl.store(scales + token, scale, mask=here)


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["tokens"])
def round_groups_kernel(
    x, out, scales, tokens, inputs, filled, groups, x_stride,
    GROUP: tl.constexpr, E4M3: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [tokens * groups / GROUPS]; BLOCK >= GROUP. scales: [groups, tokens]"""
    number = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    token, group = (number // groups).to(tl.int64), number % groups
    here = number < tokens * groups
    within = tl.arange(0, BLOCK)[None, :]
    at = group[:, None] * GROUP + within
    inside = here[:, None] & (within < GROUP)
    rows = x + token[:, None] * x_stride
    wide = tl.load(rows + at, mask=inside & (at < inputs), other=0.0).to(tl.float32)
    nothing = tl.sum(tl.where(_finite(wide), 0.0, float("nan")), 1)
    scale = _scale(tl.max(tl.abs(wide), 1), nothing, E4M3)
    codes = _codes(wide, scale[:, None], E4M3)
    to = out + token[:, None] * filled + at
    tl.store(to, codes.to(tl.int8), mask=inside & (at < filled))
    tl.store(scales + group * tokens + token, scale, mask=here)


def round_tokens(
    x: Tensor, filled: int, group: int, e4m3: bool, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Round x to int8 or E4M3, with a scale for each token and group of inputs.

    Args:
        x: [tokens, inputs]; rows may be strided.
        filled: inputs of the result; those beyond x are 0.
        group: inputs that share a scale; 0: all of a token.
        scale: fp32, [1] for all or [tokens], only without groups; None: computed here.

    Returns:
        codes [tokens, filled] int8 or float8_e4m3fn, scales [tokens], or [groups, tokens] fp32.
    """
    tokens, inputs = x.shape
    out = torch.empty(tokens, filled, dtype=torch.int8, device=x.device)
    shape = (ceil_div(filled, group), tokens) if group else (tokens,)
    scales = torch.empty(*shape, dtype=torch.float32, device=x.device)
    stride = x.stride(0)
    if tokens and group:
        block = power_of_two(group)
        # Not fewer for few groups, otherwise each number of groups would be compiled separately.
        count = max(1, MAX_STEPS // block)
        launch(
            round_groups_kernel,
            (ceil_div(scales.numel(), count),),
            (x, out, scales),
            (tokens, inputs, filled, shape[0], stride),
            (group, e4m3, count, block),
        )
    elif tokens:
        block = min(MAX_STEPS, power_of_two(filled))
        count = max(1, MAX_STEPS // block)
        scale_per_token = scale is not None and len(scale) > 1
        launch(
            round_tokens_kernel,
            (ceil_div(tokens, count),),
            (x, scale, out, scales),
            (tokens, inputs, filled, stride),
            (e4m3, scale_per_token, count, block),
            num_warps=8,
        )
    return (out.view(torch.float8_e4m3fn) if e4m3 else out), scales


LEAST = tl.constexpr(_LEAST)
MOST = tl.constexpr(_MOST)


@triton.jit
def nearest(x):
    """Round half to even, for |x| < 2^22: floats beyond 1.5 * 2^23 are integers."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def bf16_bits(x):
    """Return the bits of the bfloat16 nearest to fp32, int32 in 0..65535."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded) & 0xFFFF


@triton.jit
def e4m3_bits(x):
    """Return the bits of the float8_e4m3fn nearest to fp32 in -448..448, int32 in 0..255."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three bits of mantissa, and an exponent with bias 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9 wide.
    small = nearest(size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    code = tl.where(size < 0x3C800000, small, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def vector_sizes(low, high):
    """Return the largest magnitude of each vector, NaN if it contains one: [rows] fp32."""
    size = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    nan = tl.max((low != low).to(tl.int32), 1) + tl.max((high != high).to(tl.int32), 1)
    return tl.where(nan > 0, float("nan"), size)


@triton.jit
def round_in_eight_bits(low, high, FP8: tl.constexpr):
    """Return codes of low and high, int32 [rows, half], and bits of bfloat16 scales [rows]."""
    most: tl.constexpr = 448.0 if FP8 else 127.0
    size = vector_sizes(low, high)
    usable = (size >= LEAST) & (size <= MOST)
    scale = tl.where(usable, size * (1.0 / most), tl.where(size < LEAST, 0.0, size))
    bits = bf16_bits(scale)
    divisor = tl.where(usable, (bits << 16).to(tl.float32, bitcast=True), 1.0)
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)[:, None]
    low = tl.where(usable[:, None], low * inverse, 0.0)
    high = tl.where(usable[:, None], high * inverse, 0.0)
    # The scale may have been rounded down. In eight bits, 128 would wrap around.
    if FP8:
        low, high = tl.clamp(low, -most, most), tl.clamp(high, -most, most)
        return e4m3_bits(low), e4m3_bits(high), bits
    low, high = tl.clamp(nearest(low), -most, most), tl.clamp(nearest(high), -most, most)
    return low.to(tl.int32), high.to(tl.int32), bits


@triton.jit
def round_in_four_bits(low, high):
    """Return codes of low and high, int32 [rows, half] in 0..15, and words of scale and zero
    point."""
    size = vector_sizes(low, high)
    usable = (size >= LEAST) & (size <= MOST)
    least = tl.minimum(tl.minimum(tl.min(low, 1), tl.min(high, 1)), 0.0)
    most = tl.maximum(tl.maximum(tl.max(low, 1), tl.max(high, 1)), 0.0)
    # Divide each first: the difference of two finite numbers may be infinite.
    scale = most * (1.0 / 15.0) - least * (1.0 / 15.0)
    scale = tl.where(usable, scale, tl.where(size < LEAST, 0.0, size))
    bits = scale.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x3FFFF + ((bits >> 19) & 1)) >> 19) << 19  # four bits of mantissa
    rounded = tl.where(scale != scale, 0x7FC00000, rounded)
    divisor = tl.where(usable, rounded.to(tl.float32, bitcast=True), 1.0)
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    inverse = tl.where(usable, inverse, 0.0)
    zero = tl.minimum(nearest(tl.where(usable, -least * inverse, 0.0)), 15.0)
    low = nearest(tl.where(usable[:, None], low * inverse[:, None], 0.0)) + zero[:, None]
    high = nearest(tl.where(usable[:, None], high * inverse[:, None], 0.0)) + zero[:, None]
    low, high = tl.clamp(low, 0.0, 15.0).to(tl.int32), tl.clamp(high, 0.0, 15.0).to(tl.int32)
    return low, high, (rounded >> 15) | zero.to(tl.int32)
