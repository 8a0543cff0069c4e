"""Look up the records of jobs by kind and name."""

from __future__ import annotations

from collections.abc import Sequence

from notes import Record


class Found:
    """Records by kind and name."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def of(self, kind: str, section: str | None = None) -> list[Record]:
        return [
            r for r in self.records if r["kind"] == kind and section in (None, r.get("section"))
        ]

    def fact(self, name: str, **about: object) -> Record | None:
        return self._named("fact", name, about)

    def value(self, name: str, **about: object) -> float | None:
        record = self.fact(name, **about)
        return None if record is None else float(str(record["value"]))

    def rate(self, name: str, **about: object) -> Record | None:
        return self._named("rate", name, about)

    def share(self, rate: Record | None) -> float | None:
        """Return the share of the ceiling that was measured in the same call."""
        ceiling = self.value(str(rate["ceiling"])) if rate else None
        return done(rate) / ceiling if rate and ceiling else None

    def _named(self, kind: str, name: str, about: dict[str, object]) -> Record | None:
        for record in reversed(self.records):
            alike = all(record.get(key) == value for key, value in about.items())
            if record["kind"] == kind and record["name"] == name and alike:
                return record
        return None


def done(rate: Record) -> float:
    """Return bytes or operations per second."""
    return number(rate, "moved", "operations") / number(rate, "seconds")


def number(record: Record, *names: str) -> float:
    return sum(float(str(record[name])) for name in names)
