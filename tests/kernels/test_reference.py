"""The reference against its definitions, written out element by element in Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvik.kernels.reference.ops import REFERENCE


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm() -> None:
    x, weight, eps = normal(3, 5), normal(5, seed=1), 0.1
    found = REFERENCE.rms_norm(x, weight, eps)
    for row, out in zip(x.tolist(), found.tolist(), strict=True):
        rms = math.sqrt(sum(v * v for v in row) / len(row) + eps)
        expected = [v / rms * w for v, w in zip(row, weight.tolist(), strict=True)]
        assert out == pytest.approx(expected, rel=1e-5)


def test_rms_norm_rounds_once() -> None:
    x, weight = normal(4, 64).bfloat16(), normal(64, seed=1).bfloat16()
    expected = REFERENCE.rms_norm(x.float(), weight.float(), 1e-5).bfloat16()
    assert torch.equal(REFERENCE.rms_norm(x, weight, 1e-5), expected)


def test_add_rms_norm_returns_the_sum() -> None:
    x, residual, weight = normal(3, 8), normal(3, 8, seed=1), normal(8, seed=2)
    normed, total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, REFERENCE.rms_norm(x + residual, weight, 1e-5))


def test_layer_norm() -> None:
    x, weight, bias, eps = normal(3, 5) + 2, normal(5, seed=1), normal(5, seed=2), 0.1
    found = REFERENCE.layer_norm(x, weight, bias, eps)
    for row, out in zip(x.tolist(), found.tolist(), strict=True):
        mean = sum(row) / 5
        std = math.sqrt(sum((v - mean) ** 2 for v in row) / 5 + eps)
        scaled = [(v - mean) / std for v in row]
        expected = [
            v * w + b for v, w, b in zip(scaled, weight.tolist(), bias.tolist(), strict=True)
        ]
        assert out == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_rotary_turns_halves() -> None:
    """Dimension i and i + half form a complex number that turns by the angle."""
    q, k, angle = normal(4, 3, 6), normal(4, 2, 6, seed=1), normal(4, 3, seed=2)
    for x, found in zip((q, k), REFERENCE.rotary(q, k, angle.cos(), angle.sin()), strict=True):
        turned = (
            torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(4, 3), angle)[:, None]
        )
        torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), -1))


def test_rotary_matches_transformers() -> None:
    q, k, angle = normal(4, 3, 6), normal(4, 2, 6, seed=1), normal(4, 3, seed=2)
    both = torch.cat((angle, angle), -1)[None]
    expected = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], both.cos(), both.sin()
    )
    found = REFERENCE.rotary(q, k, angle.cos(), angle.sin())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b[0].transpose(0, 1))


def test_silu_and_mul_gates_with_the_first_half() -> None:
    gate_up = normal(3, 8)
    found = REFERENCE.silu_and_mul(gate_up)
    for row, out in zip(gate_up.tolist(), found.tolist(), strict=True):
        expected = [g / (1 + math.exp(-g)) * u for g, u in zip(row[:4], row[4:], strict=True)]
        assert out == pytest.approx(expected, rel=1e-5)


def test_gelu_tanh_is_near_the_exact_gelu() -> None:
    x = torch.linspace(-6, 6, 101)
    exact = torch.tensor([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()])
    found = REFERENCE.gelu_tanh(x)
    assert (found - exact).abs().max() < 5e-4
    assert not torch.equal(found, exact)  # the tanh form, not the erf form
    assert found[80].item() == pytest.approx(
        0.5 * 3.6 * (1 + math.tanh(math.sqrt(2 / math.pi) * (3.6 + 0.044715 * 3.6**3))), rel=1e-5
    )


def test_store_kv_writes_its_positions_and_no_other() -> None:
    k, v = normal(3, 2, 4), normal(3, 2, 4, seed=1)
    caches = torch.zeros(2, 5, 8, 2, 4)
    REFERENCE.store_kv(k, v, caches[0], caches[1], torch.tensor([17, 0, 39]))
    for new, cache in zip((k, v), caches, strict=True):
        expected = torch.zeros(5, 8, 2, 4)
        expected[2, 1], expected[0, 0], expected[4, 7] = new
        assert torch.equal(cache, expected)


def test_copy_blocks_reads_before_it_writes() -> None:
    cache = torch.arange(4.0)[:, None].repeat(1, 3)
    REFERENCE.copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert cache[:, 0].tolist() == [0, 0, 1, 3]
