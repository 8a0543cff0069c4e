"""The measures of a run in this process, each with its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvik_bench.inprocess.inproc import LoadRun
from kvik_bench.load.metrics import DEFINITIONS, RequestRecord, e2es, token_times, tpots, ttfts
from kvik_bench.report.result import Figure

Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class Measure(Generic[Subject]):
    """A figure of a run or of another subject.

    Attributes:
        of: from a subject to its value; None: there is nothing to measure.
        most: the largest possible value; None: unknown.
    """

    name: str
    unit: str
    better: Literal["more", "less"]
    definition: str
    of: Callable[[Subject], float | None]
    most: float | None = None

    def values(self, subjects: Iterable[Subject]) -> tuple[float, ...]:
        """Return the value of each subject that has one."""
        return tuple(value for subject in subjects if (value := self.of(subject)) is not None)

    def figure(self, values: tuple[float, ...]) -> Figure:
        return Figure(self.name, self.unit, values, self.better, self.definition, most=self.most)


def figures(
    measures: Iterable[Measure[Subject]], subjects: Sequence[Subject], *, every: bool = True
) -> tuple[Figure, ...]:
    """Return the figures of the measures that all subjects have; with `every` false, that any
    has."""
    results = []
    for measure in measures:
        values = measure.values(subjects)
        if values and (len(values) == len(subjects) or not every):
            results.append(measure.figure(values))
    return tuple(results)


RunMeasure = Measure[LoadRun]
Statistic = Callable[[NDArray[np.float64]], float]


def ratios(
    name: str,
    measure: RunMeasure,
    runs: Sequence[LoadRun],
    base: Sequence[LoadRun],
    definition: str,
) -> Figure:
    """Return the ratios of a measure to another subject's, round by round."""
    values = []
    for run, other in zip(runs, base, strict=True):
        above, below = measure.of(run), measure.of(other)
        assert above is not None and below is not None
        values.append(above / below)
    return Figure(name, "x", tuple(values), measure.better, definition)


def mean(values: NDArray[np.float64]) -> float:
    return float(values.mean())


def percentile(share: int) -> Statistic:
    return lambda values: float(np.percentile(values, share))


def milliseconds(
    name: str,
    times: Callable[[Sequence[RequestRecord]], NDArray[np.float64]],
    definition: str,
    statistic: Statistic = mean,
) -> RunMeasure:
    def of(run: LoadRun) -> float | None:
        values = times(run.records)
        return statistic(values) * 1e3 if len(values) else None

    return Measure(name, "ms", "less", definition, of)


def percentiles(
    name: str, times: Callable[[Sequence[RequestRecord]], NDArray[np.float64]], definition: str
) -> tuple[RunMeasure, ...]:
    return tuple(
        milliseconds(f"{name} p{share}", times, definition, percentile(share))
        for share in (50, 90, 99)
    )


def _prompt_tokens(run: LoadRun) -> int:
    return sum(record.prompt_tokens for record in run.records)


def _output_tokens(run: LoadRun) -> int:
    return sum(record.num_output_tokens for record in run.records)


def _first_tokens_done(run: LoadRun) -> float:
    """Return the time of the last request's first token."""
    return max(record.times[0] for record in run.records)


def _prefill_rate(run: LoadRun) -> float:
    return _prompt_tokens(run) / (_first_tokens_done(run) - run.started)


def decode_seconds(run: LoadRun) -> float:
    """Return the seconds since every request had its first token."""
    return run.ended - _first_tokens_done(run)


def _decode_rate(run: LoadRun) -> float | None:
    since = _first_tokens_done(run)
    tokens = sum(
        count
        for record in run.records
        for time, count in zip(record.times, record.tokens, strict=True)
        if time > since
    )
    return tokens / decode_seconds(run) if tokens else None


def _prefix_hits(run: LoadRun) -> float | None:
    queries = run.after.prefix_queries - run.before.prefix_queries
    return 100 * (run.after.prefix_hits - run.before.prefix_hits) / queries if queries else None


TTFT = milliseconds("TTFT", ttfts, f"{DEFINITIONS['ttft']}; mean over the requests")
TPOT = milliseconds("TPOT", tpots, f"{DEFINITIONS['tpot']}; mean over the requests")
E2E = milliseconds("E2E", e2es, f"{DEFINITIONS['e2e']}; mean over the requests")
TTFTS = percentiles("TTFT", ttfts, DEFINITIONS["ttft"])
ITLS = percentiles("ITL", token_times, DEFINITIONS["itl_token"])
E2ES = percentiles("E2E", e2es, DEFINITIONS["e2e"])

WALL: RunMeasure = Measure(
    "wall time", "s", "less", "from the start to the last token", lambda r: r.seconds
)
PREFILL: RunMeasure = Measure(
    "prefill",
    "tokens/s",
    "more",
    "prompt tokens / time until every request had its first output token",
    _prefill_rate,
)
DECODE: RunMeasure = Measure(
    "decode",
    "tokens/s",
    "more",
    "output tokens that came after every request had its first / the time they took",
    _decode_rate,
)
REQUESTS: RunMeasure = Measure(
    "requests",
    "requests/s",
    "more",
    DEFINITIONS["request_rate"],
    lambda run: len(run.records) / run.seconds,
)
INPUT: RunMeasure = Measure(
    "input",
    "tokens/s",
    "more",
    DEFINITIONS["input_rate"],
    lambda run: _prompt_tokens(run) / run.seconds,
)
OUTPUT: RunMeasure = Measure(
    "output",
    "tokens/s",
    "more",
    "output tokens / wall time, prompts included",
    lambda run: _output_tokens(run) / run.seconds,
)
TOTAL: RunMeasure = Measure(
    "total",
    "tokens/s",
    "more",
    DEFINITIONS["total_rate"],
    lambda run: (_prompt_tokens(run) + _output_tokens(run)) / run.seconds,
)
KV_USAGE: RunMeasure = Measure(
    "KV usage",
    "%",
    "less",
    "highest share of the KV cache's blocks that requests held, seen after steps, 5 ms apart",
    lambda run: 100 * run.kv_usage,
)
PREEMPTIONS: RunMeasure = Measure(
    "preemptions",
    "",
    "less",
    "times a request gave up its blocks, to be computed again",
    lambda run: run.after.preemptions - run.before.preemptions,
)
PREFIX_HITS: RunMeasure = Measure(
    "prefix hits",
    "%",
    "more",
    "share of the prompt tokens that the prefix cache had",
    _prefix_hits,
)
STEPS: RunMeasure = Measure(
    "steps", "", "less", "steps of the engine", lambda run: run.after.steps - run.before.steps
)
