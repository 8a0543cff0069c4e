"""A whole load test, without the command line."""

from __future__ import annotations

import asyncio

import pytest
from helpers.fake_server import FakeServer, Received, Reply, models, stream

from kvik_bench.load import serve
from kvik_bench.load.drive import Budget, ClosedLoop, RunLog
from kvik_bench.load.lengths import DrawnLengths, Length
from kvik_bench.load.openai_target import Server
from kvik_bench.load.serve import Level, LoadTest, ServeBench
from kvik_bench.load.workload import RandomWorkload, WordFiller, Workload


def workload(seed: str) -> Workload:
    lengths = DrawnLengths(Length("fixed", 5), Length("fixed", 3), seed)
    return RandomWorkload(lengths, WordFiller(), seed)


LEVELS = (Level("one", 1, lambda seed: ClosedLoop(1)), Level("two", 2, lambda seed: ClosedLoop(2)))


def reply(request: Received) -> Reply:
    return models(request) or stream(request.body["max_tokens"], first=0.02)


def test_somebody_may_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WATCH_PERIOD", 0.01)
    seen: list[tuple[str, int]] = []

    def watch(label: str, log: RunLog, seconds: float) -> None:
        assert seconds > 0
        seen.append((label, log.finished))

    with FakeServer(reply) as fake:
        bench = ServeBench(LoadTest(LEVELS, workload, Budget(4)), Server(fake.url, "chat", ""))
        asyncio.run(bench.run(watch))
    assert {label for label, _ in seen} == {"one", "two"}
    counts = [count for label, count in seen if label == "one"]
    assert counts == sorted(counts) and counts[-1] > counts[0]


def test_an_interrupted_test_has_a_result() -> None:
    with FakeServer(reply) as fake:
        bench = ServeBench(LoadTest(LEVELS, workload, Budget()), Server(fake.url, "chat", ""))

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
    bench = ServeBench(LoadTest(LEVELS, workload, Budget()), Server("http://x", "chat", "m"))
    bench.logs["one"] = [RunLog()]
    assert bench.result({}).rows == ()
