"""A load test of a server: loads one after another, each measured as often as wished."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvik.planner.slo import Slo
from kvik_bench.load import serve_report
from kvik_bench.load.drive import Budget, ClosedLoop, Load, RunLog, drive
from kvik_bench.load.openai_target import OpenAITarget, Server, accepted, connected, first_model
from kvik_bench.load.serve_report import Measured
from kvik_bench.load.workload import Workload
from kvik_bench.report.result import Result

PROBE_TOKENS = 2
WATCH_PERIOD = 0.5  # seconds between two looks of whoever shows the progress
SPARE_FILES = 64  # descriptors for everything but connections

Watch = Callable[[str, RunLog, float], None]  # label, log, seconds since the start


@dataclass(frozen=True, slots=True)
class Level:
    """One load of a test."""

    label: str
    connections: int  # at most so many at a time
    load: Callable[[str], Load]  # for a seed


@dataclass(frozen=True, slots=True)
class LoadTest:
    """What to send and when. Each level and repeat has a seed of its own, or a prefix cache would
    know its prompts from the one before.

    Attributes:
        fresh: prompts share nothing with one another.
    """

    levels: tuple[Level, ...]
    workload: Callable[[str], Workload]  # for a seed
    budget: Budget
    slo: Slo | None = None
    think_time: float = 0.0
    repeats: int = 1
    warmup: int = 1  # requests
    seed: int = 0
    fresh: bool = True


@dataclass(slots=True)
class ServeBench:
    """Runs a test; what was measured so far can be had at any time, also after an interruption."""

    test: LoadTest
    server: Server
    logs: dict[str, list[RunLog]] = field(default_factory=dict)

    async def run(self, watch: Watch | None = None) -> None:
        """Raises `ConfigError` when the server cannot be reached or refuses everything."""
        test = self.test
        _allow_files(max(level.connections for level in test.levels) + SPARE_FILES)
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
    def completed(self) -> int:
        """Requests, warm-up not counted."""
        return sum(log.finished - log.failed for logs in self.logs.values() for log in logs)

    def result(self, facts: Mapping[str, str]) -> Result:
        slo = self.test.slo
        rows, remarks = [], []
        for label, logs in self.logs.items():
            runs = [Measured.of(log, slo) for log in logs if log.records]
            if runs:
                rows.append(serve_report.row(label, runs, slo))
                remarks += serve_report.remarks(label, runs, fresh=self.test.fresh)
        own = {
            "url": self.server.url,
            "model": self.server.model,
            "endpoint": self.server.endpoint,
            "fields sent": ", ".join([*self.server.dialect.names(), *self.server.extra]),
        }
        return Result(
            "serve", {**facts, **own}, tuple(rows), tuple(remarks), serve_report.charts(rows)
        )


async def _watch(watch: Watch | None, label: str, log: RunLog) -> None:
    started = time.monotonic()
    while watch is not None:
        await asyncio.sleep(WATCH_PERIOD)
        watch(label, log, time.monotonic() - started)


def _allow_files(wanted: int) -> None:
    """Raise the soft limit of open files, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
