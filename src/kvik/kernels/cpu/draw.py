"""Draws by the native kernels, but for the rows that ask for typical_p."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.kernels.cpu.native import Native
from kvik.kernels.draws import Draws
from kvik.kernels.torch_ops import TORCH


class Drawing:
    def __init__(self, native: Native) -> None:
        self.native = native

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """See `Ops.draw`."""
        typical_p = draws.truncation.typical_p
        if typical_p is None:
            return self._draw(logits, draws)
        # Each row the same way in every company: two ways may differ in the last bit of a sum.
        ids = torch.empty(len(logits), dtype=torch.int64)
        for way, asks in ((TORCH.draw, typical_p < 1), (self._draw, typical_p >= 1)):
            rows = asks.nonzero()[:, 0]
            if len(rows):
                ids[rows] = way(logits[rows], draws.of(rows))
        return ids

    def _draw(self, logits: Tensor, draws: Draws) -> Tensor:
        logits, rules = logits.float(), draws.truncation
        ids = self.native.empty(len(logits), dtype=torch.int64)
        self.native.launch(
            "draw",
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=self.native.rows(logits),
            vocab=logits.shape[1],
            temperature=draws.temperature.data_ptr(),
            uniforms=draws.uniforms.data_ptr(),
            top_k=0 if rules.top_k is None else rules.top_k.data_ptr(),
            top_p=0 if rules.top_p is None else rules.top_p.data_ptr(),
            min_p=0 if rules.min_p is None else rules.min_p.data_ptr(),
            ids=ids.data_ptr(),
        )
        return ids
