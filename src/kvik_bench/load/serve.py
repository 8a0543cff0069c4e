"""Runs a load test of a server, with several loads measured repeatedly, and makes its report."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from kvik.files import allow_files
from kvik.planner.serving import Slo
from kvik_bench.load.drive import Budget, ClosedLoop, LoadTest, RunLog, drive
from kvik_bench.load.metrics import (
    DEFINITIONS,
    INPUT,
    INTERRUPTED,
    OUTPUT,
    REQUESTS,
    TOTAL,
    RequestRecord,
    RunMeasure,
    Values,
    e2es,
    gaps,
    goodput,
    milliseconds,
    of_completed,
    output_tokens,
    percentile,
    percentiles,
    prompt_tokens,
    token_times,
    tpots,
    ttfts,
    wall_time,
)
from kvik_bench.load.openai_target import (
    OpenAITarget,
    TargetServer,
    accepted,
    connected,
    first_model,
)
from kvik_bench.report.result import Chart, Measure, Result, Row, figures

# Above these limits the client may have influenced the measurement.
MAX_LAG = 10.0  # milliseconds, 99th percentile
MAX_CPU_SHARE = 0.85  # of one core: Python runs on one

# Largest plausible cached share of prompts with nothing in common but a chat template.
MAX_CACHED_SHARE = 0.5

# Share of the requested tokens below which answers must have ended early.
MIN_ANSWERED_SHARE = 0.95

MAX_SERIES = 5000  # values kept of a distribution for plots

CPU_SHARE = "processor time of the client / wall time; it cannot use more than one core"
LOOP_LAG = "how late the client's event loop woke up, sampled: the error of every time above"
RECEIVED = "output tokens received (failed requests excluded) / wall time"
THROUGHPUT = (
    replace(REQUESTS, name="request throughput"),
    replace(OUTPUT, name="output throughput", definition=RECEIVED),
    replace(INPUT, name="input throughput"),
    replace(TOTAL, name="total throughput"),
)


def _spread(
    name: str, times: Callable[[Sequence[RequestRecord]], Values], definition: str
) -> tuple[RunMeasure, ...]:
    """Return the mean and percentiles of times of completed requests."""
    mean = milliseconds(f"{name} mean", of_completed(times), definition)
    return mean, *percentiles(name, times, definition)


FIRST = _spread("TTFT", ttfts, DEFINITIONS["ttft"])
BETWEEN = (*_spread("TPOT", tpots, DEFINITIONS["tpot"]), *_spread("ITL", gaps, DEFINITIONS["itl"]))
PER_TOKEN = _spread("ITL per token", token_times, DEFINITIONS["itl_token"])
WHOLE = _spread("E2E", e2es, DEFINITIONS["e2e"])

SEND_LAG: Measure[RunLog] = milliseconds(
    "send lag p99",
    lambda log: np.array([record.lag for record in log.records]),
    DEFINITIONS["lag"],
    percentile(99),
)
WAKE_LAG: Measure[RunLog] = milliseconds(
    "event loop lag p99", lambda log: np.asarray(log.loop_lag), LOOP_LAG, percentile(99)
)
CLIENT_CPU: Measure[RunLog] = Measure(
    "client CPU", "%", "less", CPU_SHARE, lambda log: 100 * log.cpu_share
)
HELD: Measure[RunLog] = milliseconds(
    "held p99",
    lambda log: np.array([record.held for record in log.records]),
    "how long requests that were due waited because too many were in flight",
    percentile(99),
)


def row(label: str, runs: Sequence[RunLog], slo: Slo | None) -> Row:
    """Return the row of a load from its runs."""
    records = [record for run in runs for record in run.records]
    several_tokens = any(max(record.tokens[1:], default=1) > 1 for record in records)
    measures: list[Measure[RunLog]] = [*THROUGHPUT, *([] if slo is None else [goodput(slo)])]
    measures += [*FIRST, *BETWEEN, *(PER_TOKEN if several_tokens else ()), *WHOLE]
    measures += [SEND_LAG, WAKE_LAG, CLIENT_CPU]
    measures += [HELD] * any(record.held > 0 for record in records)
    done = [record for record in records if record.completed]
    return Row(label, figures(measures, runs, every=False), _row_facts(runs), _series(done))


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


def remarks(label: str, runs: Sequence[RunLog], *, fresh: bool) -> list[str]:
    """Return the reasons to doubt the figures of a load.

    Args:
        fresh: prompts have nothing in common, so a prefix cache should have none.
    """
    records = [record for run in runs for record in run.records]
    done = [record for record in records if record.completed]
    texts = _errors(records) + _client_limits(runs)
    delays = [record.held for record in records if record.held > 0]
    if delays:
        texts.append(
            f"{len(delays)} of {len(records)} requests were held back, up to {max(delays):.1f} s, "
            "by the limit of requests in flight: the server does not keep up with this load"
        )
    share = _cached_share(done)
    if fresh and share is not None and share > MAX_CACHED_SHARE:
        texts.append(
            f"the server found {share:.0%} of the prompt tokens in its prefix cache: "
            "has it seen them before, in a run with the same --seed?"
        )
    texts += _short_answers(done)
    assumed = sum(record.assumed for record in done)
    if assumed:
        texts.append(
            f"in {assumed} of {len(done)} answers the server did not count tokens: one token was "
            "assumed for each chunk"
        )
    uneven = sum(not record.even for record in done)
    if uneven:
        texts.append(
            f"in {uneven} of {len(done)} answers chunks and tokens differ in number: ITL is per "
            "chunk, TPOT per token"
        )
    interrupted = sum(record.error == INTERRUPTED for record in records)
    if interrupted:
        texts.append(
            f"{interrupted} of {len(records)} requests were interrupted and count only by their "
            "tokens"
        )
    return [f"{label}: {text}." for text in texts]


def _errors(records: Sequence[RequestRecord]) -> list[str]:
    failed = [record for record in records if record.error not in (None, INTERRUPTED)]
    texts = []
    for kind, count in Counter(record.error for record in failed).most_common():
        examples = (record.detail for record in failed if record.error == kind)
        example = next(filter(None, examples), "")
        because = f" ({example})" if example else ""
        texts.append(f"{count} of {len(records)} requests failed: {kind}{because}")
    if texts and any(record.completed for record in records):
        texts.append(
            "times are those of completed requests alone: if slow requests fail, the server looks "
            "faster than it is"
        )
    return texts


def _short_answers(records: Sequence[RequestRecord]) -> list[str]:
    """Return a remark if answers ended early: a server may accept `ignore_eos` and ignore it."""
    done = [record for record in records if record.asked_tokens]
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


def _client_limits(runs: Sequence[RunLog]) -> list[str]:
    """Return a remark if the client itself was the bottleneck in any run."""
    texts = []
    share = max(run.cpu_share for run in runs)
    if share > MAX_CPU_SHARE:
        texts.append(f"it used {share:.0%} of a core, and it cannot use more than one")
    lag = max(SEND_LAG.values(runs), default=0.0)
    if lag > MAX_LAG:
        texts.append(f"it sent requests up to {lag:.0f} ms late (p99)")
    loop_lag = max(WAKE_LAG.values(runs), default=0.0)
    if loop_lag > MAX_LAG:
        texts.append(f"its event loop woke up to {loop_lag:.0f} ms late (p99)")
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


def _row_facts(runs: Sequence[RunLog]) -> Mapping[str, str]:
    records = [record for run in runs for record in run.records]
    done = [record for record in records if record.completed]
    failed = sum(record.error not in (None, INTERRUPTED) for record in records)
    facts = {
        "requests": f"{len(done)} completed, {failed} failed",
        "wall time": f"{sum(map(wall_time, runs)):.1f} s",
        "tokens": f"{sum(map(prompt_tokens, runs)):,} in, {sum(map(output_tokens, runs)):,} out",
    }
    share = _cached_share(done)
    if share is not None:
        facts["prefix cache"] = f"{share:.0%} of the prompt tokens"
    return facts


def _cached_share(done: Sequence[RequestRecord]) -> float | None:
    """Return the cached share of the prompt tokens; None if the server does not report it."""
    num_prompt = sum(record.prompt_tokens for record in done)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    return sum(cached) / num_prompt if cached and num_prompt else None


def _series(records: Sequence[RequestRecord]) -> Mapping[str, tuple[float, ...]]:
    """Return distributions for plots, thinned evenly if they are long."""
    first = min((record.due for record in records), default=0.0)
    ttft_records = [record for record in records if record.ttft is not None]
    series = {
        "TTFT, ms": ttfts(ttft_records) * 1e3,
        "TPOT, ms": tpots(records) * 1e3,
        "ITL, ms": np.sort(gaps(records)) * 1e3,  # sorted: thinning keeps its shape
        "E2E, ms": e2es(records) * 1e3,
        "sent, s": np.array([record.sent - first for record in ttft_records]),
    }
    return {name: _thinned(values) for name, values in series.items() if len(values)}


def _thinned(values: Values) -> tuple[float, ...]:
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
            runs = [log for log in logs if log.records]
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
