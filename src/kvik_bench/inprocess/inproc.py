"""Runs a load on an engine in this process, in real time, and records when tokens arrive.

There is no client process, so a request counts as sent when it is due. A request that is due during
a step waits for the end of the step, as in a server's queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from kvik.config.config import ResolvedConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, RequestDelta
from kvik.engine.loop import Engine
from kvik.engine.output import OutputProcessor
from kvik.engine.stats import EngineStats
from kvik.errors import CapacityError, KvikError
from kvik.launch import start
from kvik_bench.load.metrics import RequestRecord

PATIENCE = 0.1  # seconds that a poll may block, during which Ctrl-C has no effect


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a load: greedy, with exactly `output_tokens` of output."""

    prompt: Sequence[int]
    output_tokens: int
    due: float = 0.0  # seconds after the start


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The outcome of a load. Records and answers are in the order of the requests."""

    started: float
    ended: float
    records: list[RequestRecord]
    answers: list[list[int]]  # token ids
    before: EngineStats
    after: EngineStats
    kv_usage: float  # highest reading of the share of KV blocks in use
    peak_bytes: int | None = None  # peak resident memory during the load; None: not read

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def run_jobs(engine: Engine, jobs: Sequence[BenchRequest]) -> LoadRun:
    """Serve all requests, each from the moment it is due.

    Raises:
        KvikError: a request can never be served (checked before any is), or a request failed.
    """
    load = _Load(engine, jobs)
    before = engine.loop.stats()
    start = time.monotonic()
    load.start(start)
    while load.unfinished:
        load.send_due()
        engine.loop.core.scheduler.more_expected = load.more_due
        if engine.loop.has_work:
            load.take(engine.loop.poll(min(PATIENCE, load.until_next_due())))
        else:
            time.sleep(load.until_next_due())
    end = time.monotonic()
    return LoadRun(
        start, end, load.records, load.answers, before, engine.loop.stats(), load.kv_usage
    )


@contextmanager
def loaded(resolved: ResolvedConfig) -> Iterator[Engine]:
    """Start an engine; it is freed at the end of the block."""
    engine = start(resolved)
    with closing(engine.loop):
        yield engine


@dataclass(slots=True)
class _Load:
    """The requests that the engine serves, and their records."""

    engine: Engine
    jobs: Sequence[BenchRequest]
    records: list[RequestRecord] = field(init=False)
    answers: list[list[int]] = field(init=False)
    unfinished: int = field(init=False)
    kv_usage: float = 0.0
    _requests: list[EngineRequest] = field(init=False)
    _unsent: deque[int] = field(init=False)  # indices of jobs, ordered by due time
    _text: OutputProcessor = field(init=False)

    def __post_init__(self) -> None:
        self._requests = [
            EngineRequest(
                str(i),
                job.prompt,
                SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True),
            )
            for i, job in enumerate(self.jobs)
        ]
        for request in self._requests:
            self.engine.loop.core.check(request)
        self.answers = [[] for _ in self.jobs]
        self.unfinished = len(self.jobs)
        self._unsent = deque(sorted(range(len(self.jobs)), key=lambda i: self.jobs[i].due))
        self._text = OutputProcessor(self.engine.tokenizer)

    def start(self, now: float) -> None:
        self.records = [
            RequestRecord(len(job.prompt), now + job.due, now + job.due) for job in self.jobs
        ]

    def send_due(self) -> None:
        now = time.monotonic()
        while self._unsent and self.records[self._unsent[0]].due <= now:
            request = self._requests[self._unsent[0]]
            try:
                self.engine.loop.add(request)
            except CapacityError:  # the queue is full: retry later
                return
            self._unsent.popleft()
            self._text.add(request, None, streaming=False)

    @property
    def more_due(self) -> bool:
        return bool(self._unsent)

    def until_next_due(self) -> float:
        if not self._unsent:
            return PATIENCE
        return max(0.0, self.records[self._unsent[0]].due - time.monotonic())

    def take(self, deltas: list[RequestDelta]) -> None:
        self._text.process(deltas)  # its cost is part of the engine's
        now = time.monotonic()
        for delta in deltas:
            index = int(delta.request_id)
            record = self.records[index]
            if delta.token_ids:
                record.chunk(now, len(delta.token_ids))
                self.answers[index] += delta.token_ids
            if delta.error is not None:
                raise KvikError("request", delta.error)
            if delta.finish_reason is not None:
                record.finished = now
                self.unfinished -= 1
                if delta.report is not None:
                    record.cached_tokens = delta.report.num_cached_tokens
        self.kv_usage = max(self.kv_usage, self.engine.loop.core.scheduler.kv.usage)
