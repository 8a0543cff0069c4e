"""From records of requests to the figures of a load test, each with its definition.

Percentiles interpolate linearly between the two nearest ranks: the p-th of n sorted values lies at
position p/100 * (n - 1), counted from 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvik.planner.slo import Slo
from kvik_bench.load.records import INTERRUPTED, RequestRecord

DEFINITIONS: Mapping[str, str] = {
    "ttft": "send -> first non-empty output token",
    "tpot": "(E2E - TTFT) / (output tokens - 1), of answers with two tokens or more",
    "itl": "gap between two chunks of output within a request, the first chunk excluded",
    "itl_token": "that gap divided by the tokens of its chunk, counted once for each token",
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
    """A load test in figures. A spread is None when there is nothing to take it of."""

    seconds: float  # wall time
    requests: int  # completed, failed and interrupted
    completed: int
    errors: Mapping[str, int]  # kind -> how often; interrupted requests are no errors
    interrupted: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the engine does not tell
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
    assumed: int  # answers without token counts: one was assumed for each chunk
    uneven: int  # answers left out of itl_token: their chunks do not add up to the tokens


def summarise(
    records: Sequence[RequestRecord], started: float, ended: float, slo: Slo | None = None
) -> LoadMetrics:
    """The figures of all requests between two times of the records' clock.

    Latencies are those of completed requests; the lag is that of every request sent.
    """
    seconds = max(ended - started, 1e-9)
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
    """None for an empty sample."""
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
    """Seconds between neighbouring chunks, over all records."""
    return _joined([np.diff(np.asarray(record.times)) for record in records])


def token_times(records: Sequence[RequestRecord]) -> NDArray[np.float64]:
    """Seconds per token after the first chunk, one value for each token."""
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
