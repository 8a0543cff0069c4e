"""Weights of four or eight bits in words, unpacked in registers.

A word of 32 bits holds weights of one output; sixteen of its words hold 32 inputs in each of their
"planes" (four planes of four bits, two of eight). So a plane is unpacked with a shift and an AND
for two weights at once, into the register layout that tensor cores need. `packed.py` describes the
layout of the words.

Integers of four bits become 16 + q by bit operations: q is the upper mantissa of a number with the
exponent of 16. Small floats (E4M3, E2M1) become larger ones likewise, with an exponent that is
corrected afterwards.

Frantar et al. 2024, "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language
Models", section 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter stores bf16 as words, with which it cannot calculate.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Formats of words.
INT4 = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E2M1 = tl.constexpr(3)  # with scales that are powers of two
NVFP4 = tl.constexpr(4)  # E2M1 with other scales

# What a group has in addition to its scale.
NO_OFFSET = tl.constexpr(0)
ZERO = tl.constexpr(1)
MINIMUM = tl.constexpr(2)


@triton.constexpr_function
def planes_of(FORMAT):
    """Return how many weights half of a word holds."""
    return 4 if FORMAT == INT4 or has_e2m1(FORMAT) else 2


@triton.constexpr_function
def has_e2m1(FORMAT):
    """Return whether codes are E2M1."""
    return FORMAT in (E2M1, NVFP4)


@triton.jit
def plus(w, number):
    """w + number, exact, in the dtype of w."""
    if INTERPRETED:
        return (w.to(tl.float32) + number.to(tl.float32)).to(w.dtype)
    return w + number


# The pair (1, 1) times $1, plus $2.
ADD_BF16 = tl.constexpr("""{
.reg .b32 ones;
mov.b32 ones, 0x3F803F80;
fma.rn.bf16x2 $0, $1, ones, $2;
}""")


@triton.jit
def plus_pairs(w, number):
    """w + number [BO, 1], exact. Neighbours in w are one word, and stay one."""
    number = tl.broadcast_to(number, w.shape)
    if INTERPRETED or w.dtype == tl.float32:
        return plus(w, number)
    # GPUs before Hopper cannot add pairs of bf16, only multiply and add.
    CODE: tl.constexpr = ADD_BF16 if w.dtype == tl.bfloat16 else "add.rn.f16x2 $0, $1, $2;"
    return tl.inline_asm_elementwise(CODE, "=r,r,r", [w, number], w.dtype, True, 2)


@triton.jit
def _times(w, number: tl.constexpr):
    """w * number, exact, in the dtype of w."""
    if INTERPRETED:
        wide = w.to(tl.float32)
        if w.dtype == tl.bfloat16:  # whose smallest numbers the interpreter loses
            wide = (w.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        return (wide * number).to(w.dtype)
    return w * number


@triton.jit
def _halves(both, dtype: tl.constexpr):
    """Split words into the two 16-bit numbers that each contains."""
    low, high = both.to(tl.int16), (both >> 16).to(tl.int16)
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def _and_or(bits, MASK: tl.constexpr, BITS: tl.constexpr):
    """(bits & MASK) | BITS, words.

    One instruction for all three operands. It allows only one constant, and the assembler does not
    move the other one to a register by itself.
    """
    if INTERPRETED:
        return (bits & MASK) | BITS
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [bits, MASK, BITS], tl.int32, True, 1
    )


@triton.jit
def _int4_plane(words, PLANE: tl.constexpr, dtype: tl.constexpr):
    """Return two tiles of 16 + q, of the weights in the lower and the upper halves of the words."""
    if dtype == tl.bfloat16:  # q goes to bits 3..6
        shifted = words << 3 if PLANE == 0 else words >> (4 * PLANE - 3)
        low, high = _halves(_and_or(shifted, 0x00780078, 0x41804180), dtype)
    elif dtype == tl.float16:  # q goes to bits 6..9
        shifted = words << (6 - 4 * PLANE) if PLANE < 2 else words >> (4 * PLANE - 6)
        low, high = _halves(_and_or(shifted, 0x03C003C0, 0x4C004C00), dtype)
    else:
        both = words >> (4 * PLANE)
        low, high = ((both & 15) + 16).to(dtype), (((both >> 16) & 15) + 16).to(dtype)
    return low, high


@triton.jit
def _int8_plane(words, PLANE: tl.constexpr, dtype: tl.constexpr):
    """Return two tiles, of bytes PLANE and PLANE + 2 of the words.

    For 16 bits, the lower seven bits and the sign bit become two numbers with an exponent at which
    the last bit of the mantissa is 1; their difference is exact. A conversion of an integer would
    take as long as eight such instructions.
    """
    if dtype == tl.float32:
        low = ((words << (24 - 8 * PLANE)) >> 24).to(tl.float32)
        high = ((words << (8 - 8 * PLANE)) >> 24).to(tl.float32)
    else:
        both = words >> 8 if PLANE else words
        if dtype == tl.bfloat16:  # 128 + the lower bits, and -128 or, with the sign bit, -256
            bits = _and_or(both, 0x007F007F, 0x43004300)
            sign = _and_or(both, 0x00800080, -0x3CFF3D00)
        else:  # 1024 + the lower bits, and -1024 or -1152
            bits = _and_or(both, 0x007F007F, 0x64006400)
            sign = _and_or(both, 0x00800080, -0x1BFF1C00)
        low, high = _halves(bits, dtype)
        low_sign, high_sign = _halves(sign, dtype)
        low, high = plus(low, low_sign), plus(high, high_sign)
    return low, high


@triton.jit
def _e4m3_plane(words, PLANE: tl.constexpr, dtype: tl.constexpr):
    """Return two tiles, of bytes PLANE and PLANE + 2 of the words. Their bits give numbers with too
    small an exponent, which a product with a power of two corrects exactly."""
    both = words << 8 if PLANE == 0 else words
    if dtype == tl.bfloat16:
        low, high = _halves(((both >> 4) & 0x07F007F0) | (both & -0x7FFF8000), dtype)
        low, high = _times(low, 2.0**120), _times(high, 2.0**120)
    elif dtype == tl.float16:
        low, high = _halves(((both >> 1) & 0x3F803F80) | (both & -0x7FFF8000), dtype)
        low, high = _times(low, 2.0**8), _times(high, 2.0**8)
    else:
        low, high = both << 16, both
        low = ((low >> 4) & 0x07F00000) | (low & -0x80000000)
        high = ((high >> 4) & 0x07F00000) | (high & -0x80000000)
        low = low.to(tl.float32, bitcast=True) * 2.0**120
        high = high.to(tl.float32, bitcast=True) * 2.0**120
    return low, high


@triton.jit
def _e2m1_plane(words, PLANE: tl.constexpr, dtype: tl.constexpr):
    """Return two tiles, of the weights in the lower and the upper halves of the words. As for E4M3,
    their bits give numbers with too small an exponent."""
    sign = words << (12 - 4 * PLANE)
    if dtype == tl.bfloat16:  # the rest goes to bits 6..8
        rest = words << (6 - 4 * PLANE) if PLANE < 2 else words >> (4 * PLANE - 6)
        low, high = _halves((rest & 0x01C001C0) | (sign & -0x7FFF8000), dtype)
        low, high = _times(low, 2.0**126), _times(high, 2.0**126)
    elif dtype == tl.float16:  # to bits 9..11
        rest = words << (9 - 4 * PLANE) if PLANE < 3 else words >> (4 * PLANE - 9)
        low, high = _halves((rest & 0x0E000E00) | (sign & -0x7FFF8000), dtype)
        low, high = _times(low, 2.0**14), _times(high, 2.0**14)
    else:  # to bits 22..24
        rest, low_sign = (words >> (4 * PLANE)) & 0x00070007, sign << 16
        low = ((rest & 7) << 22) | (low_sign & -0x80000000)
        high = ((rest >> 16) << 22) | (sign & -0x80000000)
        low = low.to(tl.float32, bitcast=True) * 2.0**126
        high = high.to(tl.float32, bitcast=True) * 2.0**126
    return low, high


@triton.jit
def plane_of(words, PLANE: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Unpack words [BO, 16] into two tiles [BO, 16] of `dtype`."""
    if FORMAT == INT4:
        low, high = _int4_plane(words, PLANE, dtype)
    elif FORMAT == INT8:
        low, high = _int8_plane(words, PLANE, dtype)
    elif has_e2m1(FORMAT):
        low, high = _e2m1_plane(words, PLANE, dtype)
    else:
        low, high = _e4m3_plane(words, PLANE, dtype)
    return low, high


