"""Packed codes: known values of each layout, and round trips."""

from __future__ import annotations

import pytest
import torch
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvik.kernels.weights import int4_weight
from kvik.nn.formats import bits as packing
from kvik.nn.formats.bits import (
    add_one,
    pack_awq,
    pack_compressed,
    pack_compressed_zeros,
    pack_gptq,
    pack_gptq_zeros,
    pack_nibbles,
    subtract_one,
    unpack_awq,
    unpack_compressed,
    unpack_compressed_zeros,
    unpack_gptq,
    unpack_gptq_zeros,
    unpack_nibbles,
)


def codes(rows: int, columns: int, bits: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)


def words(values: list[list[int]]) -> Tensor:
    """Return unsigned words as int32."""
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def test_two_codes_to_a_byte() -> None:
    q = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(q).tolist() == [[0x21, 0x0F]]
    weight = int4_weight(pack_nibbles(q), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8), 4)
    assert weight.dequantized().tolist() == [[1.0, 2.0, 15.0, 0.0]]


def test_an_awq_word() -> None:
    """AutoAWQ's GEMM layout: outputs 0, 2, 4, 6, 1, 3, 5, 7 from the low bits up, and a row of
    words per input."""
    q = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 2)  # output o has the code o
    q[:, 1] += 8
    packed = pack_awq(q)
    assert packed.shape == (2, 1)
    assert torch.equal(packed, words([[0x75316420], [0xFDB9ECA8]]))


def test_a_gptq_word() -> None:
    """GPTQ: inputs 0..7 of one output from the low bits up, and a row of words per eight inputs."""
    q = torch.arange(16, dtype=torch.uint8)[None]
    assert torch.equal(pack_gptq(q, 4), words([[0x76543210], [0xFEDCBA98]]))
    assert torch.equal(pack_gptq(q & 3, 2), words([[0xE4E4E4E4]]))
    assert torch.equal(pack_gptq(q[:, :4] + 0xF0, 8), words([[0xF3F2F1F0]]))


def test_three_gptq_words_of_three_bits() -> None:
    """GPTQ's 3-bit layout: codes 10 and 21 span two words, with 2 + 1 and 1 + 2 bits."""
    for i in range(32):
        q = torch.zeros(1, 32, dtype=torch.uint8)
        q[0, i] = 0b101
        stream = 0b101 << 3 * i
        expected = [[stream >> 32 * word & 0xFFFFFFFF] for word in range(3)]
        assert torch.equal(pack_gptq(q, 3), words(expected))
    split = torch.zeros(1, 32, dtype=torch.uint8)
    split[0, 10], split[0, 21] = 0b101, 0b101
    # The low two bits at 30 and 31, then the high one; the low one at 31, then the high two.
    assert torch.equal(pack_gptq(split, 3), words([[1 << 30], [1 << 31 | 1], [0b10]]))


def test_gptq_zeros_are_packed_along_the_outputs() -> None:
    zeros = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 3)  # [outputs, groups]
    packed = pack_gptq_zeros(zeros, 4)
    assert torch.equal(packed, words([[0x76543210]] * 3))
    assert torch.equal(unpack_gptq_zeros(packed, 4), zeros)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_older_gptq_stores_zeros_less_one(bits: int) -> None:
    zeros = codes(32, 5, bits) | 1  # none is 0
    stored = subtract_one(pack_gptq_zeros(zeros, bits), bits)
    assert torch.equal(unpack_gptq_zeros(stored, bits), zeros - 1)
    any_zeros = codes(32, 5, bits)
    packed = pack_gptq_zeros(any_zeros, bits)
    assert torch.equal(add_one(subtract_one(packed, bits), bits), packed)


def test_a_zero_point_of_zero_borrows_from_the_next() -> None:
    """As GPTQModel converts: qzeros -= 0x11111111."""
    stored = subtract_one(words([[0x00000010], [0x88888880], [0]]), 4)
    assert torch.equal(stored, words([[0xEEEEEEFF], [0x7777776F], [0xEEEEEEEF]]))


def test_a_compressed_word() -> None:
    """compressed-tensors "pack-quantized": signed values plus 2^(bits-1), low bits first, the last
    word padded with zeros."""
    signed = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, 4, -1, 5]])
    q = (signed + 8).to(torch.uint8)
    assert torch.equal(pack_compressed(q, 4), words([[0xCBA9F810, 0x000000D7]]))
    # The format's own example: 1 and 2 in eight bits.
    assert pack_compressed(torch.tensor([[129, 130]], dtype=torch.uint8), 8).item() == 33409
    three = torch.full((1, 11), 7, dtype=torch.uint8)
    assert torch.equal(pack_compressed(three, 3), words([[2**32 - 1, 1]]))


def test_compressed_zeros_are_packed_along_the_outputs() -> None:
    zeros = codes(10, 3, 4)
    packed = pack_compressed_zeros(zeros, 4)
    assert packed.shape == (2, 3)
    assert packed[0, 1] & 0xF == zeros[0, 1] and packed[1, 2] >> 4 & 0xF == zeros[9, 2]
    assert torch.equal(unpack_compressed_zeros(packed, 4, 10), zeros)


@pytest.mark.full
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30))
def test_round_trips_in_words_and_bytes(rows: int, columns: int, seed: int) -> None:
    nibbles = codes(rows, 2 * columns, 4, seed)
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles)), nibbles)
    eights = codes(8 * rows, columns, 4, seed)
    assert torch.equal(unpack_awq(pack_awq(eights)), eights)
    for bits in range(2, 9):
        q = codes(rows, 32 * columns, bits, seed)
        packed = pack_gptq(q, bits)
        assert packed.shape == (columns * bits, rows) and packed.dtype == torch.int32
        assert torch.equal(unpack_gptq(packed, bits), q)
        ragged = codes(rows, columns, bits, seed)
        packed = pack_compressed(ragged, bits)
        assert packed.shape == (rows, -(-columns * bits // 32))
        assert torch.equal(unpack_compressed(packed, bits, columns), ragged)


def test_sizes_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(ValueError, match="3 inputs"):
        pack_nibbles(codes(2, 3, 4))
    with pytest.raises(ValueError, match="12 outputs"):
        pack_awq(codes(12, 4, 4))
    with pytest.raises(ValueError, match="16 codes of 3 bits"):
        pack_gptq(codes(2, 16, 3), 3)
    with pytest.raises(ValueError, match="6 codes of 4 bits"):
        pack_gptq_zeros(codes(6, 2, 4), 4)


def test_four_bits_take_half_a_byte() -> None:
    q = codes(16, 64, 4)
    for packed in (pack_nibbles(q), pack_awq(q), pack_gptq(q, 4), pack_compressed(q, 4)):
        assert packed.numel() * packed.itemsize == q.numel() // 2
    assert pack_gptq(codes(16, 64, 3), 3).numel() * 4 == 16 * 64 * 3 // 8
    assert len(packing.AWQ_ORDER) == packing.WORD // packing.AWQ_BITS
