"""Small operations on whole rows."""

from __future__ import annotations

from torch import Tensor


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table [rows, dim], ids [n] -> [n, dim]."""
    return table[ids]


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of one shape and dtype."""
    return x + y


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] -> the largest of each row in fp32 and the first token that has it.

    A row with NaN has NaN as its largest.
    """
    return logits.amax(-1).float(), logits.argmax(-1)
