"""The values of GGUF tensors: blocks of neighbouring weights that share a scale.

Rows are bytes [rows, bytes of a row] as they lie in the file. The layouts are described in ggml's
ggml-common.h. Every sum and product is done in the order of the format's reference implementation,
so that values agree to the last bit.

`split_*` take blocks apart into the codes and scales that kernels want, without making weights of
them; `dequantize` makes the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvik.gguf.types import BLOCK_TYPES

SUPER = 256  # weights of a block of the "K" types, which has smaller ones inside


def dequantize(type: str, rows: Tensor) -> Tensor:
    """rows [rows, bytes] uint8 of a type -> [rows, weights] fp32."""
    return _DEQUANTIZE[type](rows)


def quantize(type: str, weights: Tensor) -> Tensor:
    """weights [rows, inputs] of whole blocks, any float dtype -> rows [rows, bytes] uint8.

    Types: F32, F16, BF16, Q8_0, Q4_0.
    """
    return _QUANTIZE[type](weights)


def split_q8_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """-> values [rows, weights] int8, scales [rows, weights / 32] fp16; w = value * scale."""
    blocks = _blocks("Q8_0", rows)
    values = blocks[..., 2:].contiguous().view(torch.int8)
    return values.flatten(1), _halves(blocks, 0).squeeze(-1)


def split_q4_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """-> codes [rows, weights / 2] uint8, scales [rows, weights / 32] fp16.

    w = (code - 8) * scale; two codes to a byte, the low half is the even weight.
    """
    blocks = _blocks("Q4_0", rows)
    return _pairs(_nibbles(blocks[..., 2:], 16)), _halves(blocks, 0).squeeze(-1)


def split_q4_k(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> codes [rows, weights / 2] uint8, scales and minima [rows, weights / 32] fp32.

    w = code * scale - minimum; two codes to a byte, the low half is the even weight.
    """
    blocks = _blocks("Q4_K", rows)
    scales, minima = _k_scales(blocks)
    return _pairs(_nibbles(blocks[..., 16:], 32)), scales.flatten(1), minima.flatten(1)


def split_q6_k(rows: Tensor) -> tuple[Tensor, Tensor]:
    """-> values [rows, weights] int8 in -32..31, scales [rows, weights / 16] fp32.

    w = value * scale.
    """
    blocks = _blocks("Q6_K", rows)
    low = _nibbles(blocks[..., :128], 64)
    high = _bits(blocks[..., 128:192], 32, 2)
    values = (low | high << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return values.flatten(1), (_floats(blocks, 208) * scales).flatten(1)


def unpermute_rotary(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys of a llama file, in the order of checkpoints.

    Args:
        rows: [whole heads * head_dim, ...]: bytes, weights, or a bias.
    """
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def permute_rotary(rows: Tensor, head_dim: int) -> Tensor:
    """The other way: rows [whole heads * head_dim, ...] of a checkpoint in the order of a file."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _blocks(type: str, rows: Tensor) -> Tensor:
    """[rows, blocks, bytes of a block]"""
    return rows.reshape(len(rows), -1, BLOCK_TYPES[type].size)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block: [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _floats(blocks: Tensor, at: int) -> Tensor:
    """The same, as fp32."""
    return _halves(blocks, at).float()


def _bits(data: Tensor, width: int, bits: int) -> Tensor:
    """Fields of `bits` bits: each `width` bytes hold first the low fields of all of them, then the
    next ones. data [..., bytes] -> [..., bytes * 8 / bits] uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    fields = data.reshape(*data.shape[:-1], -1, 1, width) >> shifts
    return (fields & (1 << bits) - 1).flatten(-3)


def _nibbles(data: Tensor, width: int) -> Tensor:
    return _bits(data, width, 4)


def _pairs(codes: Tensor) -> Tensor:
    """codes [rows, blocks, weights] -> [rows, weights / 2] with neighbours in a byte."""
    flat = codes.flatten(1)
    return flat[:, ::2] | flat[:, 1::2] << 4


def _unpaired(pairs: Tensor, group: int) -> Tensor:
    """[rows, weights / 2] -> [rows, groups, group] fp32."""
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1)
    return codes.view(len(pairs), -1, group).float()


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the eight groups of a block of Q4_K or Q5_K: [rows, blocks, 8] fp32.

    Both are six bits times a number of the block. Twelve bytes from byte 4 on hold them: the first
    four scales, the first four minima, each with two high bits of a later one above, then the low
    halves of the later ones.
    """
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return _floats(blocks, 0) * scales.float(), _floats(blocks, 2) * minima.float()


def _f32(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.float32)


def _f16(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.float16).float()


def _bf16(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.bfloat16).float()


def _q8_0(rows: Tensor) -> Tensor:
    values, scales = split_q8_0(rows)
    groups = values.view(len(rows), -1, 32).float()
    return groups.mul_(scales.float()[..., None]).flatten(1)


def _q4_0(rows: Tensor) -> Tensor:
    codes, scales = split_q4_0(rows)
    return (_unpaired(codes, 32).sub_(8) * scales.float()[..., None]).flatten(1)


def _q4_1(rows: Tensor) -> Tensor:
    blocks = _blocks("Q4_1", rows)
    codes = _nibbles(blocks[..., 4:], 16).float()
    return (codes * _floats(blocks, 0) + _floats(blocks, 2)).flatten(1)


def _q5_0(rows: Tensor) -> Tensor:
    blocks = _blocks("Q5_0", rows)
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6]) << 4
    return ((codes.float() - 16) * _floats(blocks, 0)).flatten(1)


def _q5_1(rows: Tensor) -> Tensor:
    blocks = _blocks("Q5_1", rows)
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8]) << 4
    return (codes.float() * _floats(blocks, 0) + _floats(blocks, 2)).flatten(1)


