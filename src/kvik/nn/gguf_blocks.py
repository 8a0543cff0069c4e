"""Blocks of GGUF tensors, of neighbouring weights that share a scale: their values, and the format
of a layer that is stored in them.

Rows are the bytes of the file, [rows, bytes of a row]. The layouts are described in ggml's
ggml-common.h. All arithmetic is in the order of the format's reference implementation, so that
values agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.gguf.types import BLOCK_TYPES
from kvik.kernels.weights import (
    SYMMETRIC_ZERO,
    Weight,
    float_weight,
    int4_min_weight,
    int4_weight,
    int8_weight,
    mxfp4_weight,
    table_weight,
)
from kvik.nn.formats.base import LinearShape, OutputAxis, Shapes, StoredTensor
from kvik.nn.formats.bits import pack_nibbles
from kvik.nn.formats.compressed_tensors import WEIGHT
from kvik.nn.formats.fp4 import powers_of_two
from kvik.nn.formats.integers import finite
from kvik.nn.safetensors import TORCH_DTYPES
from kvik.spec.stored_weights import StoredScheme
from kvik.spec.weights import loaded_kind


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The unpacked fields of blocks: w = code * scale, or w = code * scale - minimum."""

    # [rows, weights]; int8 around 0, or uint8 from 0 if there are minima. Those of IQ4 are uint8
    # and stand for the numbers of a table.
    codes: Tensor
    scales: Tensor  # [rows, groups] fp32; a group is the neighbouring weights that share a scale
    minima: Tensor | None = None  # [rows, groups] fp32; None: none

    def weights(self) -> Tensor:
        """[rows, weights] fp32."""
        groups = self.codes.view(*self.scales.shape, -1).float()
        groups *= self.scales[..., None]
        if self.minima is not None:
            groups -= self.minima[..., None]
        return groups.view(self.codes.shape)


def block_parts(type: str, rows: Tensor) -> BlockParts:
    """Unpack rows [rows, bytes] uint8 of an integer type, which MXFP4 is not."""
    return _PARTS[type](_blocks(type, rows))


def mxfp4_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [rows, bytes] uint8 of MXFP4 -> codes of E2M1 [rows, weights] and powers of two (E8M0)
    [rows, groups], uint8."""
    blocks = _blocks("MXFP4", rows)
    return _nibbles(blocks[..., 1:], 16).flatten(1), blocks[..., 0]


def mxfp4_rows(codes: Tensor, powers: Tensor) -> Tensor:
    """Undo `mxfp4_parts`."""
    low, high = codes.view(*powers.shape, 2, 16).unbind(2)
    return torch.cat((powers[..., None], low | high << 4), -1).flatten(1)


def unpermute_rotary(rows: Tensor, head_dim: int) -> Tensor:
    """Return rows of queries or keys of a llama file in the order of checkpoints.

    Args:
        rows: [whole heads * head_dim, ...]: bytes, weights, or a bias.
    """
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def permute_rotary(rows: Tensor, head_dim: int) -> Tensor:
    """Return rows [whole heads * head_dim, ...] of a checkpoint in the order of a file."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


FLOAT_TYPES = {name: TORCH_DTYPES[name] for name in ("F32", "F16", "BF16")}


def _blocks(type: str, rows: Tensor) -> Tensor:
    """Return [rows, blocks, bytes of a block]."""
    return rows.reshape(len(rows), -1, BLOCK_TYPES[type].size)


