"""Runs a load test of a server, with several loads measured repeatedly, and makes its report."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvik.files import allow_files
from kvik.planner.serving import Slo
from kvik_bench.load import metrics
from kvik_bench.load.drive import Budget, ClosedLoop, LoadTest, RunLog, drive
from kvik_bench.load.metrics import DEFINITIONS, LoadMetrics, RequestRecord, Spread
from kvik_bench.load.openai_target import (
    OpenAITarget,
    TargetServer,
    accepted,
    connected,
    first_model,
)
from kvik_bench.report.result import Chart, Figure, Result, Row

# Above these limits the client may have influenced the measurement.
MAX_LAG = 0.010  # seconds, 99th percentile
MAX_CPU_SHARE = 0.85  # of one core: Python runs on one

# Largest plausible cached share of prompts with nothing in common but a chat template.
MAX_CACHED_SHARE = 0.5

# Share of the requested tokens below which answers must have ended early.
MIN_ANSWERED_SHARE = 0.95

MAX_SERIES = 5000  # values kept of a distribution for plots

CPU_SHARE = "processor time of the client / wall time; it cannot use more than one core"
LOOP_LAG = "how late the client's event loop woke up, sampled: the error of every time above"
HELD = "how long requests that were due waited because too many were in flight"


@dataclass(frozen=True, slots=True)
class Measured:
    """One finished run of a load."""

    log: RunLog
    metrics: LoadMetrics
    loop_lag: Spread | None

    @classmethod
    def of(cls, log: RunLog, slo: Slo | None) -> Measured:
        summary = metrics.summarise(log.records, log.started, log.ended, slo)
        return cls(log, summary, metrics.spread(np.asarray(log.loop_lag)))


def row(label: str, runs: Sequence[Measured], slo: Slo | None) -> Row:
    """Return the row of a load from its runs."""
    figures = [
        Figure(name, unit, tuple(getattr(run.metrics, field) for run in runs), "more", definition)
        for name, unit, field, definition in _rates(slo)
    ]
    for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2e")):
        figures += _spread_figures(name, [getattr(run.metrics, key) for run in runs], key)
        if key == "itl" and _several_tokens(runs):
            per_token = [run.metrics.itl_token for run in runs]
            figures += _spread_figures("ITL per token", per_token, "itl_token")
    figures += _client_figures(runs)
    records = [record for run in runs for record in run.log.records if record.completed]
    return Row(label, tuple(figures), _row_facts(runs), _series(records))


def _rates(slo: Slo | None) -> list[tuple[str, str, str, str]]:
    """Return (name, unit, field of the metrics, definition) of each rate."""
    rates = [
        ("request throughput", "requests/s", "request_rate", DEFINITIONS["request_rate"]),
        ("output throughput", "tokens/s", "output_rate", DEFINITIONS["output_rate"]),
        ("input throughput", "tokens/s", "input_rate", DEFINITIONS["input_rate"]),
        ("total throughput", "tokens/s", "total_rate", DEFINITIONS["total_rate"]),
    ]
    if slo is not None:
        rates.append(("goodput", "requests/s", "goodput", f"{DEFINITIONS['goodput']}; SLO: {slo}"))
    return rates


def charts(rows: Sequence[Row]) -> tuple[Chart, ...]:
    """Return the distributions and, for several loads, curves of latency over throughput."""
    curves = (
        Chart("curve", "latency over throughput", "TTFT p50", "output throughput"),
        Chart("curve", "time per token over throughput", "TPOT p50", "output throughput"),
    )
    distributions = (
        Chart("ecdf", "time to first token", "TTFT, ms"),
        Chart("ecdf", "time between tokens", "ITL, ms"),
        Chart("ecdf", "whole answers", "E2E, ms"),
        Chart("points", "time to first token as the run went on", "TTFT, ms", "sent, s"),
    )
    return (*curves, *distributions) if len(rows) > 1 else distributions


def remarks(label: str, runs: Sequence[Measured], *, fresh: bool) -> list[str]:
    """Return the reasons to doubt the figures of a load.

    Args:
        fresh: prompts have nothing in common, so a prefix cache should have none.
    """
    texts = _errors(runs) + _client_limits(runs)
    completed = sum(run.metrics.completed for run in runs)
    delays = [record.held for run in runs for record in run.log.records if record.held > 0]
    total = sum(run.metrics.requests for run in runs)
    if delays:
        texts.append(
            f"{len(delays)} of {total} requests were held back, up to {max(delays):.1f} s, by the "
            "limit of requests in flight: the server does not keep up with this load"
        )
    share = _cached_share(runs)
    if fresh and share is not None and share > MAX_CACHED_SHARE:
        texts.append(
            f"the server found {share:.0%} of the prompt tokens in its prefix cache: "
            "has it seen them before, in a run with the same --seed?"
        )
    texts += _short_answers(runs)
    assumed = sum(run.metrics.assumed for run in runs)
    if assumed:
        texts.append(
            f"in {assumed} of {completed} answers the server did not count tokens: one token was "
            "assumed for each chunk"
        )
    uneven = sum(run.metrics.uneven for run in runs)
    if uneven:
        texts.append(
            f"in {uneven} of {completed} answers chunks and tokens differ in number: ITL is per "
            "chunk, TPOT per token"
        )
    interrupted = sum(run.metrics.interrupted for run in runs)
    if interrupted:
        texts.append(
            f"{interrupted} of {total} requests were interrupted and count only by their tokens"
        )
    return [f"{label}: {text}." for text in texts]


def _errors(runs: Sequence[Measured]) -> list[str]:
    total = sum(run.metrics.requests for run in runs)
    kinds = Counter[str]()
    for run in runs:
        kinds.update(run.metrics.errors)
    texts = []
    for kind, count in kinds.items():
        examples = (r.detail for run in runs for r in run.log.records if r.error == kind)
        example = next(filter(None, examples), "")
        because = f" ({example})" if example else ""
        texts.append(f"{count} of {total} requests failed: {kind}{because}")
    if texts and any(run.metrics.completed for run in runs):
        texts.append(
            "times are those of completed requests alone: if slow requests fail, the server looks "
            "faster than it is"
        )
    return texts


def _short_answers(runs: Sequence[Measured]) -> list[str]:
    """Return a remark if answers ended early: a server may accept `ignore_eos` and ignore it."""
    done = [r for run in runs for r in run.log.records if r.completed and r.asked_tokens]
    requested = sum(record.asked_tokens or 0 for record in done)
    got = sum(record.num_output_tokens for record in done)
    if got >= MIN_ANSWERED_SHARE * requested:
        return []
    return [
        f"answers ended early, with {got:,} of the {requested:,} tokens asked for, so the load was "
        "lighter than it should be: this server has no `ignore_eos` (--extra-body can give its "
        "own option, such as a logit_bias against the end of text), has no space for more, or "
        "ends a request when another one arrives"
    ]


def _client_limits(runs: Sequence[Measured]) -> list[str]:
    """Return a remark if the client itself was the bottleneck in any run."""
    texts = []
    share = max(run.log.cpu_share for run in runs)
    if share > MAX_CPU_SHARE:
        texts.append(f"it used {share:.0%} of a core, and it cannot use more than one")
    lag = max((run.metrics.lag.p99 for run in runs if run.metrics.lag), default=0.0)
    if lag > MAX_LAG:
        texts.append(f"it sent requests up to {lag * 1e3:.0f} ms late (p99)")
    loop_lag = max((run.loop_lag.p99 for run in runs if run.loop_lag), default=0.0)
    if loop_lag > MAX_LAG:
        texts.append(f"its event loop woke up to {loop_lag * 1e3:.0f} ms late (p99)")
    if not texts:
        return []
    if share < MAX_CPU_SHARE / 2:
        texts.append(
            f"it used {share:.0%} of a core on the whole: other processes, or bursts of work, "
            "delayed it"
        )
    return [
        f"THE CLIENT WAS A BOTTLENECK: {'; '.join(texts)}. The figures may include its own delay: "
        "use less load, an idle machine, or several clients"
    ]


def _client_figures(runs: Sequence[Measured]) -> list[Figure]:
    figures = [
        *_percentile("send lag p99", [run.metrics.lag for run in runs], DEFINITIONS["lag"]),
        *_percentile("event loop lag p99", [run.loop_lag for run in runs], LOOP_LAG),
        Figure(
            "client CPU",
            "%",
            tuple(100 * run.log.cpu_share for run in runs),
            "less",
            CPU_SHARE,
        ),
    ]
    delays = [metrics.spread(np.array([r.held for r in run.log.records])) for run in runs]
    if any(spread and spread.highest > 0 for spread in delays):
        figures += _percentile("held p99", delays, HELD)
    return figures


def _percentile(name: str, spreads: Sequence[Spread | None], definition: str) -> list[Figure]:
    values = tuple(spread.p99 * 1e3 for spread in spreads if spread is not None)
    return [Figure(name, "ms", values, "less", definition)] if values else []


def _spread_figures(name: str, spreads: Sequence[Spread | None], field: str) -> list[Figure]:
    """Return mean and percentiles in milliseconds; nothing if no run has them."""
    run_spreads = [spread for spread in spreads if spread is not None]
    if not run_spreads:
        return []
    return [
        Figure(
            f"{name} {column}",
            "ms",
            tuple(getattr(spread, column) * 1e3 for spread in run_spreads),
            "less",
            DEFINITIONS[field],
        )
        for column in ("mean", "p50", "p90", "p99")
    ]


def _several_tokens(runs: Sequence[Measured]) -> bool:
    """Return whether any chunk after the first had more than one token."""
    return any(max(record.tokens[1:], default=1) > 1 for run in runs for record in run.log.records)


def _row_facts(runs: Sequence[Measured]) -> Mapping[str, str]:
    completed = sum(run.metrics.completed for run in runs)
    failed = sum(sum(run.metrics.errors.values()) for run in runs)
    prompt_tokens = sum(run.metrics.prompt_tokens for run in runs)
    output_tokens = sum(run.metrics.output_tokens for run in runs)
    facts = {
        "requests": f"{completed} completed, {failed} failed",
        "wall time": f"{sum(run.metrics.seconds for run in runs):.1f} s",
        "tokens": f"{prompt_tokens:,} in, {output_tokens:,} out",
    }
    share = _cached_share(runs)
    if share is not None:
        facts["prefix cache"] = f"{share:.0%} of the prompt tokens"
    return facts


def _cached_share(runs: Sequence[Measured]) -> float | None:
    """Return the cached share of the prompt tokens; None if the server does not report it."""
    prompt_tokens = sum(run.metrics.prompt_tokens for run in runs)
    cached = [run.metrics.cached_tokens for run in runs if run.metrics.cached_tokens is not None]
    return sum(cached) / prompt_tokens if cached and prompt_tokens else None


def _series(records: Sequence[RequestRecord]) -> Mapping[str, tuple[float, ...]]:
    """Return distributions for plots, thinned evenly if they are long."""
    first = min((record.due for record in records), default=0.0)
    ttft_records = [record for record in records if record.ttft is not None]
    series = {
        "TTFT, ms": metrics.ttfts(ttft_records) * 1e3,
        "TPOT, ms": metrics.tpots(records) * 1e3,
        "ITL, ms": np.sort(metrics.gaps(records)) * 1e3,  # sorted: thinning keeps its shape
        "E2E, ms": metrics.e2es(records) * 1e3,
        "sent, s": np.array([record.sent - first for record in ttft_records]),
    }
    return {name: _thinned(values) for name, values in series.items() if len(values)}


def _thinned(values: NDArray[np.float64]) -> tuple[float, ...]:
    if len(values) <= MAX_SERIES:
        return tuple(values.tolist())
    places = np.linspace(0, len(values) - 1, MAX_SERIES).astype(np.int64)
    return tuple(values[places].tolist())


PROBE_TOKENS = 2
WATCH_PERIOD = 0.5  # seconds between reports of progress
SPARE_FILES = 64  # descriptors for everything but connections

Watch = Callable[[str, RunLog, float], None]  # label, log, seconds since the start


@dataclass(slots=True)
class ServeBench:
    """Runs a test; results so far are available at any time, also after an interruption."""

    test: LoadTest
    server: TargetServer
    logs: dict[str, list[RunLog]] = field(default_factory=dict)

    async def run(self, watch: Watch | None = None) -> None:
        """Run all loads; raises `ConfigError` if the server cannot be used at all."""
        test = self.test
        allow_files(max(level.connections for level in test.levels) + SPARE_FILES)
        async with connected(self.server) as session:
            if not self.server.model:
                model = await first_model(self.server, session)
                self.server = replace(self.server, model=model)
            first = test.workload(f"{test.seed}/warm-up")
            probe = replace(first.conversation(0).request(()), output_tokens=PROBE_TOKENS)
            self.server = await accepted(self.server, session, probe)
            target = OpenAITarget(self.server, session)
            if test.warmup:
                users = min(test.warmup, test.levels[0].connections)
                await drive(ClosedLoop(users), target, first, Budget(test.warmup), RunLog())
            for repeat in range(test.repeats):
                for level in test.levels:
                    log = RunLog()
                    self.logs.setdefault(level.label, []).append(log)
                    seed = f"{test.seed}/{level.label}/{repeat}"
                    load, workload = level.load(seed), test.workload(seed)
                    watching = asyncio.create_task(_watch(watch, level.label, log))
                    try:
                        await drive(load, target, workload, test.budget, log, test.think_time)
                    finally:
                        watching.cancel()
                        with suppress(asyncio.CancelledError):
                            await watching

    @property
    def succeeded(self) -> bool:
        """Whether requests were completed and none failed, without warm-up."""
        logs = [log for logs in self.logs.values() for log in logs]
        return any(log.finished for log in logs) and not any(log.failed for log in logs)

    def result(self, facts: Mapping[str, str]) -> Result:
        slo = self.test.slo
        rows: list[Row] = []
        notes: list[str] = []
        for label, logs in self.logs.items():
            runs = [Measured.of(log, slo) for log in logs if log.records]
            if runs:
                rows.append(row(label, runs, slo))
                notes += remarks(label, runs, fresh=self.test.fresh)
        server_facts = {
            "url": self.server.url,
            "model": self.server.model,
            "endpoint": self.server.endpoint,
            "fields sent": ", ".join([*self.server.dialect.names(), *self.server.extra]),
        }
        return Result("serve", {**facts, **server_facts}, tuple(rows), tuple(notes), charts(rows))


async def _watch(watch: Watch | None, label: str, log: RunLog) -> None:
    started = time.monotonic()
    while watch is not None:
        await asyncio.sleep(WATCH_PERIOD)
        watch(label, log, time.monotonic() - started)
