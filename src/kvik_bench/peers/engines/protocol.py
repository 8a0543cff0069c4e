"""Shared by all adapters: their job, the clock, and the answer they write.

An adapter is a file with `run(job) -> Answer`. It is run by the engine's own Python, which may lack
kvik. So this file uses only the standard library, and adapters import each other only by relative
names. Times are taken here, so that they mean the same for every engine:

- start: from the start of the process to the first token of a prompt of one token, so that
  loading of lazily mapped weights is included;
- prefill: prompt tokens / time until every row has its first token;
- decode: tokens generated after that moment / the time they took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Prompts = list[list[int]]  # [rows, prompt tokens]: all of one length

WARM_UP = 4  # output tokens of the warm-up run
SPARE = 8  # spare tokens of a row beyond prompt and output


class EngineFailure(Exception):
    """The engine cannot do this job; the message says why, in one line."""


@dataclass(frozen=True)
class Workload:
    """Prompts that are completed greedily with exactly `output` tokens; with one, only prefill."""

    name: str
    output: int
    warm_up: Prompts  # prompts of the warm-up run
    batches: list[Prompts]  # prompts of each measured run

    @property
    def batch(self) -> int:
        return len(self.warm_up)

    @property
    def prompt(self) -> int:
        return len(self.warm_up[0])

    @property
    def length(self) -> int:
        """Largest number of tokens of a row."""
        return self.prompt + max(self.output, WARM_UP) + SPARE


@dataclass(frozen=True)
class Job:
    """The work of one process; `started` is the time (seconds since the epoch) just before its
    start."""

    model: str
    threads: int
    started: float
    workloads: list[Workload]
    options: dict[str, Any]  # of this adapter

    @property
    def max_batch(self) -> int:
        return max(workload.batch for workload in self.workloads)

    @property
    def max_len(self) -> int:
        """Tokens of the longest row, including the spare ones."""
        return max(workload.length for workload in self.workloads)


@dataclass(frozen=True)
class Answer:
    """The results of an adapter; if it failed, only `failed` is set."""

    engine: str = ""  # name and version
    start: float = 0.0  # seconds
    # Workload -> tokens per second of each batch.
    rates: dict[str, list[float]] = field(default_factory=dict)
    # Workload -> the first batch's output, [rows, output]; empty if the engine does not report
    # tokens.
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    failed: str = ""


class Clock:
    """Records the tokens of each row and their times; starts when it is created."""

    def __init__(self, rows: int, now: Callable[[], float] = time.perf_counter) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self._now = now
        self._started = now()
        self._events: list[tuple[float, int, int]] = []  # (time, row, tokens)

    def tokens(self, row: int, ids: Sequence[int]) -> None:
        if ids:
            self._events.append((self._now(), row, len(ids)))
            self.rows[row].extend(ids)

    def rate(self, prompt: int, output: int) -> float:
        """Return tokens per second, of the prompts (`output` is 1) or of the output.

        Raises:
            EngineFailure: a row has another number of tokens, or all came at once.
        """
        made = [len(row) for row in self.rows]
        if made != [output] * len(made):
            raise EngineFailure(f"its rows have {made} tokens, not {output} each")
        first: dict[int, float] = {}
        for when, row, _ in self._events:
            first.setdefault(row, when)
        all_started = max(first.values())
        if output == 1:
            return len(made) * prompt / (all_started - self._started)
        after = sum(count for when, _, count in self._events if when > all_started)
        if not after:
            raise EngineFailure("its tokens came all at once: no rate can be measured")
        return after / (self._events[-1][0] - all_started)


class Engine(Protocol):
    """A loaded model."""

    name: str  # and version

    def generate(self, prompts: Prompts, output: int, clock: Clock) -> None:
        """Complete all prompts greedily with exactly `output` tokens, reported to `clock`."""


def measure(engine: Engine, job: Job) -> Answer:
    """Run the job's workloads, each after a warm-up."""
    engine.generate([[1]], 1, Clock(1))
    start = time.time() - job.started
    answer = Answer(engine.name, start)
    for work in job.workloads:
        engine.generate(work.warm_up, WARM_UP, Clock(work.batch))
        rates = []
        for prompts in work.batches:
            clock = Clock(work.batch)
            engine.generate(prompts, work.output, clock)
            rates.append(clock.rate(work.prompt, work.output))
            answer.tokens.setdefault(work.name, clock.rows)
        answer.rates[work.name] = rates
    return answer
