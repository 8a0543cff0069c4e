"""Weights as blocks of GGUF files, read back by kvik and by the public package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from helpers.gguf_files import dequantize
from torch import Tensor

from kvik.gguf.types import BLOCK_TYPES
from kvik.nn.gguf_export import SLICE, fit_above, fit_around, quantize

WIDTH = 768  # three of the largest blocks
SIMPLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")


def weights() -> Tensor:
    """Return weights with zeros, ties of both signs, halves, and very different magnitudes."""
    w = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    w[1] = 0.0
    w[2, :32] = torch.tensor([3.0, -3.0]).repeat(16)
    w[3] = (w[3] * 4).round() / 2
    w[4] *= 1e-6
    w[5] *= 1e4
    w[6, 5] = 127.0
    w[6, :5] = torch.tensor([0.5, 1.5, -0.5, -2.5, 126.5])
    w[7, :32] = torch.tensor([-8.0, 7.9, 7.5, 0.5]).repeat(8)
    return w


@pytest.mark.parametrize("type", SIMPLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_to_the_same_bits(type: str, dtype: torch.dtype) -> None:
    w = weights().to(dtype)
    expected = quants.quantize(w.float().numpy(), GGMLQuantizationType[type]).view(np.uint8)
    found = quantize(type, w)
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), expected)


def draws(shape: str) -> Tensor:
    """Return [64, 1024] weights: like most layers, with longer tails, or all positive."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(64, 1024, generator=generator)
    uniform = torch.rand(64, 1024, generator=generator)
    return {"normal": normal, "tails": normal / uniform.sqrt(), "positive": uniform + 1}[shape]


# |error| / |weights| of llama.cpp's quantiser (2026-11) on the same weights.
ERRORS = {
    "normal": (0.07132, 0.0361, 0.01766),
    "tails": (0.06896, 0.03981, 0.02325),
    "positive": (0.02208, 0.01108, 0.00989),
}


@pytest.mark.parametrize("shape", ERRORS)
def test_errors_are_those_of_llama_cpp(shape: str) -> None:
    w = draws(shape)
    for type, theirs in zip(K_QUANTS, ERRORS[shape], strict=True):
        error = dequantize(type, quantize(type, w)) - w
        assert error.norm() <= 1.005 * theirs * w.norm(), type


def hard_blocks() -> Tensor:
    """Return one block per row, hard cases for the search."""
    w = 0.02 * torch.randn(14, 256, generator=torch.Generator().manual_seed(3))
    w[0] = 0.0
    w[1] = 0.5
    w[2] = -0.5
    w[3, 7] = 100.0
    w[4, 7] = -100.0
    w[5] = torch.tensor([1.0, -1.0]).repeat(128)
    w[6, 32:] = 0.0
    w[7] = w[7].abs()
    w[8] = -w[8].abs()
    w[9, ::2] = 0.0
    w[10] *= 1e4
    w[11] = torch.arange(256) - 128.0
    w[12] = w[12].round(decimals=2)
    w[13] *= torch.logspace(-3, 0, 8).repeat_interleave(32)
    return w


@pytest.mark.parametrize(("type", "most"), [("Q4_K", 0.06), ("Q5_K", 0.03), ("Q6_K", 0.018)])
def test_no_weight_is_far_off(type: str, most: float) -> None:
    """Relative to the range of its block: half a step, and the rounding of group scales."""
    w = hard_blocks()
    found = dequantize(type, quantize(type, w))
    error = (found - w).abs().amax(-1)
    span = w.amax(-1).clamp(min=0) - w.amin(-1).clamp(max=0)
    assert (error <= most * span).all(), (error / span).tolist()
    assert torch.equal(found[0], w[0])
    assert dequantize(type, quantize(type, weights())).isfinite().all()


