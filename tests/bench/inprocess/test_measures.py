"""Figures of a run with known times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvik.engine.stats import EngineStats
from kvik_bench.inprocess.inproc import LoadRun
from kvik_bench.inprocess.measures import (
    DECODE,
    E2E,
    ITLS,
    KV_USAGE,
    PREEMPTIONS,
    PREFILL,
    PREFIX_HITS,
    STEPS,
    TPOT,
    TTFT,
    TTFTS,
    WALL,
)
from kvik_bench.load.metrics import INPUT, OUTPUT, REQUESTS, TOTAL, RequestRecord
from kvik_bench.report.result import figures, ratios

ZERO = EngineStats(0, 0, 0, 0.0, 100, 0, 0, 0, 0, 0, 0, 0)


def run_of(*answers: tuple[int, list[float]], ended: float) -> LoadRun:
    """Return a run started at 10; each request has a prompt length, and a token at each time."""
    records = []
    for prompt, times in answers:
        record = RequestRecord(prompt, 10.0, 10.0)
        for time in times:
            record.chunk(10.0 + time, 1)
        record.finished = 10.0 + times[-1]
        records.append(record)
    after = replace(ZERO, steps=5, preemptions=2, prefix_queries=200, prefix_hits=50)
    return LoadRun(
        10.0, 10.0 + ended, records, [[1] * len(t) for _, t in answers], ZERO, after, 0.25
    )


RUN = run_of((30, [1.0, 1.5, 2.0]), (10, [2.0, 2.5, 3.0, 4.0]), ended=4.0)


def test_of_a_known_run() -> None:
    for measure, expected in (
        (TTFT, 1500.0),
        (TPOT, (500.0 + 2000.0 / 3) / 2),
        (E2E, 3000.0),
        (TTFTS[0], 1500.0),
        (TTFTS[1], 1900.0),
        (ITLS[0], 500.0),
        (WALL, 4.0),
        (REQUESTS, 0.5),
        (INPUT, 10.0),
        (OUTPUT, 7 / 4),
        (TOTAL, 47 / 4),
        (PREFILL, 40 / 2.0),  # until both have their first token
        (DECODE, 3 / 2.0),  # tokens after that
        (KV_USAGE, 25.0),
        (PREEMPTIONS, 2),
        (PREFIX_HITS, 25.0),
        (STEPS, 5),
    ):
        assert measure.of(RUN) == pytest.approx(expected), measure.name


def test_nothing_to_measure_is_no_figure() -> None:
    single = run_of((5, [1.0]), ended=1.0)
    assert [f.name for f in figures((TTFT, TPOT, DECODE, *ITLS), [single])] == ["TTFT"]
    assert [f.name for f in figures((TPOT,), [RUN, single])] == []


def test_ratios_are_taken_round_by_round() -> None:
    slow, fast = run_of((1, [1.0]), ended=2.0), run_of((1, [1.0]), ended=1.0)
    figure = ratios("gain", OUTPUT, [fast, slow], [slow, slow], "over slow")
    assert figure.values == (2.0, 1.0)
    assert figure.unit == "x"
