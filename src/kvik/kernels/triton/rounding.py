"""Vectors of K and V in few bits, to the bit as kernels/kv_rounding.py rounds them.

Everything is explicit: products are not fused with sums (launch with enable_fp_fusion=False),
divisions are IEEE's, and E4M3 and bfloat16 are made of the bits of fp32, so that Ampere, Hopper and
Triton's interpreter give the same. A vector lies in two tiles of equal shape, low [rows, half] and
high [rows, half], the halves that a rotation mixes; elements behind its end are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvik.kernels.kv_rounding import LEAST as _LEAST
from kvik.kernels.kv_rounding import MOST as _MOST

LEAST = tl.constexpr(_LEAST)
MOST = tl.constexpr(_MOST)


@triton.jit
def nearest(x):
    """Half to even, for |x| < 2^22: beyond 1.5 * 2^23 floats are integers."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def bf16_bits(x):
    """fp32 -> the bits of the nearest bfloat16, int32 in 0..65535."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded) & 0xFFFF


@triton.jit
def e4m3_bits(x):
    """fp32 in -448..448 -> the bits of the nearest float8_e4m3fn, int32 in 0..255."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three bits of mantissa, and an exponent that counts from -7 instead of -127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9 wide.
    small = nearest(size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    code = tl.where(size < 0x3C800000, small, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def vector_sizes(low, high):
    """The largest magnitude of each vector, NaN if one is in it: [rows] fp32."""
    size = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    nan = tl.max((low != low).to(tl.int32), 1) + tl.max((high != high).to(tl.int32), 1)
    return tl.where(nan > 0, float("nan"), size)


@triton.jit
def round_in_eight_bits(low, high, FP8: tl.constexpr):
    """-> codes of low and high, int32 [rows, half], and the bits of scales in bfloat16 [rows]."""
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
    """-> codes of low and high, int32 [rows, half] in 0..15, and words of scale and zero point."""
    size = vector_sizes(low, high)
    usable = (size >= LEAST) & (size <= MOST)
    least = tl.minimum(tl.minimum(tl.min(low, 1), tl.min(high, 1)), 0.0)
    most = tl.maximum(tl.maximum(tl.max(low, 1), tl.max(high, 1)), 0.0)
    # Each divided first: the difference of two finite numbers may be infinite.
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
