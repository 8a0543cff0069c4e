"""Weights as blocks of GGUF files, read back by kvik and by the public package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from kvik.nn.gguf_quantize import quantize

WIDTH = 768  # three of the largest blocks
FLOATS = ("F32", "F16", "BF16")


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
