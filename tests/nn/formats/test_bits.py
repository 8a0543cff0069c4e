"""Packed codes: round trips, and sizes that do not fit. `test_golden.py` has the layouts."""

from __future__ import annotations

import pytest
import torch
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvik.kernels.weights import int4_weight
from kvik.nn.formats.bits import (
    add_one,
    pack_awq,
    pack_nibbles,
    pack_stream,
    subtract_one,
    unpack_awq,
    unpack_nibbles,
    unpack_stream,
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


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_less_one_are_restored(bits: int) -> None:
    packed = pack_stream(codes(5, 32, bits), bits)
    assert torch.equal(add_one(subtract_one(packed, bits), bits), packed)


def test_a_zero_point_of_zero_borrows_from_the_next() -> None:
    """As GPTQModel converts: qzeros -= 0x11111111."""
    stored = subtract_one(words([[0x00000010], [0x88888880], [0]]), 4)
    assert torch.equal(stored, words([[0xEEEEEEFF], [0x7777776F], [0xEEEEEEEF]]))


@pytest.mark.full
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30))
def test_round_trips_in_words_and_bytes(rows: int, columns: int, seed: int) -> None:
    nibbles = codes(rows, 2 * columns, 4, seed)
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles)), nibbles)
    eights = codes(8 * rows, columns, 4, seed)
    assert torch.equal(unpack_awq(pack_awq(eights)), eights)
    for bits in range(2, 9):
        for count in (32 * columns, columns):
            q = codes(rows, count, bits, seed)
            packed = pack_stream(q, bits)
            assert packed.shape == (rows, -(-count * bits // 32)) and packed.dtype == torch.int32
            assert torch.equal(unpack_stream(packed, bits, count), q)


def test_sizes_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(ValueError, match="3 inputs"):
        pack_nibbles(codes(2, 3, 4))
    with pytest.raises(ValueError, match="12 outputs"):
        pack_awq(codes(12, 4, 4))
