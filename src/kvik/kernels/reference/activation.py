"""Activations of the feed-forward layers, computed in fp32 and rounded once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): gate * sigmoid(gate) * up.

    Args:
        gate_up: [tokens, 2 * inner], the gate first.

    Returns:
        [tokens, inner].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU (Hendrycks and Gimpel 2016), which GPT-2 was trained with."""
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide.pow(3))
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)
