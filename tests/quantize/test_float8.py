"""What the engine is given, and what is written, means what was found."""

from __future__ import annotations

import pytest
import torch

from kvik.kernels.fp8 import ROW, SQUARE, WHOLE, Block
from kvik.quantize.float8 import float8


@pytest.mark.parametrize("block", [ROW, WHOLE, SQUARE, (16, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_means_what_was_rounded(block: Block, dtype: torch.dtype) -> None:
    w = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    found = float8(w, block, dtype)
    assert torch.equal(found.scales, found.scales.to(dtype).float())
    assert torch.equal(found.weight().dequantized(), found.dequantised())
    # three digits behind the first, but for the smallest numbers
    off = (found.dequantised() - w).abs()
    assert bool((off <= w.abs() * 2**-4 + found.scales.max() * 2**-10 + 1e-9).all())


def test_weights_that_are_no_numbers() -> None:
    w = torch.ones(4, 8)
    w[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        float8(w)
