"""Divisors of frequencies and what config.json says of them."""

from __future__ import annotations

import struct

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvik.errors import ModelError
from kvik.gguf.facts import llama3_divisors, llama3_scaling

CASES = [
    (500_000.0, 64, (32.0, 1.0, 4.0, 8192)),  # Llama 3.2
    (500_000.0, 128, (8.0, 1.0, 4.0, 8192)),  # Llama 3.1
    (10_000.0, 128, (5.0, 1.0, 3.0, 2048)),
    (10_000.0, 64, (3.0, 2.0, 9.0, 4096)),
]


def original_divisors(theta: float, head_dim: int, scaling: dict[str, object]) -> torch.Tensor:
    """By transformers."""
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return plain / frequencies


@pytest.mark.parametrize(("theta", "head_dim", "numbers"), CASES)
def test_the_way_back(
    theta: float, head_dim: int, numbers: tuple[float, float, float, int]
) -> None:
    factor, low, high, original = numbers
    scaling: dict[str, object] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    divisors = original_divisors(theta, head_dim, scaling)
    ours = torch.tensor(llama3_divisors(scaling, theta, head_dim))  # type: ignore[arg-type]
    torch.testing.assert_close(ours, divisors, rtol=2e-5, atol=0)
    data = struct.pack(f"<{len(divisors)}f", *divisors.tolist())
    found = llama3_scaling(data, theta, head_dim)
    assert found is not None and found["rope_type"] == "llama3"
    again = original_divisors(theta, head_dim, dict(found))
    torch.testing.assert_close(again, divisors, rtol=1e-4, atol=0)
    if (low, high, original) == (1.0, 4.0, 8192):
        assert dict(found) == scaling


def test_no_stretching() -> None:
    assert llama3_scaling(struct.pack("<4f", 1, 1, 1, 1), 10_000.0, 8) is None


@pytest.mark.parametrize(
    "divisors",
    [
        [1.0, 2.0, 3.0, 1.0],  # no such rise
        [1.0, 8.0, 1.0, 8.0],
        [0.5, 1.0, 1.0, 8.0],
        [1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, float("nan")],
        [1.0, 1.0, 1.0, float("inf")],
        [],
    ],
)
def test_other_divisors_are_refused(divisors: list[float]) -> None:
    with pytest.raises(ModelError, match=r"^rope_freqs\.weight: must hold"):
        llama3_scaling(struct.pack(f"<{len(divisors)}f", *divisors), 10_000.0, 8)
