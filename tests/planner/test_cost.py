"""Money, by hand."""

from __future__ import annotations

import pytest

from kvik.errors import ConfigError
from kvik.planner.cost import Load, cost, parse_load


def test_a_million_tokens() -> None:
    # $3.60 an hour is a dollar for 1000 seconds: a million tokens at 1000 a second
    paid = cost(3.6, 1, prefill_rate=1000, decode_rate=100)
    assert (paid.input, paid.output) == pytest.approx((1.0, 10.0))
    assert (paid.copies, paid.busy, paid.per_day) == (None, None, None)


def test_every_device_is_paid() -> None:
    paid = cost(3.6, 8, prefill_rate=1000, decode_rate=100)
    assert (paid.price, paid.input, paid.output) == pytest.approx((28.8, 8.0, 80.0))


def test_a_day() -> None:
    # One request a second takes 100 / 1000 + 10 / 100 = 0.2 seconds of it.
    paid = cost(3.6, 1, 1000, 100, Load(86_400, prompt=100, output=10))
    assert paid.copies == 1
    assert paid.busy == pytest.approx(0.2)
    assert paid.per_day == pytest.approx(86.4)


def test_more_than_one_copy_can_do() -> None:
    paid = cost(3.6, 2, 1000, 100, Load(6 * 86_400, prompt=100, output=10))
    assert paid.copies == 2
    assert paid.busy == pytest.approx(0.6)
    assert paid.per_day == pytest.approx(2 * 2 * 86.4)


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("5/s", 5 * 86_400),
        ("0.5/s", 43_200),
        ("1000000", 1000),
        ("1M", 1000),
        ("2k", 2),
        ("1.5G", 1_500_000),
        ("3e6", 3000),
    ],
)
def test_loads(text: str, requests: float) -> None:
    load = parse_load(text, prompt=900, output=100)
    assert load.requests == pytest.approx(requests)
    assert load.tokens == pytest.approx(requests * 1000)


@pytest.mark.parametrize("text", ["", "x", "M", "5/m", "/s", "0", "-1", "nan", "inf", "1e999"])
def test_what_is_no_load(text: str) -> None:
    with pytest.raises(ConfigError, match="load: must be tokens per day"):
        parse_load(text, 900, 100)
