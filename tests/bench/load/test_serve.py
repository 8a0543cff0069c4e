"""A whole load test, without the command line."""

from __future__ import annotations

import asyncio

import pytest
from helpers.fake_server import FakeServer, Received, Reply, models, stream

from kvik.planner.serving import Slo
from kvik_bench.load import serve
from kvik_bench.load.drive import Budget, ClosedLoop, Level, LoadTest, RunLog
from kvik_bench.load.metrics import INTERRUPTED, RequestRecord
from kvik_bench.load.openai_target import TargetServer
from kvik_bench.load.serve import MAX_SERIES, ServeBench, charts, row
from kvik_bench.load.workload import DrawnLengths, Length, LoadWorkload, RandomWorkload, WordFiller


def workload(seed: str) -> LoadWorkload:
    lengths = DrawnLengths(Length("fixed", 5), Length("fixed", 3), seed)
    return RandomWorkload(lengths, WordFiller(), seed)


LEVELS = (Level("one", 1, lambda seed: ClosedLoop(1)), Level("two", 2, lambda seed: ClosedLoop(2)))


def reply(request: Received) -> Reply:
    return models(request) or stream(request.body["max_tokens"], first=0.02)


def test_progress_is_reported_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WATCH_PERIOD", 0.01)
    seen: list[tuple[str, int]] = []

    def watch(label: str, log: RunLog, seconds: float) -> None:
        assert seconds > 0
        seen.append((label, log.finished))

    with FakeServer(reply) as fake:
        bench = ServeBench(
            LoadTest(LEVELS, workload, Budget(4)), TargetServer(fake.url, "chat", "")
        )
        asyncio.run(bench.run(watch))
    assert {label for label, _ in seen} == {"one", "two"}
    counts = [count for label, count in seen if label == "one"]
    assert counts == sorted(counts) and counts[-1] > counts[0]


def test_an_interrupted_test_has_a_result() -> None:
    with FakeServer(reply) as fake:
        bench = ServeBench(LoadTest(LEVELS, workload, Budget()), TargetServer(fake.url, "chat", ""))

        async def main() -> None:
            task = asyncio.create_task(bench.run())
            while len(fake.requests) < 10:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
    result = bench.result({})
    assert [row.label for row in result.rows] == ["one"]
    assert result.rows[0].figure("TTFT p50")
    assert result.facts["model"] == "fake"


def test_without_requests_there_are_no_rows() -> None:
    bench = ServeBench(LoadTest(LEVELS, workload, Budget()), TargetServer("http://x", "chat", "m"))
    bench.logs["one"] = [RunLog()]
    assert bench.result({}).rows == ()


# Reports on a load: figures and warnings.


def answer(sent: float, tokens: tuple[int, ...] = (1, 1, 1), **others: object) -> RequestRecord:
    """Return a record with the first output after 100 ms, then a chunk every 10 ms."""
    record = RequestRecord(prompt_tokens=10, due=sent, sent=sent, **others)
    for i, count in enumerate(tokens):
        record.chunk(sent + 0.1 + 0.01 * i, count)
    record.finished = record.times[-1]
    return record


def measured(*records: RequestRecord, cpu: float = 0.1, loop_lag: float = 0.0) -> RunLog:
    log = RunLog(list(records), started=0.0, ended=2.0, cpu_seconds=cpu)
    log.loop_lag.extend([loop_lag] * 10)
    return log


def remarks(label: str, runs: list[RunLog], fresh: bool = True) -> list[str]:
    return serve.remarks(label, runs, fresh=fresh)


def test_figures_of_a_run() -> None:
    found = row("a load", [measured(answer(0.0), answer(1.0))], Slo(ttft=0.2))
    assert found.label == "a load"
    values = {figure.name: (figure.median, figure.unit) for figure in found.figures}
    assert values["request throughput"] == (pytest.approx(1.0), "requests/s")
    assert values["output throughput"] == (pytest.approx(3.0), "tokens/s")
    assert values["input throughput"] == (pytest.approx(10.0), "tokens/s")
    assert values["total throughput"] == (pytest.approx(13.0), "tokens/s")
    assert values["goodput"] == (pytest.approx(1.0), "requests/s")
    for column in ("mean", "p50", "p90", "p99"):
        assert values[f"TTFT {column}"] == (pytest.approx(100.0), "ms")
        assert values[f"TPOT {column}"] == (pytest.approx(10.0), "ms")
        assert values[f"ITL {column}"] == (pytest.approx(10.0), "ms")
        assert values[f"E2E {column}"] == (pytest.approx(120.0), "ms")
    assert values["client CPU"] == (pytest.approx(5.0), "%")
    assert not any(name.startswith(("ITL per token", "held")) for name in values)
    assert all(figure.definition for figure in found.figures)
    assert found.facts["requests"] == "2 completed, 0 failed"
    assert found.facts["tokens"] == "20 in, 6 out"
    assert "prefix cache" not in found.facts


def test_gaps_of_chunks_and_of_tokens_are_shown() -> None:
    found = row("a", [measured(answer(0.0, (1, 4)))], None)
    values = {figure.name: figure.median for figure in found.figures}
    assert values["ITL p50"] == pytest.approx(10.0)
    assert values["ITL per token p50"] == pytest.approx(2.5)


