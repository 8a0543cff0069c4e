"""Load keys and values of the paged cache in any format, as operands of tensor cores.

A vector is K or V of one token and KV head; kernels/kv_rounding.py defines the formats. Vectors of
few bits are loaded as their integers (or small floats), which are exact in bf16 and fp16. A
vector's scale is applied to its column of scores, or to its weight, so that one multiplication
suffices for the whole vector.

Products are computed in the dtype of the queries with fp32 sums; fp32 without TF32. In the split
kernel, with bf16 queries and bytes in the cache, they are computed in fp16, to which bytes are
converted by a third of the instructions; in the prefill kernel that took a fifth more time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from kvik.kernels.triton.words import INTERPRETED, plus

KINDS: Mapping[torch.dtype, str] = {
    torch.float32: "float",
    torch.bfloat16: "float",
    torch.float16: "float",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.uint8: "int4",
}


def kind_of(cache: torch.Tensor) -> str:
    """Return the kernels' name for the format of a cache.

    It is "fp8 bits" if the GPU cannot convert fp8 itself: before compute capability 8.9.
    """
    if cache.device.type != "cuda":
        return kind_on((0, 0), cache.dtype)
    return kind_on(torch.cuda.get_device_capability(cache.device), cache.dtype)


def kind_on(capability: tuple[int, int], cache: torch.dtype) -> str:
    """See `kind_of`."""
    kind = KINDS[cache]
    return "fp8 bits" if kind == "fp8" and capability < (8, 9) else kind


def stored(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as an argument of kernels: fp8 as bytes, since older GPUs lack pointers to
    fp8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def operand(x, DTYPE: tl.constexpr):
    """Convert x to a factor of `product`."""
    if INTERPRETED:
        wide = x.to(tl.float32)
        if tl.bfloat16 == DTYPE:
            wide = wide.to(tl.bfloat16).to(tl.float32)
        elif tl.float16 == DTYPE:
            wide = wide.to(tl.float16).to(tl.float32)
    else:
        wide = x.to(DTYPE)
    return wide


@triton.constexpr_function
def factor_type(dtype, kind):
    """Return the type of factors of `product` for queries of a type and a cache of a kind."""
    return tl.float16 if dtype == tl.bfloat16 and kind in ("fp8", "int8") else dtype


@triton.jit
def query_factors(x, KIND: tl.constexpr):
    """Convert queries to factors of `product`, with the largest of fp16 for what exceeds it."""
    TYPE: tl.constexpr = factor_type(x.dtype, KIND)
    if x.dtype != TYPE:
        x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return operand(x, TYPE)


FROM_FP8 = tl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# 1024 + 128 + x from its bits, exact: x + 128 is the low end of the mantissa of 1024.
FROM_INT8 = tl.constexpr("""{
.reg .b32 raised, ones, base;
xor.b32 raised, $2, 0x80808080;
mov.b32 ones, 0x64646464;
mov.b32 base, 0x64806480;
prmt.b32 $0, raised, ones, 0x4140;
prmt.b32 $1, raised, ones, 0x4342;
sub.f16x2 $0, $0, base;
sub.f16x2 $1, $1, base;
}""")


@triton.jit
def widened(x, KIND: tl.constexpr, IN_ROWS: tl.constexpr):
    """Convert bytes to fp16, four at a time.

    Args:
        IN_ROWS: before the numbers are rearranged for the product, as the compiler moves no
            instruction with effects. Values need this: their columns in shared memory would be read
            byte by byte.
    """
    CODE: tl.constexpr = FROM_FP8 if KIND == "fp8" else FROM_INT8
    return tl.inline_asm_elementwise(
        CODE, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=not IN_ROWS, pack=4
    )


@triton.jit
def product(a, b, total):
    """total + a b, with sums in fp32; total may be None."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def vectors_at(
    table, at, place, head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return the location of the vectors at a sequence's places: ([n] block, [n] vector in it),
    uint32.

    With unsigned numbers, quotients are shifts, and one multiplication of 32 by 32 bits gives the
    pointer to each block. For whole tiles of whole blocks the second result is the same in every
    tile, and stays in registers that hold pointers anyway.

    Args:
        table: the sequence's row of the block table.
        at: the first place of the tile. place: [n] >= 0, where the sequence has keys.
        ALIGNED: the tile has places at + 0 .. n - 1, and begins with a block.
    """
    if ALIGNED:
        table += at // BLOCK_SIZE
        place = tl.arange(0, place.shape[0])
    i = place.to(tl.uint32)
    block = tl.load(table + i // BLOCK_SIZE).to(tl.uint32)
    return block, i % BLOCK_SIZE * KV_HEADS + head


@triton.jit
def load_scales(k_scales, v_scales, vectors, head, KIND: tl.constexpr, KV_HEADS: tl.constexpr):
    """Load the scales, [n] fp32, and zero points of four bits, [n] int8, of keys and of values.

    Scales have 16 bits, but copies to shared memory ahead of use have at least 32, so each scale is
    loaded with its neighbour. Keys and values share one load of at least as many numbers as there
    are threads, because Triton would spread a smaller load over the layout of the scores, in which
    many threads load the same number.
    """
    pairs = k_scales.to(tl.pointer_type(tl.int32))
    apart = (v_scales.to(tl.int64) - k_scales.to(tl.int64)) // 4
    side = tl.arange(0, 2)[None, :] * apart
    words = tl.load(pairs + ((vectors >> 1).to(tl.int64)[:, None] + side))
    odd = head & 1 if KV_HEADS % 2 == 0 else (vectors & 1)[:, None]
    words = (words >> (odd * 16).to(tl.int32)) & 0xFFFF
    if KIND == "int4":
        scales = ((words & 0xFFF0) << 15).to(tl.float32, bitcast=True)
    else:  # bf16 is the upper half of fp32
        scales = (words << 16).to(tl.float32, bitcast=True)
    if KIND == "fp8 bits":  # see load_vectors
        scales *= 256.0
    k_scale, v_scale = tl.split(scales)
    k_zero, v_zero = tl.split((words & 15).to(tl.int8))
    return k_scale, k_zero, v_scale, v_zero


@triton.jit
def load_vectors(
    cache, block, within, zero,
    DTYPE: tl.constexpr, KIND: tl.constexpr, BLOCK_VECTORS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, IN_ROWS: tl.constexpr = False,
):  # fmt: skip
    """Load [n, BLOCK_D] numbers as operands, without their scale; 0 after HEAD_DIM.

    Args:
        zero: see `load_scales`. IN_ROWS: see `widened`.
    """
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KIND == "int4" else HEAD_DIM
    BLOCK: tl.constexpr = BLOCK_D // 2 if KIND == "int4" else BLOCK_D
    d = tl.arange(0, BLOCK)
    at = cache + (within * WIDTH)[:, None] + d[None, :]
    at += block.to(tl.int64)[:, None] * (BLOCK_VECTORS * WIDTH)
    x = tl.load(at) if WIDTH == BLOCK else tl.load(at, mask=(d < WIDTH)[None, :], other=0)
    if KIND == "int4":
        if tl.bfloat16 == DTYPE:
            # 128 + q from its bits, exact: q is the low end of the mantissa of 128.
            both = ((x.to(tl.int32) * 0x1001) & 0x000F000F) | 0x43004300
            low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
            high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            beyond = (-128 - zero.to(tl.int32)).to(tl.float32).to(tl.bfloat16)
            x = plus(tl.interleave(low, high), beyond[:, None])
        else:
            low, high = (x & 15).to(tl.int8), (x >> 4).to(tl.int8)
            x = tl.interleave(low, high) - zero[:, None]
        if HEAD_DIM != BLOCK_D:
            x = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], x, 0)
    elif tl.float16 == DTYPE and (KIND == "fp8" or KIND == "int8") and not INTERPRETED:  # noqa: PLR1714
        x = widened(x, KIND, IN_ROWS)
    elif KIND == "fp8":
        x = x.to(tl.float8e4nv, bitcast=True)
        if tl.bfloat16 == DTYPE:
            # fp8 is converted to fp16 first. The instruction from fp16 to bf16 has a quarter of the
            # rate or less; conversions to fp32, and of pairs of fp32 to bf16, are fast.
            x = x.to(tl.float32)
    elif KIND == "fp8 bits":
        # At the positions of sign, exponent and mantissa of fp16, the bits mean 1/256 of their
        # value, denormals included.
        word = x.to(tl.uint16)
        x = (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return operand(x, DTYPE)
