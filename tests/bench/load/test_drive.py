"""Loads on a virtual clock, which checks to the microsecond when each request is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from helpers.virtual_time import run_virtually

from kvik_bench.load.drive import FAILURE_PAUSE, Budget, ClosedLoop, Load, OpenLoop, RunLog, drive
from kvik_bench.load.metrics import INTERRUPTED, RequestRecord
from kvik_bench.load.workload import LoadConversation, LoadRequest, LoadTurn


class Numbered:
    """Conversation i sends "i.0", "i.1", ..."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns

    def conversation(self, index: int) -> LoadConversation:
        return LoadConversation(
            tuple(LoadTurn(f"{index}.{turn}", 1, 2) for turn in range(self.turns))
        )


class Clockwork:
    """Answers after a known time, and records when each request arrived."""

    def __init__(self, seconds: Callable[[str], float] = lambda name: 1.0) -> None:
        self.seconds = seconds
        self.asked: list[tuple[float, str]] = []
        self.histories: list[int] = []
        self.most = self.now = 0

    async def send(self, request: LoadRequest, record: RequestRecord) -> str | None:
        loop = asyncio.get_running_loop()
        record.sent = loop.time()
        name = request.messages[-1][1]
        self.asked.append((record.sent, name))
        self.histories.append(len(request.messages))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            seconds = self.seconds(name)
            await asyncio.sleep(abs(seconds))
        finally:
            self.now -= 1
        if seconds < 0:
            record.fail("HTTP 500")
            return None
        record.chunk(loop.time(), 2)
        record.finished = loop.time()
        return f"answer to {name}"


def run(
    load: Load,
    target: Clockwork,
    turns: int = 1,
    think_time: float = 0.0,
    num_requests: int | None = None,
    duration: float | None = None,
) -> tuple[RunLog, list[tuple[float, str]]]:
    """Return the log, and (seconds since the start, request) pairs."""
    log = RunLog()
    budget = Budget(num_requests, duration)
    run_virtually(drive(load, target, Numbered(turns), budget, log, think_time))
    return log, [(round(at - log.started, 6), name) for at, name in target.asked]


def test_an_open_loop_sends_when_due_even_if_answers_are_late() -> None:
    offsets = [0.0, 0.25, 0.25, 1.0, 7.5]
    log, asked = run(OpenLoop(offsets, 100), Clockwork(lambda name: 3.0))
    assert asked == [(0.0, "0.0"), (0.25, "1.0"), (0.25, "2.0"), (1.0, "3.0"), (7.5, "4.0")]
    assert [record.due - log.started for record in log.records] == pytest.approx(offsets)
    assert all(abs(record.lag) < 1e-6 and record.held == 0.0 for record in log.records)
    assert log.ended - log.started == pytest.approx(10.5)
    assert (log.finished, log.failed, log.in_flight, log.output_tokens) == (5, 0, 0, 10)


def test_waiting_for_the_concurrency_limit_is_not_lag() -> None:
    target = Clockwork(lambda name: 1.0)
    log, asked = run(OpenLoop([0.0, 0.1, 0.2, 0.9, 5.0], 2), target)
    assert target.most == 2
    assert asked == [(0.0, "0.0"), (0.1, "1.0"), (1.0, "2.0"), (1.1, "3.0"), (5.0, "4.0")]
    assert [r.held for r in log.records] == pytest.approx([0, 0, 0.8, 0.2, 0], abs=1e-6)
    assert [r.lag for r in log.records] == pytest.approx([0] * 5, abs=1e-6)


def test_requests_due_while_another_is_held_are_held_too() -> None:
    """If slots become free together, the second request does not wait, but it was late."""
    log, asked = run(OpenLoop([0.0, 0.0, 0.1, 0.2], 2), Clockwork())
    assert asked == [(0.0, "0.0"), (0.0, "1.0"), (1.0, "2.0"), (1.0, "3.0")]
    assert [r.held for r in log.records] == pytest.approx([0, 0, 0.9, 0.8], abs=1e-6)


def test_a_closed_loop_keeps_its_users_busy() -> None:
    target = Clockwork(lambda name: 2.0 if name == "0.0" else 1.0)
    log, asked = run(ClosedLoop(2), target, num_requests=6)
    assert asked == [
        (0.0, "0.0"), (0.001, "1.0"), (1.001, "2.0"), (2.0, "3.0"), (2.001, "4.0"), (3.0, "5.0")
    ]  # fmt: skip
    assert target.most == 2
    assert log.ended - log.started == pytest.approx(4.0)


