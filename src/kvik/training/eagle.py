"""The layer of models/eagle.py as it is trained: on its own guesses, as far as it will go."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.config.draft_heads import EAGLE, HeadsSpec
from kvik.training.states import Batch

EPS = 1e-6  # as of models/eagle.py
FEATURES = 0.1  # weight of the distance between guessed and true hidden states

Enter = Callable[[Tensor, Tensor], Tensor]  # ids, positions [rows] -> [rows, hidden]


class EagleTrainee:
    def __init__(self, spec: HeadsSpec, output: Tensor, enter: Enter, seed: int) -> None:
        """
        Args:
            output: [hidden, vocab] fp32, of the model.
            enter: tokens as the model takes them in.
        """
        self.spec = spec
        self.output = output
        self.enter = enter
        generator = torch.Generator().manual_seed(seed)
        width, inner = spec.hidden_size, spec.inner_size

        def drawn(outputs: int, inputs: int) -> Tensor:
            return torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5)

        self.join, self.offset = drawn(width, 2 * width), torch.zeros(width)
        self.gain = torch.ones(width)
        self.gate, self.up = drawn(inner, width), drawn(inner, width)
        self.down = torch.zeros(width, inner)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.join, self.offset, self.gain, self.gate, self.up, self.down]

    def guesses(self, batch: Batch) -> Tensor:
        """[rows, depth, hidden], for batch.hidden[:, 1:]."""
        x, found = batch.hidden[:, 0], []
        for depth in range(self.spec.depth):
            embedded = self.enter(batch.ids[:, depth], batch.positions + 1 + depth)
            x = F.linear(torch.cat((embedded, x), 1), self.join, self.offset)
            y = F.rms_norm(x, self.gain.shape, self.gain, EPS)
            x = x + F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)
            found.append(x)
        return torch.stack(found, 1)

    def logits(self, batch: Batch) -> Tensor:
        """[rows, depth, vocab]; depth k guesses batch.ids[:, k + 1]."""
        return self.guesses(batch) @ self.output

    def loss(self, batch: Batch) -> Tensor:
        guessed = self.guesses(batch)
        logits = (guessed @ self.output).flatten(0, 1)
        words = F.cross_entropy(logits, batch.ids[:, 1:].reshape(-1))
        return words + FEATURES * F.smooth_l1_loss(guessed, batch.hidden[:, 1:])

    def tensors(self) -> dict[str, Tensor]:
        """By their names in a checkpoint."""
        return {
            "fc.weight": self.join,
            "fc.bias": self.offset,
            "norm.weight": self.gain,
            "mlp.gate_proj.weight": self.gate,
            "mlp.up_proj.weight": self.up,
            "mlp.down_proj.weight": self.down,
        }


def eagle_spec(hidden: int, vocab: int, depth: int, inner: int) -> HeadsSpec:
    return HeadsSpec(EAGLE, hidden, vocab, depth, inner_size=inner)
