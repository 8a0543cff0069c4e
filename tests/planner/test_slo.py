"""SLOs: their syntax, and when they are kept."""

from __future__ import annotations

import pytest

from kvik.errors import ParamError
from kvik.planner.serving import Slo, parse_seconds, parse_slo


def test_limits_are_read() -> None:
    assert parse_slo("ttft=300ms,tpot=50ms,e2e=5s") == Slo(
        pytest.approx(0.3), pytest.approx(0.05), pytest.approx(5.0)
    )
    assert parse_slo(" tpot = 2m ") == Slo(tpot=120.0)
    assert str(parse_slo("e2e=5s,ttft=300ms")) == "ttft=300ms,e2e=5000ms"


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=3", "ttft=-1s", "ttft=nans", "ttft=infs", "x=1s",
             "ttft=1s,ttft=2s", "ttft=1s,", "ttft=1sms", "ttft=0s", "ttft=s"]
)  # fmt: skip
def test_invalid_limits(text: str) -> None:
    with pytest.raises(ParamError, match="slo"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("300ms", 0.3), ("5s", 5.0), ("2m", 120.0), ("1.5h", 5400.0)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds("duration", text) == pytest.approx(seconds)


def test_the_worst_time_decides() -> None:
    slo = Slo(ttft=0.5, tpot=0.1, e2e=10.0)
    assert slo.excess(0.25, 0.05, 5.0) == 0.5
    assert slo.excess(0.25, 0.3, 5.0) == pytest.approx(3.0)
    assert slo.excess(0.25, None, 5.0) == 0.5  # one token has no TPOT
    assert Slo(tpot=0.1).excess(99.0, 0.1, 99.0) == 1.0  # just kept
    assert Slo().excess(99.0, 99.0, 99.0) == 0.0
