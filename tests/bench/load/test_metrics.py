"""Every figure compared with values computed by hand."""

from __future__ import annotations

import pytest

from kvik.planner.serving import Slo
from kvik_bench.load.metrics import (
    INTERRUPTED,
    RequestRecord,
    gaps,
    spread,
    summarise,
    token_times,
)


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


def test_an_answer_of_one_token_has_no_tpot_and_no_gaps() -> None:
    one = record(1.0, [(1.5, 1)], 1.5)
    assert one.tpot is None and len(gaps([one])) == 0
    found = summarise([one], 1.0, 2.0, Slo(tpot=1e-6))
    assert found.tpot is None and found.itl is None and found.itl_token is None
    assert found.goodput == pytest.approx(1.0)


def test_the_servers_count_overrides_the_chunks() -> None:
    one = record(0.0, [(1.0, 1), (2.0, 1), (3.0, 1)], 3.0, output_tokens=5)
    assert one.tpot == pytest.approx(2.0 / 4)
    found = summarise([one], 0.0, 3.0)
    assert (found.output_tokens, found.uneven) == (5, 1)
    assert found.itl_token is None  # tokens per chunk are unknown
    assert found.itl and found.itl.p50 == pytest.approx(1.0)


def test_percentiles_interpolate_between_ranks() -> None:
    import numpy as np

    found = spread(np.array([4.0, 1.0, 3.0, 2.0]))
    assert found is not None
    assert found.p50 == pytest.approx(2.5)  # position 1.5 of 0 to 3
    assert found.p90 == pytest.approx(3.7)  # position 2.7
    assert found.p99 == pytest.approx(3.97)  # position 2.97
    assert (found.mean, found.highest, found.count) == (2.5, 4.0, 4)
    assert spread(np.array([])) is None


def test_rates_are_over_wall_time() -> None:
    answers = [
        record(0.0, [(1.0, 1), (2.0, 1)], 2.0),
        record(0.5, [(1.0, 1), (3.0, 3)], 3.0),
        record(1.0, [(1.5, 5)], None, error="timeout"),
        record(1.0, [(1.5, 7)], None, error=INTERRUPTED),
        record(1.0, [], None, error="timeout"),
        record(1.0, [], None, error="HTTP 500"),
    ]
    found = summarise(answers, 0.0, 4.0)
    assert (found.requests, found.completed, found.interrupted) == (6, 2, 1)
    assert found.errors == {"timeout": 2, "HTTP 500": 1}
    assert list(found.errors) == ["timeout", "HTTP 500"]
    assert found.request_rate == pytest.approx(2 / 4)
    assert found.input_rate == pytest.approx(20 / 4)
    assert found.output_rate == pytest.approx((2 + 4 + 7) / 4)  # failed requests do not count
    assert found.total_rate == pytest.approx((20 + 13) / 4)
    assert found.goodput is None
    assert found.ttft and found.ttft.count == 2


def test_goodput_needs_every_limit() -> None:
    answers = [
        record(0.0, [(0.2, 1), (0.3, 1)], 0.3),  # ttft 0.2, tpot 0.1, e2e 0.3
        record(0.0, [(0.1, 1), (0.4, 1)], 0.4),  # ttft 0.1, tpot 0.3, e2e 0.4
        record(0.0, [(0.1, 1), (0.2, 1), (0.9, 8)], 0.9),  # ttft 0.1, tpot 0.089, e2e 0.9
        record(0.0, [(0.1, 1)], None, error="no [DONE]"),
    ]

    def good(**limits: float) -> float:
        found = summarise(answers, 0.0, 2.0, Slo(**limits)).goodput
        assert found is not None
        return found * 2.0

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
    assert summarise([late], 0.0, 1.0).lag.highest == pytest.approx(0.1)


def test_cached_tokens_are_known_or_not() -> None:
    known = record(0.0, [(1.0, 1)], 1.0, cached_tokens=0)
    silent = record(0.0, [(1.0, 1)], 1.0)
    assert summarise([known, silent], 0.0, 1.0).cached_tokens == 0
    assert summarise([silent], 0.0, 1.0).cached_tokens is None


def test_a_run_without_requests() -> None:
    found = summarise([], 5.0, 5.0, Slo(ttft=1.0))
    assert found.ttft is None and found.lag is None
    assert found.request_rate == found.output_rate == found.goodput == 0.0