def _fifth_bits(data: Tensor) -> Tensor:
    """32 bits in four bytes, the first weight's lowest: [..., 32]."""
    return _bits(data, 1, 1)


def _q2_k(rows: Tensor) -> Tensor:
    blocks = _blocks("Q2_K", rows)
    packed = blocks[..., :16]
    scales = _floats(blocks, 80) * (packed & 15).float()
    minima = _floats(blocks, 82) * (packed >> 4).float()
    codes = _bits(blocks[..., 16:80], 32, 2).unflatten(-1, (16, 16)).float()
    return (codes * scales[..., None] - minima[..., None]).flatten(1)


def _q3_k(rows: Tensor) -> Tensor:
    blocks = _blocks("Q3_K", rows)
    low = _bits(blocks[..., 32:96], 32, 2)
    high = _bits(blocks[..., :32], 32, 1)  # 0: four less
    codes = low.view(torch.int8) - (high.view(torch.int8) ^ 1) * 4
    packed = _nibbles(blocks[..., 96:104], 8) | _bits(blocks[..., 104:108], 4, 2) << 4
    scales = _floats(blocks, 108) * (packed.view(torch.int8) - 32).float()
    return (codes.unflatten(-1, (16, 16)).float() * scales[..., None]).flatten(1)


def _q4_k(rows: Tensor) -> Tensor:
    codes, scales, minima = split_q4_k(rows)
    return (_unpaired(codes, 32) * scales[..., None] - minima[..., None]).flatten(1)


def _q5_k(rows: Tensor) -> Tensor:
    blocks = _blocks("Q5_K", rows)
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 32, 1) << 4
    groups = codes.unflatten(-1, (8, 32)).float()
    return (groups * scales[..., None] - minima[..., None]).flatten(1)


def _q6_k(rows: Tensor) -> Tensor:
    values, scales = split_q6_k(rows)
    return (values.view(len(rows), -1, 16).float() * scales[..., None]).flatten(1)


_DEQUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _as_bytes(weights: Tensor) -> Tensor:
    return weights.contiguous().view(torch.uint8)


def _to_f32(weights: Tensor) -> Tensor:
    return _as_bytes(weights.float())


def _to_f16(weights: Tensor) -> Tensor:
    return _as_bytes(weights.to(torch.float16))


def _to_bf16(weights: Tensor) -> Tensor:
    return _as_bytes(weights.to(torch.bfloat16))


def _to_q8_0(weights: Tensor) -> Tensor:
    """Largest magnitude to 127, halves away from zero. The weights are divided by the scale before
    that is rounded to fp16, as the format's reference implementation does."""
    groups = _groups(weights)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    scaled = groups * _inverse(scales)
    whole = scaled.abs().floor()
    whole += (2 * (scaled.abs() - whole)).floor()
    return _stored(scales, (whole * scaled.sign()).to(torch.int8).view(torch.uint8))


def _to_q4_0(weights: Tensor) -> Tensor:
    """The weight of the largest magnitude to code 0, which is -8: the sign of the scale is
    chosen for that."""
    groups = _groups(weights)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = largest / -8
    codes = (groups * _inverse(scales) + 8.5).to(torch.uint8).clamp_(max=15)
    return _stored(scales, codes[..., :16] | codes[..., 16:] << 4)


def _groups(weights: Tensor) -> Tensor:
    return weights.float().reshape(len(weights), -1, 32)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


def _stored(scales: Tensor, codes: Tensor) -> Tensor:
    return torch.cat((_as_bytes(scales.to(torch.float16)), codes), dim=-1).flatten(1)


_QUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _to_f32,
    "F16": _to_f16,
    "BF16": _to_bf16,
    "Q8_0": _to_q8_0,
    "Q4_0": _to_q4_0,
}
