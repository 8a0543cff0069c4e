"""Predictions of the planner for a measured run: expected rates, ceilings and the bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvik.config.config import ResolvedConfig
from kvik.planner.devices import Device
from kvik.planner.efficiency import POSSIBLE, WHAT_HELPS, Efficiency, RunningModel
from kvik.planner.roofline import PlannedStep, decode, step_time
from kvik.planner.serving import Serving, Traffic, predict
from kvik_bench.inprocess.inproc import LoadRun
from kvik_bench.report.result import Figure, Measure, figures

CEILING = "by what must be read and computed, at this machine's limits"
EXPECTED = "by the same roofline at the pace of kvik's kernels here (kvik calibrate)"
STEADY = "by the planner, of a load that never ends, with requests of the mean lengths"
READ = "weights and KV cache that the steps had to read / time with work"
DONE = "operations that the steps had to do / time with work"
LEAST = "in which this machine could do the steps of a round, if nothing but its limits counted"
SHARE = "achieved / ceiling of this machine, as calibrated, for what a step reads"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


MOST = 100 * POSSIBLE
ACHIEVED: tuple[Measure[Efficiency], ...] = (
    Measure("memory read", "GB/s", "more", READ, lambda e: e.read_rate / 1e9),
    Measure("of bandwidth", "%", "more", SHARE, lambda e: _percent(e.bandwidth_share), MOST),
    Measure("arithmetic", "GFLOP/s", "more", DONE, lambda e: e.flop_rate / 1e9),
    Measure("of compute", "%", "more", SHARE, lambda e: _percent(e.compute_share), MOST),
    Measure("least time", "s", "less", LEAST, lambda e: e.floor),
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of the machine for the model that an engine runs."""

    model: RunningModel

    @staticmethod
    def of(resolved: ResolvedConfig) -> Ceilings:
        return Ceilings(RunningModel.of(resolved))

    @property
    def device(self) -> Device:
        return self.model.device

    @property
    def notes(self) -> tuple[str, ...]:
        return ceiling_notes(self.device)

    def remark(self, label: str, runs: Sequence[LoadRun]) -> str:
        """Return the bottleneck of the run with the median time, in words."""
        typical = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
        efficiency = self._efficiency(typical)
        limit = f" is limited by {efficiency.bottleneck}" if efficiency.possible else ""
        return f"{label}{limit}: {efficiency.reason}; {WHAT_HELPS[efficiency.bottleneck]}."

    def achieved(self, runs: Sequence[LoadRun]) -> tuple[Figure, ...]:
        """Return the bytes and operations per second, and their shares of the limits."""
        efficiencies = [self._efficiency(run) for run in runs]
        return figures(ACHIEVED, efficiencies, every=False)

    def decode(self, batch: int, context: int) -> tuple[Figure, ...]:
        """Return the output rate of a decoding batch: expected and ceiling."""
        return self._rates("decode", [(1, decode(batch, context))], batch)

    def prefill(self, tokens: int, batch: int) -> tuple[Figure, ...]:
        """Return the prompt rate of prompts that share steps: expected and ceiling."""
        concurrency = self._together(tokens, batch)
        return self._rates(
            "prefill", [(1, PlannedStep(((concurrency, tokens, 0),)))], concurrency * tokens
        )

    def batch(self, count: int, traffic: Traffic) -> tuple[Figure, ...]:
        """Return the output rate of requests that run together from prompt to end."""
        fresh = max(1, traffic.prompt - traffic.shared)
        concurrency = self._together(fresh, count)
        steps: list[tuple[float, PlannedStep]] = [
            (count / concurrency, PlannedStep(((concurrency, fresh, traffic.prompt - fresh),)))
        ]
        if traffic.output > 1:
            steps.append((traffic.output - 1, decode(count, traffic.halfway)))
        return self._rates("output", steps, count * traffic.output)

    def steady(self, count: int, traffic: Traffic) -> tuple[Figure, ...]:
        """Return the output rate of a load that keeps `count` requests in the engine."""
        if not self.device.measured:
            return ()
        cache, scheduler = self.model.resolved.cache, self.model.resolved.scheduler
        if not cache.enable_prefix_caching:
            traffic = replace(traffic, shared=0)
        capacity = cache.num_blocks * cache.block_size // traffic.context
        budget = scheduler.max_num_batched_tokens
        serving = Serving(
            self.model.shape,
            self.model.setting,
            max(1, capacity),
            scheduler.max_num_seqs,
            budget,
            budget,
        )
        prediction = predict(serving, traffic, count)
        if prediction is None:
            return ()
        return (Figure("output expected", "tokens/s", (prediction.output_rate,), "more", STEADY),)

    def _together(self, tokens: int, count: int) -> int:
        """Return the number of prompts that fit into a step."""
        return min(count, max(1, self.model.resolved.scheduler.max_num_batched_tokens // tokens))

    def _efficiency(self, run: LoadRun) -> Efficiency:
        return self.model.efficiency(run.before, run.after, run.seconds)

    def _rates(
        self, name: str, steps: Sequence[tuple[float, PlannedStep]], tokens: int
    ) -> tuple[Figure, ...]:
        """Return the rates of `tokens` tokens that take the given numbers of steps."""
        if not self.device.rated:
            return ()
        times = [
            (count, step_time(self.model.shape, self.model.setting, step)) for count, step in steps
        ]
        rate = tokens / sum(count * time.floor for count, time in times)
        ceiling = Figure(f"{name} ceiling", "tokens/s", (rate,), "more", CEILING)
        if not self.device.measured:
            return (ceiling,)
        rate = tokens / sum(count * time.expected for count, time in times)
        return (Figure(f"{name} expected", "tokens/s", (rate,), "more", EXPECTED), ceiling)


def ceiling_notes(device: Device) -> tuple[str, ...]:
    """Return why there are no ceilings, or why they may be wrong."""
    if not device.rated:
        return (f"No ceilings to compare with. This machine's calibration: {device.unknown}",)
    return (f"{device.doubt[0].upper()}{device.doubt[1:]}.",) if device.doubt else ()