@triton.jit
def _pairs(first, second, J: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Return plane J = 0..3 of 128 inputs as [BO, 16, 2]: 32 inputs in order."""
    if planes_of(FORMAT) == 4 or J < 2:
        low, high = plane_of(first, J, FORMAT, dtype)
    else:
        low, high = plane_of(second, J - 2, FORMAT, dtype)
    return tl.join(low, high)


@triton.jit
def weights_of(
    first, second, S: tl.constexpr, SPAN: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr
):
    """Return the weights of the S-th span of 128 inputs: [BO, SPAN]. Registers are only renamed
    here; nothing is moved."""
    BO: tl.constexpr = first.shape[0]
    if SPAN == 128:
        even = tl.join(
            _pairs(first, second, 0, FORMAT, dtype), _pairs(first, second, 2, FORMAT, dtype)
        )
        odd = tl.join(
            _pairs(first, second, 1, FORMAT, dtype), _pairs(first, second, 3, FORMAT, dtype)
        )
        w = tl.permute(tl.join(even, odd), (0, 3, 4, 1, 2))
    elif SPAN == 64:
        low = _pairs(first, second, 2 * S, FORMAT, dtype)
        w = tl.permute(tl.join(low, _pairs(first, second, 2 * S + 1, FORMAT, dtype)), (0, 3, 1, 2))
    elif SPAN == 32:
        w = _pairs(first, second, S, FORMAT, dtype)
    else:  # lower and upper halves of the words are separate groups
        words = first if (planes_of(FORMAT) == 4 or S < 4) else second
        plane: tl.constexpr = S // 2 % planes_of(FORMAT)
        low, high = plane_of(words, plane, FORMAT, dtype)
        w = low if S % 2 == 0 else high
    return tl.reshape(w, (BO, SPAN))


@triton.jit
def alike(number, SPAN: tl.constexpr):
    """Broadcast [BO, 1] to [BO, SPAN] in the layout of `weights_of`, so that products with both
    read the same x from shared memory."""
    BO: tl.constexpr = number.shape[0]
    plane = tl.broadcast_to(number, (BO, 16))
    w = tl.join(plane, plane)
    if SPAN == 128:
        w = tl.join(w, w)
        w = tl.permute(tl.join(w, w), (0, 3, 4, 1, 2))
    elif SPAN == 64:
        w = tl.permute(tl.join(w, w), (0, 3, 1, 2))
    elif SPAN == 16:
        w = plane
    return tl.reshape(w, (BO, SPAN))


@triton.jit
def fp16_pair(word):
    """Return the two fp16 numbers in the halves of a word, as fp32."""
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_scale(at, FORMAT: tl.constexpr):
    """Return scales of groups without zero points or minima, fp32. For E2M1 they are bytes (E8M0),
    and the smallest power of two is denormal in fp32."""
    scale = tl.load(at)
    if FORMAT == E2M1:
        bits = tl.maximum(scale.to(tl.int32) << 23, 1 << 22)
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def scale_and_zero(word):
    """Return the scale in a word, and the zero point in its four lowest bits."""
    return (word & -16).to(tl.float32, bitcast=True), word & 15