@pytest.mark.parametrize("type", K_QUANTS)
def test_every_code_and_every_scale_is_used(type: str) -> None:
    """Codes packed into too few bits would lose their highest values."""
    w = draws("normal") * torch.logspace(-2, 0, 32).repeat_interleave(32)
    rows = quantize(type, w)
    raw = rows.view(-1, BLOCK_TYPES[type].size)
    packed = raw[:, 192:208] if type == "Q6_K" else raw[:, 4:16]
    assert packed.unique().numel() > 60
    found = dequantize(type, rows)
    groups = 16 if type == "Q6_K" else 32
    used = max(len(group.unique()) for group in found.view(-1, groups))
    assert used > {"Q4_K": 12, "Q5_K": 20, "Q6_K": 13}[type]


@pytest.mark.parametrize("type", K_QUANTS)
def test_blocks_do_not_depend_on_each_other(type: str) -> None:
    """Also if a run is searched in slices."""
    w = torch.randn(SLICE // 1024 + 3, 1024, generator=torch.Generator().manual_seed(5))
    whole = quantize(type, w)
    assert whole.shape == (len(w), BLOCK_TYPES[type].row_bytes(1024))
    part = quantize(type, w[-5:])
    assert torch.equal(dequantize(type, whole[-5:]), dequantize(type, part))


@pytest.mark.parametrize("type", [*SIMPLE, *K_QUANTS])
def test_a_turned_matrix_has_the_same_bits(type: str) -> None:
    w = torch.randn(40, BLOCK_TYPES[type].weights, generator=torch.Generator().manual_seed(6))
    assert torch.equal(quantize(type, w.t().contiguous().t()), quantize(type, w))


def test_a_grid_is_recovered() -> None:
    """Groups on a grid have no error, for either sign of their largest weight."""
    codes = torch.arange(32).view(32, 1) % 16
    scales, minima = fit_above(codes * 0.25 - 1.5, 15, range(-10, 11))
    assert torch.allclose(scales, torch.tensor(0.25)) and torch.allclose(minima, torch.tensor(1.5))
    signed = torch.arange(-32, 32, 4).view(16, 1) * torch.tensor([0.5, -0.5])
    assert torch.allclose(fit_around(signed, 32, range(-9, 10)), torch.tensor([0.5, -0.5]))


def plain_fit(group: np.ndarray, most: int, tenths: range) -> tuple[float, float]:
    """Run the search of `fit_above` for one group in fp64, with a least-squares solver."""
    low, high = min(group.min(), 0.0), group.max()
    root = np.sqrt(np.abs(group) + np.sqrt(np.square(group).mean()))
    best, scale, minimum = np.inf, (high - low) / most, -low
    for tenth in tenths:
        step = (high + minimum) / (most + tenth / 10)
        codes = ((group + minimum) / step).round().clip(0, most)
        columns = np.stack((codes, -np.ones_like(codes)), axis=1) * root[:, None]
        slope, start = np.linalg.lstsq(columns, group * root, rcond=None)[0]
        if start < 0:
            slope, start = (root**2 * group * codes).sum() / (root**2 * codes**2).sum(), 0.0
        error = np.square((codes * slope - start - group) * root).sum()
        if error < best:
            best, scale, minimum = error, slope, start
    return scale, minimum


def test_the_fit_has_the_error_of_a_plain_search() -> None:
    """Bits differ from those of fp64: the error of all groups is at most 0.05 % larger."""
    groups = draws("tails").view(-1, 32)[:200].double()
    importance = groups.abs() + groups.square().mean(1, keepdim=True).sqrt()
    plain = torch.tensor([plain_fit(group, 15, range(-10, 11)) for group in groups.numpy()])
    fitted = torch.stack(fit_above(groups.float().t().contiguous(), 15, range(-10, 11)), dim=1)

    def error(found: Tensor) -> float:
        scales, minima = found.double().split(1, dim=1)
        codes = ((groups + minima) / scales).round().clamp(0, 15)
        return float((importance * (codes * scales - minima - groups).square()).sum())

    assert error(fitted) <= 1.0005 * error(plain)


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K"])
def test_bits_do_not_depend_on_the_number_of_threads(type: str) -> None:
    w = torch.randn(3 * SLICE // 1024 + 5, 1024, generator=torch.Generator().manual_seed(9))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(quantize(type, w))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