def _numbers(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at a byte of each block: [rows, blocks, 1] fp32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _bits(data: Tensor, width: int, bits: int) -> Tensor:
    """Fields of `bits` bits: each `width` bytes hold first the low fields of all of them, then the
    next ones. data [..., bytes] -> [..., bytes * 8 / bits] uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    fields = data.reshape(*data.shape[:-1], -1, 1, width) >> shifts
    return (fields & (1 << bits) - 1).flatten(-3)


def _nibbles(data: Tensor, width: int) -> Tensor:
    return _bits(data, width, 4)


def _around(middle: int, codes: Tensor, scales: Tensor) -> BlockParts:
    """Return the parts of codes [rows, blocks, weights] uint8 whose zero is `middle`."""
    return BlockParts((codes.view(torch.int8) - middle).flatten(1), scales.flatten(1))


def _above(codes: Tensor, scales: Tensor, minima: Tensor) -> BlockParts:
    return BlockParts(codes.flatten(1), scales.flatten(1), minima.flatten(1))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of the eight groups of a block of Q4_K or Q5_K: [rows, blocks, 8]
    fp32.

    Both are six-bit codes times a scale of the block. The codes are in twelve bytes from byte 4:
    four bytes for scales 0-3 and four for minima 0-3, which also hold, in their top two bits, the
    high bits of 4-7; then four bytes with the low four bits of scales and minima 4-7.
    """
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return _numbers(blocks, 0) * scales.float(), _numbers(blocks, 2) * minima.float()


def _fifth_bits(data: Tensor) -> Tensor:
    """Four bytes -> [..., 32] bits, lowest first."""
    return _bits(data, 1, 1)


def _q8_0(blocks: Tensor) -> BlockParts:
    return _around(0, blocks[..., 2:].contiguous(), _numbers(blocks, 0))


def _q4_0(blocks: Tensor) -> BlockParts:
    return _around(8, _nibbles(blocks[..., 2:], 16), _numbers(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockParts:
    return _above(_nibbles(blocks[..., 4:], 16), _numbers(blocks, 0), -_numbers(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockParts:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6]) << 4
    return _around(16, codes, _numbers(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockParts:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8]) << 4
    return _above(codes, _numbers(blocks, 0), -_numbers(blocks, 2))


def _q2_k(blocks: Tensor) -> BlockParts:
    packed = blocks[..., :16]
    scales = _numbers(blocks, 80) * (packed & 15).float()
    minima = _numbers(blocks, 82) * (packed >> 4).float()
    return _above(_bits(blocks[..., 16:80], 32, 2), scales, minima)


def _q3_k(blocks: Tensor) -> BlockParts:
    codes = _bits(blocks[..., 32:96], 32, 2) | _bits(blocks[..., :32], 32, 1) << 2
    packed = _nibbles(blocks[..., 96:104], 8) | _bits(blocks[..., 104:108], 4, 2) << 4
    return _around(4, codes, _numbers(blocks, 108) * (packed.view(torch.int8) - 32).float())


def _q4_k(blocks: Tensor) -> BlockParts:
    return _above(_nibbles(blocks[..., 16:], 32), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> BlockParts:
    codes = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 32, 1) << 4
    return _above(codes, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> BlockParts:
    codes = _nibbles(blocks[..., :128], 64) | _bits(blocks[..., 128:192], 32, 2) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _around(32, codes, _numbers(blocks, 208) * scales)


def _iq4_nl(blocks: Tensor) -> BlockParts:
    codes = _nibbles(blocks[..., 2:], 16)
    return BlockParts(codes.flatten(1), _numbers(blocks, 0).flatten(1))


def _iq4_xs(blocks: Tensor) -> BlockParts:
    """The scales of eight groups have their low four bits from byte 4 on, two to a byte, and their
    high two bits from byte 2 on, four to a byte."""
    codes = _nibbles(blocks[..., 8:], 16)
    scales = _nibbles(blocks[..., 4:8], 1) | _bits(blocks[..., 2:4], 1, 2) << 4
    scales = _numbers(blocks, 0) * (scales.view(torch.int8) - 32).float()
    return BlockParts(codes.flatten(1), scales.flatten(1))


_PARTS: Mapping[str, Callable[[Tensor], BlockParts]] = {
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
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


class Blocks:
    """weight [outputs, bytes of a row]: blocks of the type that the layout names."""

    unread = ()

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """
        Raises:
            ValueError: the layer cannot be stored like this.
        """
        self.type = BLOCK_TYPES[scheme.layout]
        if shape.inputs % self.type.weights:
            raise ValueError(f"its {shape.inputs} inputs do not fill blocks of {self.type.weights}")
        self.shape = shape
        self.loaded = loaded_kind(scheme, shape.inputs)

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        size = (self.shape.outputs, self.type.row_bytes(self.shape.inputs))
        reason = f"{self.type.name}, in bytes"
        return {WEIGHT: StoredTensor(size, torch.uint8, OutputAxis(), in_runs=True, because=reason)}

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        if self.type.name == "MXFP4":
            codes, powers = map(self.shape.ordered, mxfp4_parts(tensors[WEIGHT][rows]))
            return mxfp4_weight(pack_nibbles(codes), powers_of_two(WEIGHT, powers))
        parts = block_parts(self.type.name, tensors[WEIGHT][rows])
        if self.shape.columns:
            parts = BlockParts(
                self.shape.ordered(parts.codes),
                self.shape.ordered(parts.scales),
                None if parts.minima is None else self.shape.ordered(parts.minima),
            )
        scales, minima, loaded = finite(WEIGHT, parts.scales), parts.minima, self.loaded
        if minima is not None:
            finite(WEIGHT, minima)
        if loaded is None:
            return float_weight(parts.weights())
        if loaded.codes == "iq4":
            return table_weight("iq4", pack_nibbles(parts.codes), scales, loaded.group)
        if loaded.bits == 8:
            scales = scales if loaded.group else scales[:, 0]
            return int8_weight(parts.codes, scales, loaded.activations != "float", loaded.group)
        if minima is not None:
            return int4_min_weight(pack_nibbles(parts.codes), scales, minima, loaded.group)
        codes = (parts.codes + SYMMETRIC_ZERO).view(torch.uint8)
        return int4_weight(pack_nibbles(codes), scales, None, loaded.group)
