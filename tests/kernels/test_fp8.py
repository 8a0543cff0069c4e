"""Eight-bit floats: clamped before the cast, with a scale per block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.kernels import fp8
from kvik.kernels.fp8 import (
    LARGEST,
    ROW,
    WHOLE,
    Block,
    fp8_scale,
    fp8_scales,
    round_fp8,
    unround_fp8,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS: list[Block] = [WHOLE, ROW, (1, 16), (8, 16), (0, 16), (5, 0)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def representable(dtype: torch.dtype) -> Tensor:
    """Return all finite numbers of a format, ascending, from their bits."""
    numbers = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_values_are_clamped_to_the_largest_number(dtype: torch.dtype, largest: float) -> None:
    assert LARGEST[dtype] == largest == torch.finfo(dtype).max
    assert float(representable(dtype).max()) == largest
    # A plain cast does not clamp.
    assert torch.tensor(57344.0 * 1.2).to(E5M2).float().isinf()
    beyond = torch.tensor([[largest * 1.2, -largest * 1.2]])
    ones = torch.tensor(1.0)
    assert round_fp8(beyond, ones, dtype, WHOLE).float().tolist() == [[largest, -largest]]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_against_a_double_loop(dtype: torch.dtype, block: Block, source: torch.dtype) -> None:
    values = (normal(19, 40) * torch.logspace(-3, 3, 40)).to(source)
    scales = fp8_scales(values, dtype, block)
    rounded = round_fp8(values, scales, dtype, block)
    back = unround_fp8(rounded, scales, block)
    assert rounded.dtype == dtype and rounded.shape == values.shape
    rows, columns = block[0] or 19, block[1] or 40
    assert scales.shape == (-(-19 // rows), -(-40 // columns))
    numbers = representable(dtype)
    for i in range(0, 19, rows):
        for j in range(0, 40, columns):
            part = values[i : i + rows, j : j + columns].float()
            scale = float(part.abs().max()) / LARGEST[dtype]
            assert scales[i // rows, j // columns].item() == pytest.approx(scale, rel=1e-6)
            exact = part.double() / scales[i // rows, j // columns]
            nearest = (numbers[:, None, None] - exact).abs().amin(0)
            found = rounded[i : i + rows, j : j + columns].double()
            # A quotient in fp32 may be on the other side of a tie.
            assert bool(((found - exact).abs() <= nearest + exact.abs() * 1e-6).all())
            expected = found * scales[i // rows, j // columns].double()
            torch.testing.assert_close(
                back[i : i + rows, j : j + columns].double(), expected, rtol=1e-6, atol=0
            )
            assert float(found.abs().max()) == LARGEST[dtype]


def test_calibrated_activations_are_scaled_and_clamped() -> None:
    """A scale of 1 would clamp at 448 and lose small numbers."""
    seen = normal(100, 16) * 1e4
    scale = fp8_scale(seen.abs().amax(), E4M3)
    assert scale.shape == () and scale.item() == pytest.approx(float(seen.abs().max()) / 448)
    back = unround_fp8(round_fp8(seen, scale, E4M3, WHOLE), scale, WHOLE)
    assert float((back - seen).norm() / seen.norm()) < 0.04
    beyond = seen.abs().amax() * 3 * torch.ones(1, 16)
    cut = unround_fp8(round_fp8(beyond, scale, E4M3, WHOLE), scale, WHOLE)
    torch.testing.assert_close(cut, beyond / 3)


def test_rounding_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = normal(37, 40)
    for block in BLOCKS:
        scales = fp8_scales(values, E4M3, block)
        whole = round_fp8(values, scales, E4M3, block)
        with monkeypatch.context() as patch:
            patch.setattr(fp8, "PIECE", 3 * 40)
            again = round_fp8(values, scales, E4M3, block)
        assert torch.equal(whole.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    values = normal(19, 40)
    values[18, 39] = bad
    for block in BLOCKS:
        with pytest.raises(ValueError, match="NaN or infinity"):
            fp8_scales(values, E4M3, block)
    with pytest.raises(ValueError, match="NaN or infinity"):
        fp8_scale(torch.tensor(bad), E5M2)


def test_zeros_are_kept_and_the_argument_is_unchanged() -> None:
    values = torch.zeros(4, 8)
    scales = fp8_scales(values, E4M3, ROW)
    assert torch.equal(scales, torch.ones(4, 1))
    values[1] = 3.0
    before = values.clone()
    round_fp8(values, scales, E4M3, ROW)
    assert torch.equal(values, before)
