"""Figures as people read them: three digits, handy units, columns."""

from __future__ import annotations

from collections.abc import Sequence

DIGITS = 3


def three(value: float) -> str:
    """Three digits: 12345 -> "12,300", 1.2345 -> "1.23"."""
    if value == 0:
        return "0"
    text = f"{value:.{DIGITS - 1}e}"
    power = int(text.partition("e")[2])
    return f"{float(text):,.{max(0, DIGITS - 1 - power)}f}"


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{three(value / size)} {unit}"
    return f"{three(value * 1e9)} ns"


def count(value: float) -> str:
    """70553706496 -> "70.6 billion"."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{three(value / size)} {unit}"
    return f"{value:,.0f}"


def dollars(value: float) -> str:
    return f"${value:,.2f}" if value >= 1 else f"${three(value)}"


def columns(rows: Sequence[Sequence[str]], align: Sequence[str], indent: int = 2) -> list[str]:
    """Rows with columns of equal width, "<" or ">" for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (
            " " * indent
            + "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