def test_repeats_are_kept_apart() -> None:
    found = row("a", [measured(answer(0.0)), measured(answer(0.0), answer(1.0))], None)
    throughput = found.figure("request throughput")
    assert throughput and throughput.values == pytest.approx((0.5, 1.0))
    assert found.facts["requests"] == "3 completed, 0 failed"


def test_a_run_in_which_everything_failed_has_a_row() -> None:
    failed = RequestRecord(1, 0.0, 0.0, error="HTTP 500")
    found = row("a", [measured(failed)], Slo(ttft=0.2))
    assert found.facts["requests"] == "0 completed, 1 failed"
    assert found.figure("TTFT p50") is None
    assert found.series == {}


def test_prefix_cache_hits_are_reported() -> None:
    found = row("a", [measured(answer(0.0, cached_tokens=4), answer(1.0, cached_tokens=6))], None)
    assert found.facts["prefix cache"] == "50% of the prompt tokens"


def test_cache_hits_of_new_prompts_are_reported() -> None:
    """Most likely the same command a second time."""
    known = [measured(answer(0.0, cached_tokens=9), answer(1.0, cached_tokens=9))]
    (text,) = remarks("a", known)
    assert "found 90% of the prompt tokens in its prefix cache" in text and "--seed" in text
    assert remarks("a", known, fresh=False) == []
    assert remarks("a", [measured(answer(0.0, cached_tokens=3))]) == []


def test_a_good_run_needs_no_remarks() -> None:
    assert remarks("a", [measured(answer(0.0))]) == []


def test_a_busy_client_is_called_the_bottleneck() -> None:
    (text,) = remarks("a", [measured(answer(0.0), cpu=1.9)])
    assert text.startswith("a: THE CLIENT WAS A BOTTLENECK: it used 95% of a core")
    assert "other processes" not in text


def test_a_late_client_is_called_the_bottleneck() -> None:
    late = answer(0.0)
    late.due = -0.05
    (text,) = remarks("a", [measured(answer(0.0)), measured(late)])
    assert "THE CLIENT WAS A BOTTLENECK: it sent requests up to 50 ms late" in text
    (text,) = remarks("a", [measured(answer(0.0), loop_lag=0.03)])
    assert "THE CLIENT WAS A BOTTLENECK: its event loop woke up to 30 ms late" in text
    assert "it used 5% of a core on the whole: other processes" in text


def test_held_requests_are_reported_and_measured() -> None:
    held = answer(1.0, held=1.0)
    held.due = 0.0
    (text,) = remarks("a", [measured(answer(0.0), held)])
    assert "1 of 2 requests were held back, up to 1.0 s" in text
    found = row("a", [measured(answer(0.0), held)], None)
    figure = found.figure("held p99")
    assert figure and figure.median == pytest.approx(990.0)


def test_errors_are_counted_by_kind_with_an_example() -> None:
    failed = [
        RequestRecord(1, 0.0, 0.0, error="HTTP 500", detail="it broke"),
        RequestRecord(1, 0.0, 0.0, error="timeout"),
        RequestRecord(1, 0.0, 0.0, error="HTTP 500", detail="again"),
    ]
    assert remarks("a", [measured(*failed)]) == [
        "a: 2 of 3 requests failed: HTTP 500 (it broke).",
        "a: 1 of 3 requests failed: timeout.",
    ]
    *_, last = remarks("a", [measured(*failed, answer(0.0))])
    assert last.startswith("a: times are those of completed requests alone")


def test_estimated_token_counts_are_reported() -> None:
    (text,) = remarks("a", [measured(answer(0.0, assumed=True), answer(0.0))])
    assert "in 1 of 2 answers the server did not count tokens" in text
    (text,) = remarks("a", [measured(answer(0.0, output_tokens=9))])
    assert "in 1 of 1 answers chunks and tokens differ in number" in text


def test_answers_shorter_than_requested_are_reported() -> None:
    """A server that accepts `ignore_eos` silently, but still ends its answers."""
    (text,) = remarks("a", [measured(answer(0.0, asked_tokens=3), answer(0.0, asked_tokens=5))])
    assert "with 6 of the 8 tokens asked for" in text and "--extra-body" in text
    assert remarks("a", [measured(answer(0.0, asked_tokens=3), answer(0.0))]) == []


def test_interrupted_requests_are_reported() -> None:
    (text,) = remarks("a", [measured(answer(0.0), RequestRecord(1, 0, 0, error=INTERRUPTED))])
    assert text.startswith("a: 1 of 2 requests were interrupted")


def test_series_are_thinned_but_keep_their_ends() -> None:
    many = [answer(0.001 * i, (1,) * (2 + i % 2)) for i in range(MAX_SERIES + 100)]
    found = row("a", [measured(*many)], None)
    assert len(found.series["TTFT, ms"]) == len(found.series["sent, s"]) == MAX_SERIES
    assert found.series["sent, s"][0] == 0.0
    assert found.series["sent, s"][-1] == pytest.approx(0.001 * (MAX_SERIES + 99))


def test_charts_use_existing_figures() -> None:
    rows = [row("a", [measured(answer(0.0))], None), row("b", [measured(answer(0.0))], None)]
    assert {chart.kind for chart in charts(rows)} == {"curve", "ecdf", "points"}
    for chart in charts(rows):
        if chart.kind == "curve":
            assert rows[0].figure(chart.x) and rows[0].figure(chart.y)
        else:
            assert chart.y in rows[0].series and (not chart.x or chart.x in rows[0].series)
    assert all(chart.kind != "curve" for chart in charts(rows[:1]))
