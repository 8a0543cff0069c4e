"""Networks that draft from the last hidden state of a model.

Medusa (Cai et al. 2024, 2401.10774): heads that predict further tokens, all from one hidden state.
The model's own head predicts the next token; head k, from k = 1, the token k positions after it:
head_k(h) = output_k(h + silu(W_k h + b_k)), with one or more residual blocks. The names in a
checkpoint are Medusa's: "k.i.linear" is block i of a head, "k.n" its output after n blocks.

EAGLE (after Li et al. 2024, 2401.15077): a layer that predicts the next hidden state from the last
one and the token sampled from it; the model's own head predicts the token after that, and so on.
EAGLE's layer also attends to its earlier predictions. This one does not, because the hidden state
already depends on the whole text; so it needs no cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

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


Logits = Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, vocab] fp32


class MedusaHeads:
    """Medusa's heads over one hidden state."""

    def __init__(
        self,
        builder: LayerBuilder,
        *,
        heads: int,
        layers: int,
        hidden: int,
        vocab: int,
        logits: Logits | None,
    ) -> None:
        """
        Args:
            logits: the model's head, shared by all draft heads; None: each has its own output.
        """
        self.heads = heads
        # The first blocks read the same hidden state, so they form one matrix.
        names = tuple(f"{head}.0.linear" for head in range(heads))
        self.first = builder.linear(names, hidden, (hidden,) * heads, bias=True)
        self.blocks = [
            [
                builder.linear(f"{head}.{layer}.linear", hidden, hidden, bias=True)
                for layer in range(1, layers)
            ]
            for head in range(heads)
        ]
        self.shared = logits
        self.outputs: list[Logits] = [
            builder.linear(f"{head}.{layers}", hidden, vocab, bias=False)
            for head in range(heads if logits is None else 0)
        ]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden], normalised -> logits [rows, heads, vocab]."""
        rows, width = hidden.shape
        x = hidden[:, None] + silu(self.first(hidden).view(rows, self.heads, width))
        if self.blocks[0]:
            x = torch.stack([self._deeper(head, x[:, head]) for head in range(self.heads)], 1)
        if self.shared is not None:
            return self.shared(x.flatten(0, 1)).view(rows, self.heads, -1)
        logits = [self.outputs[head](x[:, head]) for head in range(self.heads)]
        return torch.stack(logits, 1)

    def _deeper(self, head: int, x: Tensor) -> Tensor:
        for block in self.blocks[head]:
            x = x + silu(block(x))
        return x
