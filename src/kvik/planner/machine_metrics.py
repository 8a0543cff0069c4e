"""Metrics that compare a served model with its machine's limits, for the server's `/metrics`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvik.config.config import ResolvedConfig
from kvik.engine.stats import EngineStats
from kvik.errors import KvikError
from kvik.planner.efficiency import WHAT_HELPS, Efficiency, RunningModel

WINDOW_SECONDS = 60.0  # rates over this time are compared with the machine's limits
READING_SECONDS = 5.0  # minimum time between stored readings


class MachineMetrics:
    """Returns metrics of an engine's work and of the machine's limits at each scrape.

    Returns none for a model whose shape the planner does not know.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self._config = config
        self._model: RunningModel | None = None
        self._model_read = False
        self._readings: deque[tuple[float, EngineStats]] = deque()

    def __call__(self, stats: EngineStats, now: float) -> Iterator[Metric]:
        model = self.model()
        if model is None:
            return
        total = model.efficiency(
            EngineStats(num_blocks=stats.num_blocks), stats, max(stats.time.busy, 1e-9)
        )
        note = "Operations that the steps had to do, as estimated."
        yield CounterMetricFamily("estimated_flops_per_gpu", note, total.flops)
        written = total.tokens * model.kv_bytes_per_token + total.state_bytes / 2
        note = "Bytes that the steps had to read from memory, as estimated."
        read = max(0.0, total.weight_bytes + total.kv_bytes - written)
        yield CounterMetricFamily("estimated_read_bytes_per_gpu", note, read)
        note = "Bytes that the steps had to write to the KV cache and states, as estimated."
        yield CounterMetricFamily("estimated_write_bytes_per_gpu", note, written)
        recent = self._recent(model, stats, now)
        if recent is not None:
            yield from _limits(recent, model.device.doubt)

    def model(self) -> RunningModel | None:
        """Return the model on its device, read at the first call."""
        if not self._model_read:
            self._model_read = True
            with suppress(KvikError):
                self._model = RunningModel.of(self._config)
        return self._model

    def _recent(self, model: RunningModel, stats: EngineStats, now: float) -> Efficiency | None:
        """Return the efficiency in the last minute, from the readings of earlier scrapes; None
        before the second."""
        readings = self._readings
        while len(readings) > 1 and readings[1][0] <= now - WINDOW_SECONDS:
            readings.popleft()
        efficiency = None
        if readings and now > readings[0][0]:
            then, before = readings[0]
            efficiency = model.efficiency(before, stats, now - then)
        if not readings or now - readings[-1][0] >= READING_SECONDS:
            readings.append((now, stats))
        return efficiency


def _limits(recent: Efficiency, doubt: str) -> Iterator[Metric]:
    """Yield the rates of the last minute and the machine's limits.

    Args:
        doubt: why the ceilings may be wrong, or "".
    """
    note = "Bytes read from memory a second of work, in the last minute."
    yield GaugeMetricFamily("memory_bytes_per_second", note, recent.read_rate)
    note = "Operations a second of work, in the last minute."
    yield GaugeMetricFamily("flops_per_second", note, recent.flop_rate)
    calibrated = f"as calibrated ({doubt})" if doubt else "as calibrated"
    if recent.ceiling is not None:
        note = f"Bytes that the machine can read a second, {calibrated}."
        yield GaugeMetricFamily("memory_bytes_ceiling", note, recent.ceiling.bandwidth)
        note = f"Operations that the machine can do a second, {calibrated}."
        yield GaugeMetricFamily("flops_ceiling", note, recent.ceiling.compute)
        note = "Achieved / ceiling of memory, in the last minute."
        yield GaugeMetricFamily("memory_bandwidth_share", note, recent.bandwidth_share or 0.0)
        note = "Achieved / ceiling of arithmetic, in the last minute."
        yield GaugeMetricFamily("compute_share", note, recent.compute_share or 0.0)
    note = "1 for what limited the last minute."
    bottleneck = GaugeMetricFamily("bottleneck", note, labels=["limit"])
    for limit in WHAT_HELPS:
        bottleneck.add_metric([limit], float(limit == recent.bottleneck))
    yield bottleneck
