"""Blocks of GGUF files, to the last bit, against the public package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from kvik.gguf.types import BLOCK_TYPES
from kvik.nn.gguf_blocks import (
    dequantize,
    permute_rotary,
    quantize,
    split_q4_0,
    split_q4_k,
    split_q6_k,
    split_q8_0,
    unpermute_rotary,
)

WIDTH = 768  # three of the largest blocks
FLOATS = ("F32", "F16", "BF16")


def random_rows(type: str, rows: int = 9) -> Tensor:
    """Any bytes are blocks of some weights, scales that are no numbers among them."""
    draw = np.random.default_rng(BLOCK_TYPES[type].code)
    return torch.from_numpy(
        draw.integers(0, 256, (rows, BLOCK_TYPES[type].row_bytes(WIDTH)), dtype=np.uint8)
    )


def reference(type: str, rows: Tensor) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(rows.numpy(), GGMLQuantizationType[type])


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_sizes_are_those_of_the_public_package(type: str) -> None:
    known = BLOCK_TYPES[type]
    number = GGMLQuantizationType[type]
    assert known.code == number
    assert (known.weights, known.size) == quants.GGML_QUANT_SIZES[number]


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_the_same_bits(type: str) -> None:
    rows = random_rows(type)
    before = rows.clone()
    expected, found = reference(type, rows), dequantize(type, rows)
    assert found.dtype == torch.float32 and found.shape == (9, WIDTH)
    assert torch.equal(rows, before)
    numbers = ~np.isnan(expected)
    assert numbers.mean() > 0.5 and np.isnan(found.numpy()[~numbers]).all()
    assert np.array_equal(found.numpy()[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_rows_are_independent(type: str) -> None:
    """Runs of rows, and views of a buffer, as files are read."""
    rows = random_rows(type)
    whole = dequantize(type, rows).nan_to_num(7.0)
    wide = torch.cat((rows, rows), dim=1)[:, : rows.shape[1]]
    assert not wide.is_contiguous()
    assert torch.equal(dequantize(type, wide[2:5]).nan_to_num(7.0), whole[2:5])


def weights(seed: int = 0) -> Tensor:
    """With zeros, ties of both signs, halves, and magnitudes far apart."""
    w = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(seed))
    w[1] = 0.0
    w[2, :32] = torch.tensor([3.0, -3.0]).repeat(16)
    w[3] = (w[3] * 4).round() / 2
    w[4] *= 1e-6
    w[5] *= 1e4
    w[6, 5] = 127.0
    w[6, :5] = torch.tensor([0.5, 1.5, -0.5, -2.5, 126.5])
    w[7, :32] = torch.tensor([-8.0, 7.9, 7.5, 0.5]).repeat(8)
    return w


@pytest.mark.parametrize("type", [*FLOATS, "Q8_0", "Q4_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_to_the_same_bits(type: str, dtype: torch.dtype) -> None:
    w = weights().to(dtype)
    expected = quants.quantize(w.float().numpy(), GGMLQuantizationType[type]).view(np.uint8)
    found = quantize(type, w)
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), expected)


def test_q8_0_taken_apart() -> None:
    rows = quantize("Q8_0", weights())
    values, scales = split_q8_0(rows)
    assert (values.dtype, values.shape) == (torch.int8, (40, WIDTH))
    assert (scales.dtype, scales.shape) == (torch.float16, (40, WIDTH // 32))
    made = values.float() * scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(made, dequantize("Q8_0", rows))


def unpaired(pairs: Tensor) -> Tensor:
    """[rows, weights / 2] -> [rows, weights]; the low half is the even weight."""
    codes = torch.empty(len(pairs), 2 * pairs.shape[1])
    codes[:, 0::2] = (pairs & 15).float()
    codes[:, 1::2] = (pairs >> 4).float()
    return codes


def test_q4_0_taken_apart() -> None:
    rows = quantize("Q4_0", weights())
    pairs, scales = split_q4_0(rows)
    assert (pairs.dtype, pairs.shape) == (torch.uint8, (40, WIDTH // 2))
    assert (scales.dtype, scales.shape) == (torch.float16, (40, WIDTH // 32))
    made = (unpaired(pairs) - 8) * scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(made, dequantize("Q4_0", rows))


def finite_rows(type: str, places: tuple[int, ...]) -> Tensor:
    """Blocks whose fp16 numbers at these bytes are below 2."""
    rows = random_rows(type).view(9, -1, BLOCK_TYPES[type].size)
    for place in places:
        rows[..., place + 1] &= 0b10111111
    return rows.view(9, -1)


def test_q4_k_taken_apart() -> None:
    rows = finite_rows("Q4_K", (0, 2))
    pairs, scales, minima = split_q4_k(rows)
    assert (pairs.dtype, pairs.shape) == (torch.uint8, (9, WIDTH // 2))
    for part in (scales, minima):
        assert (part.dtype, part.shape) == (torch.float32, (9, WIDTH // 32))
    made = unpaired(pairs) * scales.repeat_interleave(32, dim=1)
    made -= minima.repeat_interleave(32, dim=1)
    assert np.array_equal(made.numpy(), reference("Q4_K", rows))


def test_q6_k_taken_apart() -> None:
    rows = finite_rows("Q6_K", (208,))
    values, scales = split_q6_k(rows)
    assert (values.dtype, values.shape) == (torch.int8, (9, WIDTH))
    assert (values.min(), values.max()) == (-32, 31)
    assert (scales.dtype, scales.shape) == (torch.float32, (9, WIDTH // 16))
    made = values.float() * scales.repeat_interleave(16, dim=1)
    assert np.array_equal(made.numpy(), reference("Q6_K", rows))


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_rows_of_rotary_positions(shape: tuple[int, ...]) -> None:
    """Pairs that are neighbours in a file are half a head apart in a checkpoint."""
    head = 8
    checkpoint = torch.arange(24 * 5).view(24, 5)[:, : 5 if len(shape) == 2 else 1].reshape(shape)
    file = torch.empty_like(checkpoint)
    for first in range(0, 24, head):
        for pair in range(head // 2):
            file[first + 2 * pair] = checkpoint[first + pair]
            file[first + 2 * pair + 1] = checkpoint[first + pair + head // 2]
    assert torch.equal(unpermute_rotary(file, head), checkpoint)
    assert torch.equal(permute_rotary(checkpoint, head), file)
    assert torch.equal(unpermute_rotary(file[8:], head), checkpoint[8:])  # whole heads in runs


def test_rows_of_blocks_are_put_in_order_too() -> None:
    rows = quantize("Q4_0", weights())
    ordered = dequantize("Q4_0", unpermute_rotary(rows, 20))
    assert torch.equal(ordered, unpermute_rotary(dequantize("Q4_0", rows), 20))
