"""Costs of tokens: devices are paid by the hour, tokens come at the rate of the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvik.errors import ConfigError

# Figures for people: three digits, handy units, columns.

DIGITS = 3


def three(value: float) -> str:
    """Format with three digits: 12345 -> "12,300", 1.2345 -> "1.23"."""
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


DAY = 86_400.0
HOUR = 3_600.0
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class DailyLoad:
    """Equal requests that arrive all day.

    Attributes:
        requests: per day.
        prompt, output: tokens of each.
    """

    requests: float
    prompt: int
    output: int

    @property
    def tokens(self) -> float:
        """Tokens per day, prompt and output together."""
        return self.requests * (self.prompt + self.output)


@dataclass(frozen=True, slots=True)
class Cost:
    """US dollars.

    Attributes:
        price: of an hour of all devices of one copy of the model.
        input, output: of a million prompt tokens, and of a million generated tokens.
        copies: of the model that the load needs; None: no load was given.
        busy: share of the time these copies work.
        per_day: of these copies, idle time included.
    """

    price: float
    input: float
    output: float
    load: DailyLoad | None = None
    copies: int | None = None
    busy: float | None = None
    per_day: float | None = None


def parse_load(text: str, prompt: int, output: int) -> DailyLoad:
    """ "5/s" is requests per second, "50M" or "5e7" tokens per day, prompt and output together.

    Raises:
        ConfigError: neither of these.
    """
    number, per_second = (text[:-2], True) if text.endswith("/s") else (text, False)
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
    unit = 1.0
    if number[-1:] in units:
        number, unit = number[:-1], units[number[-1]]
    try:
        value = float(number) * unit
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise ConfigError(
            "load",
            f"must be tokens per day (50M) or requests per second (5/s), not {text[:40]!r}",
        )
    requests = value * DAY if per_second else value / (prompt + output)
    return DailyLoad(requests, prompt, output)


def cost(
    price: float,
    devices: int,
    prefill_rate: float,
    decode_rate: float,
    load: DailyLoad | None = None,
) -> Cost:
    """Return the cost at these rates.

    A copy of the model prefills or decodes, so the seconds that the load needs of both add up.

    Args:
        price: US dollars per hour and device.
        devices: that one copy of the model takes.
        prefill_rate, decode_rate: tokens/s of one copy.
    """
    hourly = price * devices
    per_input = hourly / HOUR / prefill_rate * MILLION
    per_output = hourly / HOUR / decode_rate * MILLION
    if load is None:
        return Cost(hourly, per_input, per_output)
    seconds = load.requests * (load.prompt / prefill_rate + load.output / decode_rate)
    copies = max(1, math.ceil(seconds / DAY))
    return Cost(
        price=hourly,
        input=per_input,
        output=per_output,
        load=load,
        copies=copies,
        busy=seconds / (copies * DAY),
        per_day=copies * hourly * 24,
    )
