"""Queries, keys and values: projections of one input, cut into heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvik.nn.linear import Linear


class Heads:
    """Several projections of x. Neighbours whose weights are stored alike are one matrix; of
    others each keeps its own format."""

    __slots__ = ("head_dim", "heads", "linears")

    def __init__(
        self, linears: Sequence[Linear], heads: Sequence[tuple[int, ...]], head_dim: int
    ) -> None:
        """
        Args:
            heads: of the projections that each of `linears` makes.
        """
        self.linears = linears
        self.heads = heads
        self.head_dim = head_dim

    def __call__(self, x: Tensor) -> list[Tensor]:
        """x [tokens, inputs] -> [tokens, heads, head_dim] of each projection."""
        found: list[Tensor] = []
        for linear, heads in zip(self.linears, self.heads, strict=True):
            together = linear(x).view(-1, sum(heads), self.head_dim)
            found += together.split_with_sizes(heads, 1)
        return found
