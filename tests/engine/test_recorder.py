"""The flight recorder, and replays of its recordings."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
from helpers.faults import raising
from helpers.recorded import written
from helpers.served_engine import FakeExecutor

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, PageSource, TokenLogprobs
from kvik.engine.core import EngineCore
from kvik.engine.loop import EngineLoop
from kvik.engine.memory_watch import MemoryReading, MemoryWatch
from kvik.engine.recorder import (
    Added,
    ClockTape,
    Event,
    Failed,
    Finished,
    GaveBack,
    Header,
    Planned,
    Recorder,
    RecordError,
    RecordReader,
    Stopped,
    encode,
    open_recording,
)
from kvik.engine.replay import RecordedClock, Replay, Replayed, fetches

from .conftest import make_config


@dataclass
class Worker(FakeExecutor):
    """An executor that can fail the first row of a step."""

    token: Callable[[int, int], int] = lambda step, row: 1 + (7 * step + row) % 50
    breaks_at: int = -1

    def submit(self, plan: SchedulerOutput) -> object:
        self.errors = {0: "it broke"} if plan.step == self.breaks_at else {}
        return super().submit(plan)


class Rig:
    """A recorded engine without a model, whose clock ticks at every reading."""

    def __init__(self, path: Path, depth: int = 1, limit: int = 1 << 20, **scheduler: object):
        self.path = path
        self.config = make_config(**scheduler)
        self.executor = Worker(depth=depth)
        tape = ClockTape(lambda: 0.5)
        tape()
        self.recorder = Recorder(path, self.config, tape, limit)
        ticks = count(100.0, 0.001)
        self.loop = EngineLoop(
            EngineCore(self.config), self.executor, lambda: next(ticks), [self.recorder]
        )
        self.tape = tape

    def add(self, name: str, length: int = 5, **options: object) -> None:
        deadline = options.pop("deadline", None)
        params = SamplingParams(**{"max_tokens": 6, **options})
        prompt = [length, *range(2, 1 + length)]
        self.loop.add(EngineRequest(name, prompt, params, deadline=deadline))

    def run(self) -> None:
        while self.loop.has_work:
            self.loop.step()


def read(path: Path) -> tuple[Header, list[Event]]:
    with open_recording(path) as file:
        reader = RecordReader(file, path.name)
        return reader.header, list(reader.events())


def write(path: Path, header: Header, events: list[Event]) -> None:
    path.write_bytes(written(header, events))


def replayed(rig: Rig) -> Replayed:
    header, events = read(rig.path)
    assert header.config == rig.config
    executor = Worker(depth=rig.executor.depth, breaks_at=rig.executor.breaks_at)
    replay = Replay(EngineCore(header.config), executor, RecordedClock(header.readings))
    return replay.run(events, lambda steps: None)


def flight(path: Path, depth: int = 1) -> Rig:
    """Record siblings, an abort, a deadline, a failed row and a failed step."""
    rig = Rig(path, depth)
    rig.executor.breaks_at = 2
    for i in range(3):
        rig.add(f"r{i}", 3 + 9 * i, n=1 + i % 2, seed=None if i else 5)
    rig.loop.step()
    rig.add("late", 4, deadline=100.03, max_tokens=50)
    rig.loop.step()
    rig.loop.end("r1", 0)
    rig.loop.step()
    rig.add("after", 30)
    rig.executor.raises = RuntimeError("all of it broke")
    rig.loop.step()
    rig.add("again", 30)
    rig.run()
    rig.loop.close()
    return rig


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recording_with_failures_and_aborts_is_replayed_exactly(tmp_path, depth):
    rig = flight(tmp_path / "flight", depth)
    result = replayed(rig)
    assert result.difference is None
    assert (result.requests, result.failed_steps) == (6, 1)
    assert result.steps == rig.loop.core.scheduler.counters.steps
    assert result.tokens == rig.loop.core.scheduler.counters.delivered_tokens
    assert result.stopped == "the engine was closed"


def test_returned_memory_is_replayed(tmp_path):
    rig = Rig(tmp_path / "flight")
    left = [1 << 40]
    rig.loop = EngineLoop(
        rig.loop.core,
        rig.executor,
        rig.loop.clock,
        rig.loop.observers,
        MemoryWatch(1 << 30, lambda: MemoryReading(0.0, left[0])),
    )
    for name in "abc":
        rig.add(name, 30)
        rig.run()
        left[0] = 0 if name == "a" else 1 << 40
    rig.loop.close()
    assert rig.loop.stats().given_back_blocks > 0
    assert any(isinstance(event, GaveBack) for event in read(rig.path)[1])
    result = replayed(rig)
    assert (result.difference, result.requests) == (None, 3)


def test_a_recording_contains_all_events_in_order(tmp_path):
    rig = Rig(tmp_path / "flight")
    rig.add("a", 4, max_tokens=2)
    rig.loop.step()
    rig.tape()
    rig.run()
    rig.loop.close()
    header, events = read(rig.path)
    assert header.readings == [0.5]  # of the worker's clock, during its setup
    kinds = [type(e).__name__ for e in events]
    assert kinds == ["Added", "Planned", "Finished", "Planned", "Finished", "Stopped"]
    added, planned, finished = events[0], events[1], events[2]
    assert added.request.prompt_token_ids == [4, 2, 3, 4]
    assert added.seed != 0 and added.request.params.seed is None
    assert (planned.step, planned.slots, planned.num_scheduled_tokens) == (0, [0], [4])
    assert finished.token_ids == [[1]] and events[4].readings == [0.5]
    assert added.now < planned.now < finished.now
    assert stat.S_IMODE(rig.path.stat().st_mode) == 0o600


Change = Callable[[list[Event]], None]


def change(kind: type, nth: int, **fields: object) -> Change:
    def apply(events: list[Event]) -> None:
        at = [i for i, event in enumerate(events) if isinstance(event, kind)][nth]
        old = events[at]
        values = {name: getattr(old, name) for name in old.__struct_fields__}
        events[at] = kind(**{**values, **fields})

    return apply


@pytest.mark.parametrize(
    ("changed", "step", "request_id", "what"),
    [
        (change(Finished, 1, token_ids=[[8], [9], [9], []]), 1, "r2/0", "the tokens are"),
        (change(Planned, 2, digest=b"12345678"), 2, None, "the plan has the same rows"),
        (
            change(Planned, 1, num_scheduled_tokens=[9, 1, 1, 9]),
            1,
            "r0/0",
            "it gets 1 tokens, and got 9",
        ),
        (change(Planned, 1, step=9), 1, None, "it is planned where step 9 was"),
        (change(Added, 0, seed=6), 0, "r0", "its seed is 5, and was 6"),
        (change(Finished, 0, digest=b"87654321"), 0, None, "log probabilities"),
        (change(Finished, 0, errors={0: "no"}), 0, "r0/0", "its error is None, and was no"),
        (lambda events: events.pop(0), 0, None, "the plan has 2 rows, and had 3"),
        (lambda events: events.insert(1, events[0]), 0, "r0", "it is refused, and was not before"),
    ],
)
def test_a_replay_reports_the_first_difference(tmp_path, changed, step, request_id, what):
    rig = flight(tmp_path / "flight")
    header, events = read(rig.path)
    changed(events)
    write(rig.path, header, events)
    found = replayed(rig).difference
    assert (found.step, found.request) == (step, request_id)
    assert what in found.what


def test_changed_or_lost_bytes_are_detected(tmp_path):
    rig = flight(tmp_path / "flight")
    whole = rig.path.read_bytes()
    for at in (len(whole) // 2, len(whole) - 3):
        rig.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(RecordError, match="damaged at byte"):
            read(rig.path)
    rig.path.write_bytes(b"kvik flight recording, format 9\n" + whole[32:])
    with pytest.raises(RecordError, match="of another version"):
        read(rig.path)
    with pytest.raises(RecordError, match="cannot be read"):
        open_recording(tmp_path / "nothing")


def test_a_truncated_recording_is_replayed_to_its_end(tmp_path):
    rig = flight(tmp_path / "flight")
    whole = rig.path.read_bytes()
    _, events = read(rig.path)
    steps = set()
    for size in range(len(whole) - 1, len(whole) // 3, -41):
        rig.path.write_bytes(whole[:size])
        result = replayed(rig)
        assert result.difference is None and result.stopped is None
        steps.add(result.steps)
    assert len(steps) > 3
    rig.path.write_bytes(whole[:40])
    with pytest.raises(RecordError, match="before anything happened"):
        read(rig.path)
    assert isinstance(events[-1], Stopped)


def test_a_step_that_kills_the_engine_is_recorded_and_replayed(tmp_path):
    rig = Rig(tmp_path / "flight")
    rig.add("a")
    rig.loop.step()
    rig.executor.raises = SystemExit()
    with pytest.raises(SystemExit):
        rig.loop.step()
    _, events = read(rig.path)
    assert isinstance(events[-1], Planned) and events[-1].step == 1
    result = replayed(rig)
    assert (result.steps, result.unfinished, result.difference) == (1, 1, None)


def test_a_recording_ends_at_its_limit_and_serving_continues(tmp_path, caplog):
    limit = len(encode(Header("", make_config(), []))) + 5000
    rig = Rig(tmp_path / "flight", limit=limit)
    with caplog.at_level(logging.WARNING):
        for i in range(200):
            rig.add(f"r{i}")
            rig.run()
    assert [r.getMessage() for r in caplog.records] == [
        f"recording ends: {rig.path} has reached {limit} bytes"
    ]
    assert limit - 1000 < rig.path.stat().st_size <= limit
    result = replayed(rig)
    assert result.difference is None and result.requests > 3
    assert result.stopped == "the file had reached its limit"
    assert rig.tape.take() == []  # events after the limit are not kept


def test_a_full_disk_ends_the_recording_alone(tmp_path, caplog, monkeypatch):
    rig = Rig(tmp_path / "flight")
    rig.add("a")
    rig.run()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", raising(full))
        rig.add("b")
        rig.run()
    rig.add("c")
    rig.run()
    rig.loop.close()
    assert [r.getMessage() for r in caplog.records] == [
        f"recording ends: {rig.path}: No space left on device"
    ]
    result = replayed(rig)
    assert result.difference is None and result.requests == 1


def test_a_deleted_file_ends_the_recording_alone(tmp_path, caplog):
    rig = Rig(tmp_path / "flight")
    rig.path.unlink()
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            rig.add(name)
            rig.run()
    rig.loop.close()
    assert [str(rig.path) in record.getMessage() for record in caplog.records] == [True]
    assert not rig.path.exists()


def test_an_event_that_cannot_be_encoded_only_ends_the_recording(tmp_path, caplog):
    rig = Rig(tmp_path / "flight")
    with caplog.at_level(logging.WARNING):
        rig.recorder.ended("a\ud800", None, FinishReason.ABORT, None, 1.0)
        rig.recorder.ended("a\ud800", None, FinishReason.ABORT, None, 1.0)
    assert len(caplog.records) == 1
    assert replayed(rig).stopped == "an event could not be encoded"


def test_the_previous_recording_is_kept(tmp_path):
    first = flight(tmp_path / "flight").path.read_bytes()
    rig = Rig(tmp_path / "flight")
    assert (tmp_path / "flight.previous").read_bytes() == first
    rig.loop.close()


@pytest.mark.parametrize("name", ["no/flight", "."])
def test_without_a_recording_serving_begins(name, tmp_path, caplog):
    rig = Rig(tmp_path / name)  # as an engine that starts again after the folder was deleted
    rig.add("a")
    rig.run()
    rig.loop.close()
    assert [str(rig.path) in record.getMessage() for record in caplog.records] == [True]


def test_events_are_on_disk_once_there_is_nothing_to_do(tmp_path):
    rig = Rig(tmp_path / "flight")
    rig.add("a", max_tokens=2)
    rig.run()
    _, events = read(rig.path)
    assert isinstance(events[-1], Finished)
    rig.executor.raises = RuntimeError("broken")
    rig.add("b", max_tokens=2)
    rig.run()
    _, events = read(rig.path)
    assert isinstance(events[-1], Failed)


def test_pages_of_another_engine_are_computed_with_the_adapter_of_their_request():
    request = EngineRequest("a", [*range(9)], SamplingParams(adapter="mine"), cache_salt="s")
    request = replace(request, source=PageSource("127.0.0.1", 9000, "lease", 8))
    (computed,) = fetches([Added(0.0, request, 5)])
    assert (computed.prompt_token_ids, computed.cache_salt) == ([*range(8)], "s")
    assert computed.params.adapter == "mine"


def test_log_probabilities_and_embeddings_are_compared(tmp_path):
    plain = ModelRunnerOutput(0, [[1]])
    digests = set()
    for output in (
        plain,
        replace(plain, logprobs={0: [TokenLogprobs(1, -0.5, 1)]}),
        replace(plain, logprobs={0: [TokenLogprobs(1, -0.25, 1)]}),
        replace(plain, prompt_logprobs={0: [TokenLogprobs(1, -0.5, 1)]}),
        replace(plain, embeddings={0: [0.5]}),
    ):
        path = tmp_path / "flight"
        recorder = Recorder(path, make_config(), ClockTape(lambda: 0.0))
        recorder.finished(output, 1.0)
        recorder.close("it is enough")
        digests.add(read(path)[1][0].digest)
    assert len(digests) == 5 and b"" in digests
