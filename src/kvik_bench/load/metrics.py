"""Computes the figures of a load test from the records of its requests, each with its definition.

Percentiles interpolate linearly between the two nearest ranks: the p-th percentile of n sorted
values is at position p/100 * (n - 1), counted from 0.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvik.planner.serving import Slo

# The error of a request that the client ended early because the run was stopped.
INTERRUPTED = "interrupted"


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
    "request_rate": "completed requests / wall time",
    "input_rate": "prompt tokens of completed requests / wall time",
    "output_rate": "output tokens received (failed requests excluded) / wall time",
    "total_rate": "input and output tokens / wall time",
    "goodput": "completed requests that met every SLO / wall time",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample in five numbers; seconds, in this module."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    highest: float


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """The figures of a load test. A spread is None if there are no samples."""

    seconds: float  # wall time
    requests: int  # completed, failed and interrupted
    completed: int
    errors: Mapping[str, int]  # kind -> count; interrupted requests are not errors
    interrupted: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the engine does not report it
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    itl_token: Spread | None
    e2e: Spread | None
    lag: Spread | None
    request_rate: float
    input_rate: float
    output_rate: float
    total_rate: float
    goodput: float | None  # None without an SLO
    assumed: int  # answers without token counts: one token was assumed for each chunk
    uneven: int  # answers left out of itl_token: their chunks do not add up to the tokens


def summarise(
    records: Sequence[RequestRecord], start: float, end: float, slo: Slo | None = None
) -> LoadMetrics:
    """Return the figures of all requests between two times of the records' clock.

    Latencies are of completed requests; the lag is of every request sent.
    """
    seconds = max(end - start, 1e-9)
    done = [record for record in records if record.completed]
    stopped = [record for record in records if record.error == INTERRUPTED]
    errors = Counter(r.error for r in records if r.error is not None and r.error != INTERRUPTED)
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.num_output_tokens for record in [*done, *stopped])
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    return LoadMetrics(
        seconds=seconds,
        requests=len(records),
        completed=len(done),
        errors=dict(errors.most_common()),
        interrupted=len(stopped),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        ttft=spread(ttfts(done)),
        tpot=spread(tpots(done)),
        itl=spread(gaps(done)),
        itl_token=spread(token_times(done)),
        e2e=spread(e2es(done)),
        lag=spread(np.array([record.lag for record in records])),
        request_rate=len(done) / seconds,
        input_rate=prompt_tokens / seconds,
        output_rate=output_tokens / seconds,
        total_rate=(prompt_tokens + output_tokens) / seconds,
        goodput=None if slo is None else len([r for r in done if _kept(slo, r)]) / seconds,
        assumed=sum(record.assumed for record in done),
        uneven=sum(not record.even for record in done),
    )


def spread(values: NDArray[np.float64]) -> Spread | None:
    """Return the spread of a sample; None if it is empty."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Spread(len(values), float(values.mean()), p50, p90, p99, float(values.max()))


def ttfts(records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    return np.array([ttft for record in records if (ttft := record.ttft) is not None])


def tpots(records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    return np.array([tpot for record in records if (tpot := record.tpot) is not None])


def e2es(records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    return np.array([e2e for record in records if (e2e := record.e2e) is not None])


def gaps(records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    """Return the seconds between neighbouring chunks, over all records."""
    return _joined([np.diff(np.asarray(record.times)) for record in records])


def token_times(records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    """Return the seconds per token after the first chunk, one value for each token."""
    parts = []
    for record in records:
        if record.even:
            counts = np.asarray(record.tokens)[1:]
            parts.append(np.repeat(np.diff(np.asarray(record.times)) / counts, counts))
    return _joined(parts)


def _kept(slo: Slo, record: RequestRecord) -> bool:
    return slo.excess(record.ttft, record.tpot, record.e2e) <= 1.0


def _joined(parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(parts) if parts else np.empty(0)
