"""The number of threads that compute a step, and when it may begin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvik.worker.team import EvenPace, Team


class FakeThreads:
    def __init__(self) -> None:
        self.working = 2
        self.limits: list[int] = []

    def limit(self, threads: int) -> None:
        self.limits.append(threads)


def test_the_number_of_threads_is_reported_on_change() -> None:
    threads = FakeThreads()
    team = Team(threads, 2, clock=lambda: 0.0)
    changes = []
    for threads.working in (2, 2, 1, 1, 2):
        changes.append(team.changes())
    assert changes == [2, None, 1, None, 2]


def test_the_number_of_threads_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    threads, now = FakeThreads(), [0.0]
    team = Team(threads, 2, clock=lambda: now[0])
    logged = []
    for now[0], threads.working in (
        (0, 2), (10, 1), (11, 2), (12, 1), (69, 2), (71, 2), (72, 1), (140, 1)
    ):  # fmt: skip
        caplog.clear()
        team.changes()
        logged += [(now[0], record.args[0]) for record in caplog.records if record.args]
    assert logged == [(10, 1), (71, 2), (140, 1)]


class Machine:
    """Steps of `seconds[threads]`, while others of the cgroup use `beside` seconds of CPU time per
    second."""

    def __init__(self, cores: float, seconds: Sequence[float], beside: float = 0.0) -> None:
        self.now = self.used = 0.0
        self._seconds, self._beside = seconds, beside
        self.taken: list[int] = []
        self.times: list[float] = []  # time between steps
        self._pace = EvenPace(cores, lambda: self.used, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds * self._beside

    def steps(self, count: int) -> None:
        for _ in range(count):
            began = self.now
            threads = self._pace.next_threads()
            self.sleep(self._seconds[threads])
            self.used += threads * self._seconds[threads]
            self.taken.append(threads)
            self.times.append(self.now - began)


@pytest.mark.parametrize(
    ("cores", "beside", "allowed"),
    [
        (0.5, 0.0, {1}),
        (1.0, 0.0, {1}),
        (1.0, 0.1, {1}),
        (1.1, 0.0, {1, 2}),
        (1.8, 0.0, {2}),
        (3.2, 0.1, {3, 4}),
    ],
)
@pytest.mark.parametrize("step", [0.0005, 0.02])
def test_a_quota_is_used_evenly(
    cores: float, beside: float, allowed: set[int], step: float
) -> None:
    machine = Machine(cores, [0.0, *(step / n for n in range(1, 5))], beside)
    machine.steps(4000)
    assert set(machine.taken) <= allowed
    assert 0.95 < machine.used / machine.now / cores < 1.01
    later = sorted(machine.times[100:])
    assert later[-1] < 3 * later[len(later) // 2]


def test_unused_time_is_only_kept_briefly() -> None:
    machine = Machine(1.5, [0.0, 0.002, 0.001])
    machine.now += 60.0
    machine.steps(100)
    assert machine.used <= 1.5 * (machine.now - 60.0) + 0.02


def test_a_team_is_limited_before_each_step() -> None:
    threads = FakeThreads()
    team = Team(threads, 2, EvenPace(1.5, lambda: 0.0, lambda: 0.0))
    team.begin_step()
    assert threads.limits == [2]


def test_an_unreadable_quota_delays_no_step() -> None:
    def gone() -> float:
        if now[0]:
            raise FileNotFoundError
        return 0.0

    now, slept = [0.0], list[float]()
    pace = EvenPace(0.5, gone, lambda: now[0], slept.append)
    now[0] = 1.0
    assert [pace.next_threads() for _ in range(3)] == [1, 1, 1]
    assert not slept
