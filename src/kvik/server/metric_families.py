"""Metrics under one or two names: ours, and those that existing dashboards and routers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvik.server.histogram import Histogram

Row = tuple[Mapping[str, str], float]  # labels, value


@dataclass(frozen=True, slots=True)
class Naming:
    """Attributes:
    prefix: of every name.
    labels: of every value.
    """

    prefix: str
    labels: Mapping[str, str]


class Families:
    """What one scrape answers.

    Args:
        own: names of every metric.
        others: names of those that others have, too.
    """

    def __init__(self, own: Naming, others: Sequence[Naming] = ()) -> None:
        self._own, self._others = own, others
        self._metrics: list[Metric] = []

    def gauge(
        self, name: str, note: str, rows: float | Iterable[Row], *, ours: bool = False
    ) -> None:
        """Args:
        ours: nobody else has it.
        """
        found = _rows(rows)
        for naming in self._namings(ours):
            family = GaugeMetricFamily(naming.prefix + name, note, labels=_keys(naming, found))
            _fill(family, naming, found)
            self._metrics.append(family)

    def counter(
        self, name: str, note: str, rows: float | Iterable[Row], *, ours: bool = False
    ) -> None:
        """`_total` is added to its name."""
        found = _rows(rows)
        for naming in self._namings(ours):
            family = CounterMetricFamily(naming.prefix + name, note, labels=_keys(naming, found))
            _fill(family, naming, found)
            self._metrics.append(family)

    def histogram(self, name: str, note: str, values: Histogram, *, ours: bool = False) -> None:
        self.buckets(name, note, values.buckets(), values.sum, ours=ours)

    def buckets(
        self,
        name: str,
        note: str,
        buckets: Sequence[tuple[str, float]],
        total: float,
        *,
        ours: bool = False,
    ) -> None:
        """A histogram by its (upper bound, values not larger)."""
        for naming in self._namings(ours):
            labels = list(naming.labels)
            family = HistogramMetricFamily(naming.prefix + name, note, labels=labels)
            family.add_metric(list(naming.labels.values()), list(buckets), total)
            self._metrics.append(family)

    def text(self, registry: CollectorRegistry) -> bytes:
        """In Prometheus' text format, after what `registry` knows."""
        return generate_latest(registry) + generate_latest(_Collected(self._metrics))

    def _namings(self, ours: bool) -> Sequence[Naming]:
        return (self._own,) if ours else (self._own, *self._others)


class _Collected(CollectorRegistry):
    """A registry of one scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        super().__init__()
        self._found = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._found


def _rows(rows: float | Iterable[Row]) -> list[Row]:
    return [({}, float(rows))] if isinstance(rows, (int, float)) else list(rows)


def _keys(naming: Naming, rows: Sequence[Row]) -> list[str]:
    return [*naming.labels, *(rows[0][0] if rows else ())]


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, naming: Naming, rows: Sequence[Row]
) -> None:
    for labels, value in rows:
        family.add_metric([*naming.labels.values(), *labels.values()], value)
