"""Units of memory, and how to write figures: three digits, readable units, columns."""

from __future__ import annotations

from collections.abc import Sequence

MIB = 1 << 20
GIB = 1 << 30


def show_bytes(count: int) -> str:
    """1610612736 -> "1.5 GiB"."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def three(value: float) -> str:
    """Format with three significant digits: 12345 -> "12,300", 1.2345 -> "1.23"."""
    if value == 0:
        return "0"
    text = f"{value:.2e}"
    power = int(text.partition("e")[2])
    return f"{float(text):,.{max(0, 2 - power)}f}"


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{three(value / size)} {unit}"
    return f"{three(value * 1e9)} ns"


def count(value: float) -> str:
    """Format a count: 70553706496 -> "70.6 billion"."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{three(value / size)} {unit}"
    return f"{value:,.0f}"


def dollars(value: float) -> str:
    return f"${value:,.2f}" if value >= 1 else f"${three(value)}"


def columns(rows: Sequence[Sequence[str]], align: Sequence[str], indent: int = 2) -> list[str]:
    """Return rows as lines with aligned columns; `align` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(align, widths, strict=True)]
    lines = ("  ".join(map(format, row, forms)) for row in rows)
    return [(" " * indent + line).rstrip() for line in lines]
