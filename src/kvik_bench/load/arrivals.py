"""When requests are due in an open loop: seconds after the start, whatever the server does."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, count, pairwise
from pathlib import Path

from kvik.errors import ParamError

TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def constant(rate: float) -> Iterator[float]:
    return (i / rate for i in count())


def poisson(rate: float, seed: str) -> Iterator[float]:
    """Independent arrivals: exponential gaps."""
    rng = random.Random(seed)
    return accumulate(rng.expovariate(rate) for _ in count())


def bursts(rate: float, burstiness: float, seed: str) -> Iterator[float]:
    """Gamma gaps with mean 1/rate and a coefficient of variation of `burstiness`.

    1 is Poisson; above 1 requests come in bursts, below 1 more evenly.
    """
    rng = random.Random(seed)
    shape = burstiness**-2
    scale = 1.0 / (rate * shape)
    return accumulate(rng.gammavariate(shape, scale) for _ in count())


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a recorded load."""

    offset: float  # seconds after the first
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path, speed: float = 1.0, limit: int | None = None) -> list[TraceRow]:
    """A trace in the csv format of Azure's LLM inference traces (Patel et al., Splitwise, 2023).

    Args:
        speed: 2 replays it twice as fast.
        limit: the first so many rows.

    Raises:
        ParamError: the file cannot be read, or a row is not understood or goes back in time.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if tuple(header[: len(TRACE_COLUMNS)]) != TRACE_COLUMNS:
                raise ParamError("trace", f"must begin with the line {','.join(TRACE_COLUMNS)}")
            read = [
                _read_row(row, reader.line_num)
                for row, _ in zip(reader, count() if limit is None else range(limit), strict=False)
                if row
            ]
    except OSError as error:
        raise ParamError("trace", f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise ParamError("trace", "must be a csv file") from None
    if not read:
        raise ParamError("trace", "has no rows")
    if any(later[0] < earlier[0] for earlier, later in pairwise(read)):
        raise ParamError("trace", "must be sorted by TIMESTAMP")
    first = read[0][0]
    return [TraceRow((time - first).total_seconds() / speed, p, o) for time, p, o in read]


def _read_row(row: Sequence[str], line: int) -> tuple[datetime, int, int]:
    try:
        time = datetime.fromisoformat(row[0].strip())
        if time.tzinfo is None:  # as in Azure's trace of 2023; that of 2024 names UTC
            time = time.replace(tzinfo=UTC)
        prompt_tokens, output_tokens = int(row[1]), int(row[2])
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError
    except (ValueError, IndexError):
        shown = ",".join(row)[:60]
        raise ParamError("trace", f"line {line} is not understood: {shown!r}") from None
    return time, prompt_tokens, output_tokens
