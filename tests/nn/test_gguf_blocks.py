"""Sizes of GGUF blocks, and the order of rows of rotary positions in files."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from kvik.gguf.types import BLOCK_TYPES
from kvik.nn.gguf_blocks import permute_rotary, unpermute_rotary


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_sizes_are_those_of_the_public_package(type: str) -> None:
    known = BLOCK_TYPES[type]
    number = GGMLQuantizationType[type]
    assert known.code == number
    assert (known.weights, known.size) == quants.GGML_QUANT_SIZES[number]


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
