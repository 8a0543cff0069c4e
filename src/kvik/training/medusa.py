"""Medusa's heads (models/medusa.py) as they are trained: with the model's own output matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.config.draft_heads import MEDUSA, HeadsSpec
from kvik.training.states import Batch

DECAY = 0.8  # weight of a head's loss beside the one before it, as in the paper


class MedusaTrainee:
    """Blocks begin as zero: each head then says what the model's own head says."""

    def __init__(self, spec: HeadsSpec, output: Tensor) -> None:
        """
        Args:
            output: [hidden, vocab] fp32, of the model.
        """
        self.spec = spec
        self.output = output
        heads, width = spec.depth, spec.hidden_size
        self.weights = [torch.zeros(heads, width, width) for _ in range(spec.layers)]
        self.biases = [torch.zeros(heads, width) for _ in range(spec.layers)]

    @property
    def parameters(self) -> list[Tensor]:
        return self.weights + self.biases

    def logits(self, batch: Batch) -> Tensor:
        """[rows, depth, vocab]; depth k guesses batch.ids[:, k + 1]."""
        x = batch.hidden[:, :1].expand(-1, self.spec.depth, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + F.silu(torch.einsum("bki,koi->bko", x, weight) + bias)
        return x @ self.output

    def loss(self, batch: Batch) -> Tensor:
        logits = self.logits(batch)
        losses = F.cross_entropy(
            logits.flatten(0, 1), batch.ids[:, 1:].reshape(-1), reduction="none"
        )
        return (
            losses.view(-1, self.spec.depth).mean(0) * DECAY ** torch.arange(self.spec.depth)
        ).sum()

    def tensors(self) -> dict[str, Tensor]:
        """By their names in a checkpoint."""
        found = {}
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            for head in range(self.spec.depth):
                found[f"{head}.{layer}.linear.weight"] = weight[head]
                found[f"{head}.{layer}.linear.bias"] = bias[head]
        return found


def medusa_spec(hidden: int, vocab: int, depth: int, layers: int) -> HeadsSpec:
    return HeadsSpec(MEDUSA, hidden, vocab, depth, layers)
