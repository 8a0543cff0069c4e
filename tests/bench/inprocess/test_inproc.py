"""Loads on an engine in this process: answers and times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvik.engine.loop import Engine
from kvik.errors import KvikError
from kvik.launch import reschedule
from kvik_bench.inprocess.inproc import BenchRequest, run_jobs

PROMPTS = [[20, 21, 22], [30, 31, 32, 33, 34], [40]]
LENGTHS = [4, 2, 7]


def test_answers_and_records_are_in_the_order_of_the_jobs(engine: Engine) -> None:
    jobs = [BenchRequest(p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    run = run_jobs(engine, jobs)
    assert [len(answer) for answer in run.answers] == LENGTHS
    assert [record.prompt_tokens for record in run.records] == [3, 5, 1]
    assert [record.num_output_tokens for record in run.records] == LENGTHS
    assert all(record.completed for record in run.records)
    last = max(record.finished or 0.0 for record in run.records)
    assert run.started <= run.records[0].times[0] <= last <= run.ended
    assert run.after.steps - run.before.steps == 7
    assert 0.0 < run.kv_usage <= 1.0
    alone = [run_jobs(engine, [job]).answers[0] for job in jobs]
    assert alone == run.answers  # greedy


def test_a_request_is_sent_when_it_is_due(engine: Engine) -> None:
    run = run_jobs(engine, [BenchRequest(PROMPTS[0], 2, due=0.1), BenchRequest(PROMPTS[1], 2)])
    late, early = run.records
    assert late.sent == late.due == pytest.approx(run.started + 0.1)
    assert late.times[0] >= late.due
    assert early.finished < run.ended
    assert run.seconds >= 0.1


def test_a_short_queue_only_delays(engine: Engine) -> None:
    """Requests refused by the queue wait outside, and their wait counts."""
    scheduler = replace(engine.resolved.scheduler, max_queued_requests=2)
    short = reschedule(engine, scheduler, engine.resolved.cache)
    run = run_jobs(short, [BenchRequest([20 + i], 2) for i in range(7)])
    assert all(record.completed for record in run.records)
    assert {record.sent for record in run.records} == {run.started}


def test_nothing_is_sent_when_one_can_never_be_served(engine: Engine) -> None:
    before = engine.loop.stats()
    with pytest.raises(KvikError):
        run_jobs(engine, [BenchRequest([1], 2), BenchRequest([1] * 200, 2)])
    assert engine.loop.stats().steps == before.steps
    assert not engine.loop.has_work
