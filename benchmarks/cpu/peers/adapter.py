"""What all adapters share: the job they are given, the clock they stop, the answer they print.

An adapter is a script, run by the engine's own Python: one JSON job as its argument, and as its
last line of output {"ready": seconds, "rates": {workload: tokens per second}}. Times are taken here
so that they mean the same for every engine:

- ready: from the start of the process to the first token of a prompt of one token, so that
  weights which are only mapped at first count as well;
- prefill: prompt tokens / time until every row has its first token;
- decode: tokens made after that moment / the time they took.

Only the standard library is used: this runs in every engine's environment.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

WARM_UP = 4  # output tokens of a run that is not counted
TOP_ID = 1000  # prompts are random ids below this, which every vocabulary has


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `prompt` tokens, `output` tokens each. One output token: prefill alone.

    Its rate is the median of `repeats` runs.
    """

    name: str
    prompt: int
    batch: int
    output: int
    repeats: int = 1


@dataclass(frozen=True)
class Job:
    """`started` is the time (seconds since the epoch) just before this process was started."""

    model: str
    threads: int
    started: float
    workloads: list[Workload]
    options: dict[str, Any]  # meant for this adapter

    @property
    def max_batch(self) -> int:
        return max(workload.batch for workload in self.workloads)

    @property
    def max_len(self) -> int:
        """Tokens of the longest row, with a few to spare."""
        return max(work.prompt + max(work.output, WARM_UP) for work in self.workloads) + 8


@dataclass
class Clock:
    """Which row got how many tokens, and when; runs from its making."""

    started: float = field(default_factory=time.perf_counter)
    events: list[tuple[float, int, int]] = field(default_factory=list)  # (time, row, tokens)

    def tokens(self, row: int, count: int) -> None:
        if count:
            self.events.append((time.perf_counter(), row, count))

    def rate(self, work: Workload) -> float:
        """Tokens per second, of the prompts or of the output."""
        first: dict[int, float] = {}
        made = [0] * work.batch
        for when, row, count in self.events:
            first.setdefault(row, when)
            made[row] += count
        if made != [work.output] * work.batch:
            raise SystemExit(f"{work.name}: rows have {made} tokens, not {work.output}")
        all_started = max(first.values())
        if work.output == 1:
            return work.batch * work.prompt / (all_started - self.started)
        after = sum(count for when, _, count in self.events if when > all_started)
        return after / (self.events[-1][0] - all_started)


class Engine(Protocol):
    def generate(self, prompts: list[list[int]], output: int, clock: Clock) -> None:
        """Complete all prompts greedily with exactly `output` tokens, told to `clock` as made."""


def read_job() -> Job:
    given = json.loads(sys.argv[1])
    workloads = [Workload(**work) for work in given.pop("workloads")]
    return Job(workloads=workloads, **given)


def answer(ready: float, rates: dict[str, float]) -> None:
    print("\n" + json.dumps({"ready": ready, "rates": rates}), flush=True)


def measure(start: Callable[[Job], Engine]) -> None:
    """Start an engine and run the job's workloads, each once for nothing before it counts."""
    job = read_job()
    engine = start(job)
    engine.generate([[1]], 1, Clock())
    ready = time.time() - job.started
    draw = random.Random(0)

    def run(work: Workload) -> float:
        prompts = [[draw.randrange(TOP_ID) for _ in range(work.prompt)] for _ in range(work.batch)]
        clock = Clock()
        engine.generate(prompts, work.output, clock)
        return clock.rate(work)

    rates = {}
    for work in job.workloads:
        run(Workload("warm-up", work.prompt, work.batch, WARM_UP))
        rates[work.name] = median(run(work) for _ in range(work.repeats))
    answer(ready, rates)
