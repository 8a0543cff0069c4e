"""Draws by the native kernels, but for the rows that ask for typical_p."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvik.kernels.cpu.native import Native
from kvik.kernels.draws import Draws, Truncation
from kvik.kernels.torch_ops import TORCH

_Way = Callable[[Tensor], Tensor]  # from row numbers to what is wanted of these rows


class Drawing:
    def __init__(self, native: Native) -> None:
        self.native = native

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """See `Ops.draw`."""
        typical_p = draws.truncation.typical_p
        if typical_p is None:
            return self._draw(logits, draws)
        return _apart(
            typical_p,
            lambda rows: TORCH.draw(logits[rows], draws.of(rows)),
            lambda rows: self._draw(logits[rows], draws.of(rows)),
        )

    def probabilities(self, logits: Tensor, temperature: Tensor, rules: Truncation) -> Tensor:
        """See `Ops.probabilities`."""
        if rules.typical_p is None:
            return self._probabilities(logits, temperature, rules)
        return _apart(
            rules.typical_p,
            lambda rows: TORCH.probabilities(logits[rows], temperature[rows], rules.of(rows)),
            lambda rows: self._probabilities(logits[rows], temperature[rows], rules.of(rows)),
        )

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
            top_k=_address(rules.top_k),
            top_p=_address(rules.top_p),
            min_p=_address(rules.min_p),
            ids=ids.data_ptr(),
        )
        return ids

    def _probabilities(self, logits: Tensor, temperature: Tensor, rules: Truncation) -> Tensor:
        logits = logits.float()
        shares = self.native.empty(*logits.shape, dtype=torch.float32)
        self.native.launch(
            "probabilities",
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=self.native.rows(logits),
            vocab=logits.shape[1],
            temperature=temperature.data_ptr(),
            top_k=_address(rules.top_k),
            top_p=_address(rules.top_p),
            min_p=_address(rules.min_p),
            shares=shares.data_ptr(),
            shares_stride=shares.stride(0),
        )
        return shares


def _apart(typical_p: Tensor, typical: _Way, others: _Way) -> Tensor:
    """Each row the same way in every company: two ways may differ in the last bit of a sum.

    Args:
        typical_p: [n], 1 where off.
        typical, others: for the rows with it, and for those without.

    Returns:
        [n, ...], what they return.
    """
    ways = ((typical, typical_p < 1), (others, typical_p >= 1))
    numbers = [(way, rows) for way, asks in ways if len(rows := asks.nonzero()[:, 0])]
    found = torch.cat([way(rows) for way, rows in numbers])
    return torch.empty_like(found).index_copy_(0, torch.cat([r for _, r in numbers]), found)


def _address(values: Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()
