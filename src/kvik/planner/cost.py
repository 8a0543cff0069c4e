"""Costs of tokens: devices are paid by the hour, tokens are generated at the roofline's rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvik.errors import ConfigError

DAY = 86_400.0
HOUR = 3_600.0
MONTH = DAY * 365.25 / 12
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class DailyLoad:
    """Equal requests that arrive throughout the day."""

    requests: float  # per day
    prompt: int  # tokens of each request
    output: int  # likewise

    @property
    def tokens(self) -> float:
        """Tokens per day, prompt and output together."""
        return self.requests * (self.prompt + self.output)


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Tokens per second of one copy of the model."""

    decode: float  # output tokens, all requests together
    # Prompt tokens; None: `decode` was measured while prompts were also computed.
    prefill: float | None = None

    def seconds(self, prompt: int, output: int) -> float:
        """Return the seconds of one copy's time that a request takes, for prefill and decode."""
        return output / self.decode + (prompt / self.prefill if self.prefill else 0.0)

    def output_rate(self, prompt: int, output: int) -> float:
        """Return the output tokens/s of one copy that also computes prompts."""
        return output / self.seconds(prompt, output)


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs in US dollars."""

    price: float  # per hour, for all devices of one copy of the model
    prompt_tokens: int  # of a request
    output_tokens: int  # likewise
    mixed: float  # per thousand tokens of such requests, prompt and output together
    # Per million prompt tokens; None: the measured rate does not distinguish them.
    input: float | None
    output: float | None  # per million generated tokens; likewise
    load: DailyLoad | None
    copies: int  # copies of the model that the load needs; one without a load
    busy: float | None  # fraction of the time that these copies work; None: no load was given
    per_hour: float  # of these copies, including idle time
    per_day: float  # likewise
    per_month: float  # likewise


def parse_load(text: str, prompt: int, output: int) -> DailyLoad:
    """Parse a load: "5/s" is requests per second, "50M" or "5e7" tokens per day (prompt and
    output).

    Raises:
        ConfigError: the text is neither.
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
            "load", f"must be tokens per day (50M) or requests per second (5/s), not {text[:40]!r}"
        )
    requests = value * DAY if per_second else value / (prompt + output)
    return DailyLoad(requests, prompt, output)


def cost(
    hourly: float, rates: TokenRates, prompt: int, output: int, load: DailyLoad | None = None
) -> Cost:
    """Return the cost of requests at the given rates.

    Args:
        hourly: US dollars for the devices of one copy of the model.
        prompt, output: tokens of a request.
    """
    second, request_time = hourly / HOUR, rates.seconds(prompt, output)
    busy_time = load.requests * request_time if load else None
    copies = max(1, math.ceil(busy_time / DAY)) if busy_time else 1
    return Cost(
        price=hourly,
        prompt_tokens=prompt,
        output_tokens=output,
        mixed=second * request_time / (prompt + output) * 1e3,
        input=second / rates.prefill * MILLION if rates.prefill else None,
        output=second / rates.decode * MILLION if rates.prefill else None,
        load=load,
        copies=copies,
        busy=busy_time / (copies * DAY) if busy_time else None,
        per_hour=copies * hourly,
        per_day=copies * second * DAY,
        per_month=copies * second * MONTH,
    )
