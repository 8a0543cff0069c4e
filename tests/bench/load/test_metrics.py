"""Every figure compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvik.planner.serving import Slo
from kvik_bench.load.drive import RunLog
from kvik_bench.load.metrics import (
    INPUT,
    INTERRUPTED,
    OUTPUT,
    REQUESTS,
    TOTAL,
    RequestRecord,
    gaps,
    goodput,
    milliseconds,
    percentile,
    token_times,
    tpots,
)
from kvik_bench.load.serve import SEND_LAG, row


def record(
    sent: float, chunks: list[tuple[float, int]], finished: float | None = None, **others: object
) -> RequestRecord:
    found = RequestRecord(prompt_tokens=10, due=sent, sent=sent, **others)
    for time, tokens in chunks:
        found.chunk(time, tokens)
    found.finished = finished
    return found


def test_one_answer() -> None:
    one = record(1.0, [(1.5, 1), (1.7, 1), (2.0, 2)], 2.5)
    assert one.completed and one.num_output_tokens == 4
    assert one.ttft == pytest.approx(0.5)
    assert one.e2e == pytest.approx(1.5)
    assert one.tpot == pytest.approx((1.5 - 0.5) / 3)
    assert gaps([one]) == pytest.approx([0.2, 0.3])
    assert token_times([one]) == pytest.approx([0.2, 0.15, 0.15])  # a chunk of two counts twice


def run_of(*records: RequestRecord, started: float = 0.0, ended: float) -> RunLog:
    return RunLog(list(records), started=started, ended=ended)


def test_an_answer_of_one_token_has_no_tpot_and_no_gaps() -> None:
    one = record(1.0, [(1.5, 1)], 1.5)
    assert (
        one.tpot is None and len(gaps([one])) == len(token_times([one])) == len(tpots([one])) == 0
    )
    run = run_of(one, started=1.0, ended=2.0)
    assert goodput(Slo(tpot=1e-6)).of(run) == pytest.approx(1.0)
    assert row("a", [run], None).figure("TPOT p50") is None


def test_the_servers_count_overrides_the_chunks() -> None:
    one = record(0.0, [(1.0, 1), (2.0, 1), (3.0, 1)], 3.0, output_tokens=5)
    assert one.tpot == pytest.approx(2.0 / 4)
    assert OUTPUT.of(run_of(one, ended=3.0)) == pytest.approx(5 / 3)
    assert not one.even and len(token_times([one])) == 0  # tokens per chunk are unknown
    assert gaps([one]) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("share", "expected"), [(50, 2.5), (90, 3.7), (99, 3.97)])
def test_percentiles_interpolate_between_ranks(share: int, expected: float) -> None:
    """At positions 1.5, 2.7 and 2.97 of 0 to 3."""
    assert percentile(share)(np.array([4.0, 1.0, 3.0, 2.0])) == pytest.approx(expected)
    measure = milliseconds("a", lambda run: np.array([]), "", percentile(share))
    assert measure.of(run_of(ended=1.0)) is None


def test_rates_are_over_wall_time() -> None:
    run = run_of(
        record(0.0, [(1.0, 1), (2.0, 1)], 2.0),
        record(0.5, [(1.0, 1), (3.0, 3)], 3.0),
        record(1.0, [(1.5, 5)], None, error="timeout"),
        record(1.0, [(1.5, 7)], None, error=INTERRUPTED),
        record(1.0, [], None, error="timeout"),
        record(1.0, [], None, error="HTTP 500"),
        ended=4.0,
    )
    assert REQUESTS.of(run) == pytest.approx(2 / 4)
    assert INPUT.of(run) == pytest.approx(20 / 4)
    assert OUTPUT.of(run) == pytest.approx((2 + 4 + 7) / 4)  # failed requests do not count
    assert TOTAL.of(run) == pytest.approx((20 + 13) / 4)


def test_goodput_needs_every_limit() -> None:
    run = run_of(
        record(0.0, [(0.2, 1), (0.3, 1)], 0.3),  # ttft 0.2, tpot 0.1, e2e 0.3
        record(0.0, [(0.1, 1), (0.4, 1)], 0.4),  # ttft 0.1, tpot 0.3, e2e 0.4
        record(0.0, [(0.1, 1), (0.2, 1), (0.9, 8)], 0.9),  # ttft 0.1, tpot 0.089, e2e 0.9
        record(0.0, [(0.1, 1)], None, error="no [DONE]"),
        ended=2.0,
    )

    def good(**limits: float) -> float:
        rate = goodput(Slo(**limits)).of(run)
        return rate * 2.0

    assert good() == 3
    assert good(ttft=0.15) == 2
    assert good(tpot=0.11) == 2
    assert good(e2e=0.35) == 1
    assert good(ttft=0.15, tpot=0.11) == 1
    assert good(ttft=0.15, tpot=0.11, e2e=0.5) == 0
    assert good(ttft=0.2) == 3  # the limit itself is allowed


def test_lag_excludes_the_time_held() -> None:
    late = RequestRecord(1, due=1.0, sent=1.5, held=0.4)
    assert late.lag == pytest.approx(0.1)
    assert SEND_LAG.of(run_of(late, ended=1.0)) == pytest.approx(100.0)


def test_cached_tokens_are_known_or_not() -> None:
    known = record(0.0, [(1.0, 1)], 1.0, cached_tokens=0)
    silent = record(0.0, [(1.0, 1)], 1.0)
    facts = row("a", [run_of(known, silent, ended=1.0)], None).facts
    assert facts["prefix cache"] == "0% of the prompt tokens"
    assert "prefix cache" not in row("a", [run_of(silent, ended=1.0)], None).facts


def test_a_run_without_requests() -> None:
    run = run_of(started=5.0, ended=5.0)
    assert SEND_LAG.of(run) is None
    assert REQUESTS.of(run) == OUTPUT.of(run) == goodput(Slo(ttft=1.0)).of(run) == 0.0
