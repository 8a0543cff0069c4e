"""Clock, job and answer shared by all adapters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvik_bench.peers.engines.protocol import (
    WARM_UP,
    Clock,
    EngineFailure,
    Job,
    Prompts,
    Workload,
    measure,
)


class Time:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def test_prefill_is_timed_until_the_last_row_has_its_first_token() -> None:
    time = Time()
    clock = Clock(2, time)
    time.now = 10.5
    clock.tokens(0, [7])
    time.now = 12.0
    clock.tokens(1, [8])
    assert clock.rate(prompt=100, output=1) == 2 * 100 / 2.0
    assert clock.rows == [[7], [8]]


def test_decoding_is_timed_after_every_row_has_its_first_token() -> None:
    time = Time()
    clock = Clock(2, time)
    for now, row, ids in (
        (11.0, 0, [1]),
        (11.5, 0, [2]),  # while row 1 is still in its prompt: not counted
        (12.0, 1, [3]),
        (12.5, 0, [4, 5]),
        (13.0, 1, []),  # no tokens
        (14.0, 1, [6, 7, 8]),
    ):
        time.now = now
        clock.tokens(row, ids)
    assert clock.rate(prompt=100, output=4) == 5 / 2.0
    assert clock.rows == [[1, 2, 4, 5], [3, 6, 7, 8]]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ([3, 4], r"\[3, 4\] tokens, not 4 each"),
        ([0, 4], r"\[0, 4\] tokens, not 4 each"),
        ([4, 5], r"\[4, 5\] tokens, not 4 each"),
        ([4, 4], "all at once"),
    ],
)
def test_invalid_measurements_are_refused(made: list[int], reason: str) -> None:
    clock = Clock(2, Time())
    for row, count in enumerate(made):
        clock.tokens(row, [1] * count)
    with pytest.raises(EngineFailure, match=reason):
        clock.rate(prompt=1, output=4)


class Counting:
    """Answers every prompt with consecutive numbers from its first token on."""

    name = "counting 1"

    def __init__(self) -> None:
        self.asked: list[tuple[Prompts, int]] = []

    def generate(self, prompts: Prompts, output: int, clock: Clock) -> None:
        self.asked.append((prompts, output))
        for step in range(output):
            for row, prompt in enumerate(prompts):
                clock.tokens(row, [prompt[0] + step])


@pytest.fixture
def job() -> Job:
    work = Workload("b2", 3, [[9, 9], [8, 8]], [[[1, 1], [2, 2]], [[3, 3], [4, 4]]])
    return Job("model", 1, 0.0, [work], {})


def test_each_workload_is_warmed_up_and_its_first_batch_is_kept(job: Job) -> None:
    engine = Counting()
    answer = measure(engine, job)
    work = job.workloads[0]
    assert engine.asked == [
        ([[1]], 1),
        (work.warm_up, WARM_UP),
        (work.batches[0], 3),
        (work.batches[1], 3),
    ]
    assert answer.tokens == {"b2": [[1, 2, 3], [2, 3, 4]]}
    assert [len(rates) for rates in answer.rates.values()] == [2]
    assert answer.engine == "counting 1"


def test_a_row_has_room_for_the_warm_up_too() -> None:
    def lengths() -> Iterator[int]:
        for output in (1, 64):
            yield Workload("w", output, [[0] * 10], []).length

    assert [*lengths()] == [10 + WARM_UP + 8, 10 + 64 + 8]


def test_a_job_is_as_large_as_its_largest_workloads() -> None:
    works = [Workload("a", 4, [[0] * 50], []), Workload("b", 4, [[0] * 5] * 8, [])]
    job = Job("model", 1, 0.0, works, {})
    assert (job.max_batch, job.max_len) == (8, works[0].length)
