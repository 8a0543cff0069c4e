"""A layer that drafts from a model's last hidden state, one token at a time (after EAGLE, Li et
al. 2024, 2401.15077).

It predicts the next hidden state from the last one and the token that was sampled from it; the
model's own head gives the token after that, and so on. EAGLE's layer also attends to its earlier
predictions; this one does not, because the hidden state has seen the whole text, and so it needs no
cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.spec.declare import LayerBuilder

EPS = 1e-6


class EagleLayer:
    """One layer that predicts the next hidden state."""

    def __init__(self, builder: LayerBuilder, *, hidden: int, inner: int) -> None:
        self.join = builder.linear("fc", 2 * hidden, hidden, bias=True)
        self.norm = builder.rms_norm("norm", hidden, EPS)
        self.mlp = builder.at("mlp").gated_mlp(hidden, inner, bias=False)

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """embedded, hidden [rows, hidden] -> the next hidden state, [rows, hidden]."""
        x = self.join(torch.cat((embedded, hidden), 1))
        return self.mlp(self.norm(x), residual=x)
