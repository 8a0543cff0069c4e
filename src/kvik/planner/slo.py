"""Service level objectives: limits on the latencies of a request, and how to write them."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.errors import ParamError
from kvik.options import Kind, bad_value


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits on the latencies of a request, in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def excess(self, ttft: float | None, tpot: float | None, e2e: float | None) -> float:
        """Return the largest ratio of a time to its limit; at most 1 if all limits are kept. A time
        that is None, as the TPOT of a single token, keeps its limit."""
        pairs = ((ttft, self.ttft), (tpot, self.tpot), (e2e, self.e2e))
        return max(
            (time / limit for time, limit in pairs if time is not None and limit is not None),
            default=0.0,
        )

    def __str__(self) -> str:
        pairs = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        return ",".join(f"{name}={value * 1e3:g}ms" for name, value in pairs if value is not None)


class SloText(Kind):
    """Limits, written as `parse_slo` reads them."""

    metavar = "SLO"

    def parse(self, text: str) -> Slo:
        return parse_slo(text)

    def checked(self, value: object) -> Slo:
        if not isinstance(value, Slo):
            raise bad_value("a Slo", value)
        return value


def parse_slo(text: str) -> Slo:
    """ "ttft=300ms,tpot=50ms,e2e=5s" -> Slo.

    Raises:
        ParamError: an unknown name, a name twice, or no positive time with unit s or ms.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in ("ttft", "tpot", "e2e") or name in limits or not value:
            raise ParamError("slo", f"must be like ttft=300ms,tpot=50ms,e2e=5s, not {text[:60]!r}")
        limits[name] = parse_seconds("slo", value)
    return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("e2e"))


def parse_seconds(field: str, text: str) -> float:
    """ "300ms", "5s" or "2m" -> seconds.

    Raises:
        ParamError: anything else, zero and infinity included.
    """
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.rstrip("smh")
    try:
        seconds = float(number) * units[text[len(number) :]]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise ParamError(field, f"must be a time such as 300ms, 5s or 2m, not {text[:60]!r}")
    return seconds
