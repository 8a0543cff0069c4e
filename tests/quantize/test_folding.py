"""Scaling a layer's inputs and folding the inverse into what comes before changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm, silu

from kvik.quantize.factors import (
    fold_into_linear,
    fold_into_norm,
    kept_scales,
    scale_inputs,
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factors(inputs: int) -> Tensor:
    """Powers of two, by which floats are multiplied exactly."""
    return 2.0 ** (torch.arange(inputs) % 7 - 3).float()


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def scaled(w: Tensor, s: Tensor) -> Tensor:
    folded = scale_inputs(w.float(), s)
    assert torch.equal(folded, w.float() * s)
    return w * s


@pytest.mark.parametrize("bias", [True, False])
def test_into_a_norm(bias: bool) -> None:
    x, s = normal(5, 16, seed=0), factors(16)
    gain = normal(16, seed=1).float()
    shift = normal(16, seed=2).float() if bias else None
    w = normal(8, 16, seed=3)
    folded, folded_shift = fold_into_norm(gain, shift, s)
    assert folded.dtype == gain.dtype and (folded_shift is None) == (not bias)
    if shift is None or folded_shift is None:
        before = rms_norm(x, (16,), gain.double())
        after = rms_norm(x, (16,), folded.double())
    else:
        before = layer_norm(x, (16,), gain.double(), shift.double())
        after = layer_norm(x, (16,), folded.double(), folded_shift.double())
    same(linear(after, scaled(w, s)), linear(before, w))


@pytest.mark.parametrize("bias", [True, False])
def test_into_the_up_projection(bias: bool) -> None:
    x, s = normal(5, 12, seed=4), factors(16)
    gate, up, down = normal(16, 12, seed=5), normal(16, 12, seed=6).float(), normal(8, 16, seed=7)
    shift = normal(16, seed=8).float() if bias else None
    folded, folded_shift = fold_into_linear(up, shift, s)
    wide = None if shift is None else shift.double()
    wide_folded = None if folded_shift is None else folded_shift.double()
    before = silu(linear(x, gate)) * linear(x, up.double(), wide)
    after = silu(linear(x, gate)) * linear(x, folded.double(), wide_folded)
    same(linear(after, scaled(down, s)), linear(before, down))


def test_into_values_that_heads_share() -> None:
    """Two heads read each value head: kv head h serves the query heads 2h and 2h + 1."""
    tokens, kv_heads, head_dim = 5, 2, 4
    attention = normal(4, tokens, tokens, seed=9).softmax(-1)
    x, value = normal(tokens, 12, seed=10), normal(kv_heads * head_dim, 12, seed=11).float()
    out, s = normal(8, 4 * head_dim, seed=12), factors(kv_heads * head_dim)
    shared = s.view(kv_heads, 1, head_dim).expand(-1, 2, -1).reshape(-1)

    def attended(weight: Tensor) -> Tensor:
        v = linear(x, weight.double()).view(tokens, kv_heads, head_dim).transpose(0, 1)
        return (attention @ v.repeat_interleave(2, dim=0)).transpose(0, 1).reshape(tokens, -1)

    folded, _ = fold_into_linear(value, None, s)
    same(linear(attended(folded), scaled(out, shared)), linear(attended(value), out))


def test_dtypes_are_kept() -> None:
    weight, bias = torch.ones(4, 3).bfloat16(), torch.ones(4).half()
    folded, shift = fold_into_linear(weight, bias, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert folded.dtype == torch.bfloat16 and shift is not None and shift.dtype == torch.float16
    assert torch.equal(folded[2], torch.full((3,), 1 / 3).bfloat16())
    assert scale_inputs(weight, torch.ones(3)).dtype == torch.float32


def test_factors_that_a_gain_can_take() -> None:
    """W (s kept) times the rounded gain is W times the gain, which W s is not."""
    generator = torch.Generator().manual_seed(3)
    gain = torch.randn(64, generator=generator).bfloat16()
    scales = torch.empty(64).uniform_(0.1, 9, generator=generator)
    kept = kept_scales(gain, scales)
    folded, _ = fold_into_norm(gain, None, kept)
    torch.testing.assert_close(folded.float() * kept, gain.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(kept, scales, rtol=2**-8, atol=0)
    rounded, _ = fold_into_norm(gain, None, scales)
    assert torch.equal(rounded, folded)
    assert float((rounded.float() * scales - gain.float()).abs().max()) > 1e-4


def test_a_gain_of_zero_takes_any_factor() -> None:
    scales = torch.tensor([2.0, 3.0])
    assert kept_scales(torch.tensor([0.0, 3.0]), scales).tolist() == [2.0, 3.0]


def test_factors_that_the_gain_cannot_take() -> None:
    """In fp16 it would be infinite, or 0."""
    gain, scales = torch.tensor([1.0, 1.0, 2.0]).half(), torch.tensor([1e-6, 1e9, 4.0])
    kept = kept_scales(gain, scales)
    assert kept.tolist() == [1.0, 1.0, 4.0]
    assert fold_into_norm(gain, None, kept)[0].tolist() == [1.0, 1.0, 0.5]
