"""Penalties for tokens seen before: CTRL's repetition (Keskar et al. 2019, section 4.1), and the
frequency and presence of OpenAI's API."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.kernels.penalties import Penalties


def penalize(logits: Tensor, penalties: Penalties) -> None:
    """logits: [rows, vocab] float32, changed in place."""
    x = logits.index_select(0, penalties.rows)
    counts = penalties.counts.index_select(0, penalties.seen)
    generated = counts > 0
    known = penalties.in_prompt.index_select(0, penalties.seen) | generated
    repetition = penalties.repetition[:, None]
    x = torch.where(known, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= penalties.frequency[:, None] * counts
    x -= penalties.presence[:, None] * generated
    logits.index_copy_(0, penalties.rows, x)
