"""Blocks of GGUF files decode to the bits of the public package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from kvik.gguf.types import BLOCK_TYPES
from kvik.kernels.weights import E2M1
from kvik.nn.gguf_blocks import (
    block_parts,
    mxfp4_parts,
    mxfp4_rows,
    permute_rotary,
    unpermute_rotary,
)

WIDTH = 768  # three of the largest blocks


def random_rows(type: str, rows: int = 9) -> Tensor:
    """Return random bytes, which are valid blocks, also with infinite scales."""
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


def assert_same_bits(found: Tensor, expected: np.ndarray) -> None:
    numbers = ~np.isnan(expected)
    assert numbers.mean() > 0.5 and np.isnan(found.numpy()[~numbers]).all()
    assert np.array_equal(found.numpy()[numbers].view(np.uint32), expected[numbers].view(np.uint32))


# The range of codes, and the number of weights that share a scale.
CODES = {
    "Q8_0": (-128, 127, 32),
    "Q4_0": (-8, 7, 32),
    "Q4_1": (0, 15, 32),
    "Q5_0": (-16, 15, 32),
    "Q5_1": (0, 31, 32),
    "Q2_K": (0, 3, 16),
    "Q3_K": (-4, 3, 16),
    "Q4_K": (0, 15, 32),
    "Q5_K": (0, 31, 32),
    "Q6_K": (-32, 31, 16),
}


@pytest.mark.parametrize("type", CODES)
def test_blocks_are_unpacked(type: str) -> None:
    low, high, group = CODES[type]
    rows = random_rows(type)
    before = rows.clone()
    parts = block_parts(type, rows)
    assert torch.equal(rows, before)
    assert parts.codes.shape == (9, WIDTH)
    assert (parts.codes.min(), parts.codes.max()) == (low, high)
    assert (parts.minima is None) == (low < 0)
    assert_same_bits(parts.weights(), reference(type, rows))
    # In runs of rows and views of a buffer, as files are read.
    wide = torch.cat((rows, rows), dim=1)[:, : rows.shape[1]]
    some = block_parts(type, wide[2:5])
    assert not wide.is_contiguous() and torch.equal(some.codes, parts.codes[2:5])
    for part, again in ((parts.scales, some.scales), (parts.minima, some.minima)):
        if part is not None and again is not None:
            assert (part.dtype, part.shape) == (torch.float32, (9, WIDTH // group))
            assert torch.equal(again.nan_to_num(7.0), part[2:5].nan_to_num(7.0))


def test_blocks_of_mxfp4_are_unpacked() -> None:
    rows = random_rows("MXFP4")
    codes, powers = mxfp4_parts(rows)
    values = torch.tensor(E2M1, dtype=torch.float64)[codes.int()] + 0.0  # the package has no -0
    made = torch.ldexp(values, powers.repeat_interleave(32, dim=1).int() - 127).float()
    assert_same_bits(made, reference("MXFP4", rows))
    assert torch.equal(mxfp4_rows(codes, powers), rows)


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_rows_of_rotary_positions(shape: tuple[int, ...]) -> None:
    """Adjacent pairs in a file are half a head apart in a checkpoint."""
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


def test_rows_of_blocks_are_reordered_too() -> None:
    rows = random_rows("Q4_0", rows=40)
    ordered = block_parts("Q4_0", unpermute_rotary(rows, 20)).codes
    assert torch.equal(ordered, unpermute_rotary(block_parts("Q4_0", rows).codes, 20))
