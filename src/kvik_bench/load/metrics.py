"""The records of requests, and the measures of a run that need nothing else.

Percentiles interpolate linearly between the two nearest ranks: the p-th percentile of n sorted
values is at position p/100 * (n - 1), counted from 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvik.planner.serving import Slo
from kvik_bench.report.result import Measure

# The error of a request that the client ended early because the run was stopped.
INTERRUPTED = "interrupted"
CONNECT = "connect"  # no connection could be opened


@dataclass(slots=True)
class RequestRecord:
    """The record of a request, filled while the answer arrives. A chunk takes 12 bytes, so that
    long runs fit in memory.

    A request is completed when it has `finished` and no `error`.
    """

    prompt_tokens: int  # as planned, then as the engine counts them
    due: float  # when the load wanted it sent
    sent: float
    times: array[float] = field(default_factory=lambda: array("d"))  # arrival of each chunk
    tokens: array[int] = field(default_factory=lambda: array("I"))  # number in each chunk
    finished: float | None = None  # the end of the answer: its finish reason, or its last chunk
    output_tokens: int | None = None  # as the engine counts them; None: the sum over the chunks
    cached_tokens: int | None = None  # of the prompt, found in a prefix cache; None: not reported
    assumed: bool = False  # no token counts: one token was assumed for each chunk
    asked_tokens: int | None = None  # requested output tokens; None: no number was requested
    held: float = 0.0  # seconds it waited since due because too many requests were in flight
    error: str | None = None  # its kind, in a few words: errors are counted by it
    detail: str = ""  # further information about the error

    def chunk(self, time: float, tokens: int) -> None:
        """Record a chunk of output of `tokens` tokens, at least one."""
        self.times.append(time)
        self.tokens.append(tokens)

    @property
    def completed(self) -> bool:
        return self.finished is not None and self.error is None

    @property
    def num_output_tokens(self) -> int:
        return sum(self.tokens) if self.output_tokens is None else self.output_tokens

    @property
    def even(self) -> bool:
        """Whether the number of tokens of each chunk is known."""
        return self.output_tokens is None or sum(self.tokens) == self.output_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to the first output; None if there was none."""
        return self.times[0] - self.sent if self.times else None

    @property
    def e2e(self) -> float | None:
        return None if self.finished is None else self.finished - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        if self.finished is None or not self.times or self.num_output_tokens < 2:
            return None
        return (self.finished - self.times[0]) / (self.num_output_tokens - 1)

    @property
    def lag(self) -> float:
        """Seconds by which the client sent it too late, without the time it was held."""
        return self.sent - self.due - self.held

    def fail(self, kind: str, detail: str = "") -> None:
        self.error, self.detail = kind, detail


DEFINITIONS: Mapping[str, str] = {
    "ttft": "send -> first non-empty output token",
    "tpot": "(E2E - TTFT) / (output tokens - 1), of answers with two tokens or more",
    "itl": "gap between two chunks of output within a request, the first chunk excluded",
    "itl_token": "gap before a chunk / its tokens, counted once for each; the first chunk excluded",
    "e2e": "send -> end of the answer (its finish reason, else its last output)",
    "lag": "due -> really sent, less the time held by the limit of requests in flight",
}


class RecordedRun(Protocol):
    """A run of a load, on a server or on an engine in this process."""

    @property
    def started(self) -> float: ...

    @property
    def ended(self) -> float: ...

    @property
    def records(self) -> Sequence[RequestRecord]: ...


RunMeasure = Measure[RecordedRun]
Run = TypeVar("Run")
Values = NDArray[np.float64]
Statistic = Callable[[Values], float]


def completed(run: RecordedRun) -> list[RequestRecord]:
    return [record for record in run.records if record.completed]


def wall_time(run: RecordedRun) -> float:
    return max(run.ended - run.started, 1e-9)


def prompt_tokens(run: RecordedRun) -> int:
    """Return the prompt tokens of completed requests."""
    return sum(record.prompt_tokens for record in completed(run))


def output_tokens(run: RecordedRun) -> int:
    """Return the output tokens that arrived, without those of failed requests."""
    stopped = [record for record in run.records if record.error == INTERRUPTED]
    return sum(record.num_output_tokens for record in (*completed(run), *stopped))


REQUESTS: RunMeasure = Measure(
    "requests",
    "requests/s",
    "more",
    "completed requests / wall time",
    lambda run: len(completed(run)) / wall_time(run),
)
INPUT: RunMeasure = Measure(
    "input",
    "tokens/s",
    "more",
    "prompt tokens of completed requests / wall time",
    lambda run: prompt_tokens(run) / wall_time(run),
)
OUTPUT: RunMeasure = Measure(
    "output",
    "tokens/s",
    "more",
    "output tokens / wall time, prompts included",
    lambda run: output_tokens(run) / wall_time(run),
)
TOTAL: RunMeasure = Measure(
    "total",
    "tokens/s",
    "more",
    "input and output tokens / wall time",
    lambda run: (prompt_tokens(run) + output_tokens(run)) / wall_time(run),
)


def goodput(slo: Slo) -> RunMeasure:
    """Return the rate of the requests that met every limit."""

    def of(run: RecordedRun) -> float:
        kept = (slo.excess(r.ttft, r.tpot, r.e2e) <= 1.0 for r in completed(run))
        return sum(kept) / wall_time(run)

    definition = f"completed requests that met every SLO / wall time; SLO: {slo}"
    return Measure("goodput", "requests/s", "more", definition, of)


def mean(values: Values) -> float:
    return float(values.mean())


def percentile(share: int) -> Statistic:
    return lambda values: float(np.percentile(values, share))


def milliseconds(
    name: str, seconds: Callable[[Run], Values], definition: str, statistic: Statistic = mean
) -> Measure[Run]:
    """Return a measure of a sample of seconds; a run without samples has none."""

    def of(run: Run) -> float | None:
        values = seconds(run)
        return statistic(values) * 1e3 if len(values) else None

    return Measure(name, "ms", "less", definition, of)


def percentiles(
    name: str, times: Callable[[Sequence[RequestRecord]], Values], definition: str
) -> tuple[RunMeasure, ...]:
    """Return p50, p90 and p99 of times of completed requests."""
    return tuple(
        milliseconds(f"{name} p{share}", of_completed(times), definition, percentile(share))
        for share in (50, 90, 99)
    )


def of_completed(
    times: Callable[[Sequence[RequestRecord]], Values],
) -> Callable[[RecordedRun], Values]:
    return lambda run: times(completed(run))


def ttfts(records: Sequence[RequestRecord]) -> Values:
    return np.array([ttft for record in records if (ttft := record.ttft) is not None])


def tpots(records: Sequence[RequestRecord]) -> Values:
    return np.array([tpot for record in records if (tpot := record.tpot) is not None])


def e2es(records: Sequence[RequestRecord]) -> Values:
    return np.array([e2e for record in records if (e2e := record.e2e) is not None])


def gaps(records: Sequence[RequestRecord]) -> Values:
    """Return the seconds between neighbouring chunks, over all records."""
    return _joined([np.diff(np.asarray(record.times)) for record in records])


def token_times(records: Sequence[RequestRecord]) -> Values:
    """Return the seconds per token after the first chunk, one value for each token."""
    parts = []
    for record in records:
        if record.even:
            counts = np.asarray(record.tokens)[1:]
            parts.append(np.repeat(np.diff(np.asarray(record.times)) / counts, counts))
    return _joined(parts)


def _joined(parts: list[Values]) -> Values:
    return np.concatenate(parts) if parts else np.empty(0)