def test_users_pause_between_requests() -> None:
    _, asked = run(ClosedLoop(1, think_time=0.5), Clockwork(), num_requests=3)
    assert asked == [(0.0, "0.0"), (1.5, "1.0"), (3.0, "2.0")]


def test_turns_of_a_conversation_wait_for_the_answer() -> None:
    target = Clockwork()
    log, asked = run(OpenLoop([0.0, 0.3], 100), target, turns=3, think_time=0.5)
    assert asked == [
        (0.0, "0.0"), (0.3, "1.0"), (1.5, "0.1"), (1.8, "1.1"), (3.0, "0.2"), (3.3, "1.2")
    ]  # fmt: skip
    assert target.histories == [1, 1, 3, 3, 5, 5]
    assert all(abs(record.lag) < 1e-6 for record in log.records)


def test_a_conversation_ends_with_a_failure_and_the_run_continues() -> None:
    target = Clockwork(lambda name: -1.0 if name == "0.1" else 1.0)
    log, asked = run(ClosedLoop(1), target, turns=3, num_requests=6)
    assert [name for _, name in asked] == ["0.0", "0.1", "1.0", "1.1", "1.2"]
    assert asked[2][0] == pytest.approx(2.0 + FAILURE_PAUSE)
    assert (log.finished, log.failed) == (5, 1)


def test_the_budget_of_requests_cuts_by_number_not_by_time() -> None:
    for seconds in (lambda name: 1.0, lambda name: 5.0 if name[0] == "0" else 0.1):
        _, asked = run(ClosedLoop(2), Clockwork(seconds), turns=3, num_requests=7)
        assert sorted(name for _, name in asked) == [
            "0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "2.0"
        ]  # fmt: skip


def test_a_duration_ends_the_sending_and_waits_for_the_rest() -> None:
    log, asked = run(ClosedLoop(1), Clockwork(lambda name: 1.1), duration=2.5)
    assert [at for at, _ in asked] == [0.0, 1.1, 2.2]
    assert log.ended - log.started == pytest.approx(3.3)
    _, asked = run(OpenLoop([0.0, 1.0, 2.0, 3.0], 9), Clockwork(), duration=2.0)
    assert [at for at, _ in asked] == [0.0, 1.0, 2.0]


def test_an_interrupted_run_keeps_its_measurements() -> None:
    log = RunLog()

    async def main() -> None:
        load = OpenLoop([0.0, 0.5, 9.0], 9)
        task = asyncio.create_task(
            drive(load, Clockwork(lambda name: 1.0), Numbered(), Budget(), log)
        )
        await asyncio.sleep(1.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtually(main())
    assert [record.error for record in log.records] == [None, INTERRUPTED]
    assert log.ended - log.started == pytest.approx(1.2)
    assert log.in_flight == 0


def test_the_client_measures_its_own_lag() -> None:
    """Something else blocks the event loop for 50 ms at a time; the server answers at once."""
    log = RunLog()

    async def hog() -> None:
        while True:
            time.sleep(0.05)
            await asyncio.sleep(0.001)

    async def main() -> None:
        hogging = asyncio.create_task(hog())
        load = OpenLoop([0.02 * i for i in range(25)], 100)
        await drive(load, Clockwork(lambda name: 0.0), Numbered(), Budget(), log)
        hogging.cancel()

    asyncio.run(main())
    lags = sorted(record.lag for record in log.records)
    assert lags[len(lags) // 2] > 0.01 and lags[-1] > 0.03
    assert max(log.loop_lag) > 0.03


def test_a_run_too_short_for_a_sample_has_one() -> None:
    log, _ = run(OpenLoop([0.0], 1), Clockwork(lambda name: 0.001))
    assert list(log.loop_lag) == [0.0]


def test_the_share_of_a_core_is_measured() -> None:
    log = RunLog()

    async def burn(request: LoadRequest, record: RequestRecord) -> str:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        record.chunk(1.0, 1)
        record.finished = 1.0
        return ""

    target = Clockwork()
    target.send = burn
    asyncio.run(drive(ClosedLoop(1), target, Numbered(), Budget(1), log))
    assert log.cpu_seconds == pytest.approx(0.2, rel=0.2)
    assert log.cpu_share == pytest.approx(log.cpu_seconds / (log.ended - log.started))
    assert log.ended - log.started > 0.19  # how much more depends on other processes
