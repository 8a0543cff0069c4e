"""The engine's side of the socket: the loop survives any frame and any failure of a request."""

from __future__ import annotations

import copy
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
from helpers.faults import fail
from helpers.http_server import until
from helpers.served_engine import FakeExecutor, gated_executor, tiny_config
from helpers.served_engine import engine_request as request
from hypothesis import given
from hypothesis import strategies as st

from kvik.core.plan import SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.scheduler import Scheduler
from kvik.core.step_clock import StepClock
from kvik.core.types import (
    EngineRequest,
    FinishReason,
    PromptUse,
    Request,
    RequestDelta,
    TokenLogprobs,
)
from kvik.engine import host as module
from kvik.engine import wire
from kvik.engine.core import EngineCore
from kvik.engine.host import DeltaBuffer, EngineHost, StepWatch, step_limit
from kvik.engine.live import LiveView
from kvik.engine.loop import EngineLoop, LoopObserver
from kvik.engine.memory_watch import MemoryReading, MemoryWatch
from kvik.engine.stats import EngineStats
from kvik.engine.wire import Add, End, FrameReader, HostSocket, Lost, Query, Ready, Reply, Stepped
from kvik.errors import GroupLost


class Peer:
    """The other end: what it sent and received."""

    def __init__(self, executor: FakeExecutor, **scheduler: object) -> None:
        self.executor = executor
        self.core = EngineCore(tiny_config(**scheduler))
        self.loop = EngineLoop(self.core, executor, time.monotonic)
        self.sock, theirs = socket.socketpair()
        self.line = HostSocket(theirs)
        self.host = EngineHost(self.loop, self.line)
        self.raised: BaseException | None = None
        self.frames = FrameReader()
        self.deltas: list[RequestDelta] = []
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.host.run()
        except BaseException as error:
            self.raised = error
        finally:
            self.line.close()

    def send(self, message: msgspec.Struct) -> None:
        self.sock.sendall(wire.frame(message))

    def send_body(self, body: bytes) -> None:
        self.sock.sendall(len(body).to_bytes(4, "little") + body)

    def add(self, wanted: EngineRequest) -> None:
        body = msgspec.Raw(wire.encode(wanted))
        self.send(Add(wanted.request_id, wanted.params.n, body))

    def receive(self, timeout: float = 10.0) -> list[object]:
        """Return the messages of the next read; empty if the engine closed the connection."""
        ready, _, _ = select.select([self.sock], [], [], timeout)
        assert ready, "the engine says nothing"
        self.sock.setblocking(False)
        bodies, _ = self.frames.receive(self.sock)
        self.sock.setblocking(True)
        messages = [wire.from_engine.decode(b) for b in bodies]
        for message in messages:
            if isinstance(message, Stepped):
                self.deltas += message.deltas()
        return messages

    def until_ended(self, *names: str, n: int = 1) -> None:
        """Wait until these requests have ended, each with one last delta."""
        while sum(d.finish_reason is not None for d in self.deltas) < len(names) * n:
            assert self.receive(), "the engine has ended"
        ends = [(d.request_id, d.index) for d in self.deltas if d.finish_reason is not None]
        assert sorted(ends) == sorted((name, i) for name in names for i in range(n))

    def ask(self, question: str, ticket: int = 7) -> Reply:
        self.send(Query(ticket, question))
        while True:
            for message in self.receive():
                if isinstance(message, Reply):
                    assert message.ticket == ticket
                    return message

    def at_rest(self) -> None:
        stats = msgspec.msgpack.decode(self.ask("stats").body, type=EngineStats)
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
        assert not self.core.has_requests


@contextmanager
def engine(executor: FakeExecutor | None = None, **scheduler: object) -> Iterator[Peer]:
    peer = Peer(executor or FakeExecutor(), **scheduler)
    peer.thread.start()
    try:
        assert peer.receive() == [Ready()]
        yield peer
    finally:
        peer.sock.close()
        peer.executor.gate.set()
        peer.thread.join(10)
        assert not peer.thread.is_alive()


def last(peer: Peer, name: str) -> RequestDelta:
    (delta,) = [d for d in peer.deltas if d.request_id == name and d.finish_reason is not None]
    return delta


GARBAGE = [
    b"",
    b"\xc1",
    b"\x93",
    wire.encode(None),
    wire.encode({"add": 1}),
    wire.encode(["nothing", 1, 2]),
    wire.encode(["add"]),
    wire.encode(["add", 1, "n", {}]),
    wire.encode(["end", "a", "0", "why", None]),
    wire.encode(["end", "unknown", None, "abort", None]),
    wire.encode(["end", "unknown", 12, "stop", "text"]),
    wire.encode(["ask", "ticket", "stats"]),
    wire.encode(["stepped", 1, False]),
    b"\x91" * 5000,
]


def test_invalid_frames_are_ignored_and_affect_no_request():
    with engine() as peer:
        peer.add(request("a", max_tokens=50))
        for body in GARBAGE:
            peer.send_body(body)
        rng = random.Random(0)
        for _ in range(300):
            peer.send_body(rng.randbytes(rng.randrange(40)))
        peer.add(request("b"))
        peer.until_ended("a", "b")
        assert len([t for d in peer.deltas if d.request_id == "a" for t in d.token_ids]) == 50
        peer.at_rest()


def test_a_request_that_cannot_be_read_ends_all_its_siblings():
    with engine() as peer:
        peer.add(request("good", max_tokens=20))
        peer.send(Add("bad", 3, msgspec.Raw(wire.encode({"request_id": "bad"}))))
        peer.send(Add("other", 1, msgspec.Raw(wire.encode(request("not the same")))))
        while len([d for d in peer.deltas if d.finish_reason is not None]) < 5:
            peer.receive()
        bad = [d for d in peer.deltas if d.request_id == "bad"]
        assert [(d.index, d.finish_reason) for d in bad] == [
            (i, FinishReason.ERROR) for i in range(3)
        ]
        assert "ValidationError" in bad[0].error
        assert bad[0].report is not None
        assert last(peer, "other").finish_reason is FinishReason.ERROR
        assert last(peer, "good").finish_reason is FinishReason.LENGTH
        peer.at_rest()


def test_requests_for_another_configuration_are_refused_with_the_reason():
    with engine() as peer:
        peer.add(request("long", [1] * 300))
        peer.until_ended("long")
        assert "leaves no room" in last(peer, "long").error
        assert last(peer, "long").refused is None


def test_a_full_queue_refuses_and_says_which_limit():
    executor = FakeExecutor()
    executor.gate.clear()
    with engine(executor, max_num_seqs=1, max_queued_requests=2) as peer:
        for name in "abcd":
            peer.add(request(name))
        executor.gate.set()
        peer.until_ended("a", "b", "c", "d")
        refused = [n for n in "abcd" if last(peer, n).refused]
        assert refused
        for name in refused:
            assert last(peer, name).refused == "max_queued_requests"
            assert last(peer, name).finish_reason is FinishReason.ERROR
            assert "retry later" in last(peer, name).error
        peer.at_rest()


def test_a_duplicate_id_does_not_end_the_first_request():
    with engine(gated_executor(after=2)) as peer:
        peer.add(request("a", max_tokens=30))
        peer.receive()
        peer.add(request("a"))
        peer.executor.gate.set()
        while len([d for d in peer.deltas if d.finish_reason is not None]) < 2:
            peer.receive()
        tokens = [t for d in peer.deltas for t in d.token_ids]
        assert len(tokens) == 30
        peer.at_rest()


def of_victim(_: object, wanted: EngineRequest, now: float) -> bool:
    return wanted.request_id == "victim"


def of_second_sibling(_: object, wanted: Request, now: float) -> bool:
    return wanted.key == ("victim", 1)


def of_victims_tokens(steps: int, waits: bool, deltas: list[RequestDelta]) -> bool:
    return any(delta.request_id == "victim" and delta.error is None for delta in deltas)


def _in_decoding(patch: pytest.MonkeyPatch) -> None:
    decoder = SimpleNamespace(decode=wire.engine_request.decode)
    patch.setattr(module, "engine_request", decoder)
    fail(patch, decoder, "decode", MemoryError("decoding"), lambda body: b"victim" in bytes(body))


def _spoil(patch: pytest.MonkeyPatch, *, at_the_end: bool) -> None:
    genuine = EngineLoop.step

    def broken(self):
        deltas = genuine(self)
        for delta in deltas:
            finished = delta.finish_reason is FinishReason.LENGTH
            if delta.request_id == "victim" and finished == at_the_end and not delta.error:
                delta.logprobs = [TokenLogprobs(object(), 0.0, 1)]
        return deltas

    patch.setattr(EngineLoop, "step", broken)


@pytest.mark.parametrize(
    "where",
    ["decoding", "core", "second sibling", "sorting", "encoding tokens", "encoding the end"],
)
def test_one_request_fails_alone(where):
    with pytest.MonkeyPatch.context() as patch:
        match where:
            case "decoding":
                _in_decoding(patch)
            case "core":
                fail(patch, EngineCore, "add", KeyError("core"), of_victim)
            case "second sibling":
                fail(patch, Scheduler, "add", ArithmeticError("queue"), of_second_sibling)
            case "sorting":
                fail(patch, module, "stepped", TypeError("sorting"), of_victims_tokens)
            case _:
                _spoil(patch, at_the_end=where == "encoding the end")
        with engine() as peer:
            peer.add(request("before", max_tokens=20))
            peer.add(request("victim", n=2, max_tokens=200))
            peer.add(request("after", max_tokens=20))
            seen: dict[tuple[str, int], RequestDelta] = {}  # the client takes the first end
            while len(seen) < 4:
                peer.receive()
                for delta in peer.deltas:
                    if delta.finish_reason is not None:
                        seen.setdefault((delta.request_id, delta.index), delta)
            peer.at_rest()
            delivered = peer.core.stats().delivered_tokens
        assert peer.raised is None
    # Requests whose tokens cannot be delivered are not computed.
    assert delivered < 100 or where == "encoding the end"
    for index in range(2):
        assert seen["victim", index].finish_reason is FinishReason.ERROR
        assert "Error" in seen["victim", index].error
        assert seen["victim", index].report is not None
    for name in ("before", "after"):
        assert seen[name, 0].finish_reason is FinishReason.LENGTH
        assert len([t for d in peer.deltas if d.request_id == name for t in d.token_ids]) == 20


def test_ending_that_fails_is_logged(caplog):
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, EngineCore, "end", LookupError("ending"))
        with engine(gated_executor()) as peer:
            peer.add(request("a", max_tokens=20))
            peer.send(End("a", None, FinishReason.ABORT, None))
            peer.executor.gate.set()
            peer.until_ended("a")
            peer.at_rest()
    assert "could not be ended" in caplog.text


def test_an_end_frees_within_a_step():
    with engine(gated_executor(after=5)) as peer:
        peer.add(request("a", max_tokens=200, n=2))
        until(lambda: len(peer.executor.plans) == 6)  # one waits
        peer.send(End("a", 1, FinishReason.STOP, None))
        peer.send(End("a", 0, FinishReason.ABORT, "why"))
        peer.executor.gate.set()
        peer.until_ended("a", n=2)
        assert len(peer.executor.plans) == 6
        peer.at_rest()


def test_queries_are_answered():
    with engine() as peer:
        peer.add(request("a"))
        peer.until_ended("a")
        stats = msgspec.msgpack.decode(peer.ask("stats").body, type=EngineStats)
        assert stats.delivered_tokens == 5
        view = msgspec.msgpack.decode(peer.ask("live").body, type=LiveView)
        assert len(view.steps.ended) == 5
        assert peer.ask("reset_prefix_cache").error is None
        unknown = peer.ask("the weather")
        assert "KeyError" in unknown.error


def test_an_idle_engine_checks_memory_without_steps(monkeypatch):
    monkeypatch.setattr("kvik.engine.loop.LOOK_SECONDS", 0.005)
    monkeypatch.setattr("kvik.engine.memory_watch.LOOK_SECONDS", 0.0)
    planned, left = [], [1 << 40]

    class Plans(LoopObserver):
        def planned(self, plan, now):
            planned.append(plan)

    with engine() as peer:
        peer.loop.watch(Plans())
        peer.loop._memory = MemoryWatch(1 << 30, lambda: MemoryReading(0.0, left[0]))
        peer.add(request("a"))
        peer.until_ended("a")
        time.sleep(0.05)
        steps = len(planned)
        left[0] = 0
        until(lambda: peer.core.stats().given_back_blocks > 0)
        assert len(planned) == steps


def test_an_idle_engine_prepares_between_polls_and_then_waits():
    class IdleWork(FakeExecutor):
        more, rested, waits, computing = True, 0, False, False

        def idle_step(self):
            assert not self.computing
            self.rested += 1
            time.sleep(0.001)
            self.waits = not self.more
            return self.more

        def submit(self, plan):
            self.computing = True
            return super().submit(plan)

        def result(self, handle):
            self.computing = False
            return super().result(handle)

    executor = IdleWork()
    with engine(executor) as peer:
        until(lambda: executor.rested)  # before any request
        peer.add(request("a"))
        peer.until_ended("a")  # although more work remains for idle time
        executor.more = False
        until(lambda: executor.waits)
        rested = executor.rested
        time.sleep(0.05)
        assert executor.rested == rested
        peer.add(request("b"))
        peer.until_ended("a", "b")


def test_an_engine_prepares_for_grammars_when_it_starts():
    """Steps of later requests would pause."""
    executor, prepared = FakeExecutor(), list[str]()
    executor.prepare_grammars = lambda: prepared.append("grammars")
    with engine(executor) as peer:
        peer.add(request("a"))
        peer.until_ended("a")
        assert prepared == ["grammars"]


def test_repeated_failures_of_steps_end_the_engine():
    class Lost(FakeExecutor):
        def submit(self, plan):
            raise RuntimeError("device lost")

    with engine(Lost()) as peer:
        for i in range(module.MAX_FAILED_STEPS):
            assert peer.raised is None
            peer.add(request(f"r{i}"))
            peer.until_ended(*(f"r{k}" for k in range(i + 1)))
        assert peer.receive() == []
        assert "device lost" in last(peer, "r0").error
    assert "3 steps in a row" in str(peer.raised)


class Lossy(FakeExecutor):
    """Loses a process in a step or while idle."""

    def lose(self) -> None:
        self.lost = "rank 1 has ended"
        self.raises = GroupLost("tensor_parallel_size", self.lost)


def test_an_executor_that_is_lost_ends_the_engine():
    """The client ends running requests, once."""
    with engine(Lossy(seconds=0.05), max_num_seqs=2) as peer:
        for name in ("a", "b", "waits"):
            peer.add(request(name, max_tokens=100, ignore_eos=True))
        while {d.request_id for d in peer.deltas} < {"a", "b"}:
            peer.receive()
        peer.executor.lose()
        messages: list[object] = []
        while not any(isinstance(message, Lost) for message in messages):
            messages += peer.receive()
        assert messages[-1] == Lost("GroupLost: rank 1 has ended", ["waits"])
        assert not any(delta.finish_reason for delta in peer.deltas)
        peer.thread.join(10)
    assert peer.raised is None


def test_an_executor_that_is_lost_while_it_idles(monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    with engine(Lossy()) as peer:
        peer.executor.lose()
        assert peer.receive() == [Lost("GroupLost: rank 1 has ended", [])]


def test_occasional_failures_of_steps_do_not_end_the_engine():
    executor = FakeExecutor()
    with engine(executor) as peer:
        for i in range(2 * module.MAX_FAILED_STEPS):
            if i % 2 == 0:
                executor.raises = RuntimeError("once")
            peer.add(request(f"r{i}"))
            peer.until_ended(*(f"r{k}" for k in range(i + 1)))
        peer.at_rest()
    assert peer.raised is None


def test_the_host_ends_when_its_client_disconnects_while_requests_run():
    with engine(FakeExecutor(seconds=0.01)) as peer:
        peer.add(request("a", max_tokens=200))
        peer.receive()
        peer.sock.close()
        peer.thread.join(5)
        assert not peer.thread.is_alive()
    assert peer.raised is None


def test_the_host_ends_after_a_frame_with_an_invalid_length(caplog):
    with engine() as peer:
        peer.sock.sendall(b"\xff\xff\xff\xff")
        assert peer.receive() == []
    assert "sent an invalid message" in caplog.text


@pytest.mark.full
def test_the_host_waits_for_a_client_that_does_not_read(monkeypatch):
    monkeypatch.setattr(wire, "MAX_UNSENT", 20_000)
    with engine(max_num_seqs=8) as peer:
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for i in range(400):
            peer.add(request(f"request-{i:030}", max_tokens=50, logprobs=0))
        steps = -1
        while steps != peer.core.scheduler.counters.steps:  # until it blocks
            steps = peer.core.scheduler.counters.steps
            time.sleep(0.2)
        assert peer.core.has_requests
        assert len(peer.line._outbox) < 40_000
        peer.until_ended(*(f"request-{i:030}" for i in range(400)))
        peer.at_rest()


def test_an_idle_engine_sleeps(monkeypatch):
    calls = []
    genuine = EngineLoop.step
    monkeypatch.setattr(EngineLoop, "step", lambda self: calls.append(1) or genuine(self))

    def sleeps() -> bool:
        before = len(calls)
        time.sleep(0.2)
        return len(calls) == before

    with engine() as peer:
        peer.add(request("a"))
        peer.until_ended("a")
        until(sleeps)


def test_the_host_sends_heartbeats_while_a_policy_waits(monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    with engine(policy="dynamic", batch_size=4, max_wait=60.0) as peer:
        peer.add(request("a"))
        beats = []
        while len(beats) < 3:
            beats += [m.waits for m in peer.receive() if isinstance(m, Stepped)]
        assert all(beats) and not peer.deltas


def test_the_host_sends_heartbeats_during_a_long_prompt(monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    executor = FakeExecutor(seconds=0.01)
    with engine(executor, max_num_batched_tokens=8) as peer:
        peer.add(request("a", [1] * 200))
        steps = []
        while not peer.deltas:
            steps += [m.plans for m in peer.receive() if isinstance(m, Stepped)]
        assert len(steps) >= 4
        assert steps == sorted(set(steps))


# Tokens are held briefly, but never lost, doubled or reordered.


class Reader:
    """Records deliveries in order, by completion."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, int]]] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], FinishReason] = {}

    def take(self, deltas: list[RequestDelta]) -> None:
        keys = [(delta.request_id, delta.index) for delta in deltas]
        assert len(set(keys)) == len(keys), "one delta for each completion"
        if keys:
            self.calls.append(keys)
        for key, delta in zip(keys, deltas, strict=True):
            assert key not in self.ends, "it had ended"
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[key] = delta.finish_reason
            if delta.logprobs is not None:
                assert [one.token_id for one in delta.logprobs] == delta.token_ids


def delta(
    request: str,
    index: int,
    token: int,
    reason: FinishReason | None = None,
    prompt: PromptUse | None = None,
) -> RequestDelta:
    logprobs = [TokenLogprobs(token, -1.0, 1)]
    return RequestDelta(request, index, [token], reason, logprobs=logprobs, prompt=prompt)


def plan(num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(0, [0], [num_tokens], [0], [True])


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.sampled_from("abc"),
                    st.integers(0, 2),
                    st.sampled_from([None, None, None, "first", "last"]),
                ),
                max_size=5,
                unique_by=lambda one: one[:2],
            ),
            st.floats(0, 0.05),
            st.integers(1, 64),
        ),
        max_size=40,
    )
)
def test_every_token_once_and_in_order(steps):
    now = 0.0
    reader = Reader()
    held = DeltaBuffer(reader.take)
    sent: dict[tuple[str, int], list[int]] = {}
    token, ended = 0, set()
    for brought, seconds, tokens_of_next in steps:
        deltas, urgent = [], []
        for name, index, event in brought:
            if (name, index) in ended:
                continue
            token += 1
            sent.setdefault((name, index), []).append(token)
            reason = FinishReason.LENGTH if event == "last" else None
            prompt = PromptUse(0, 0) if event == "first" else None
            deltas.append(delta(name, index, token, reason, prompt))
            if event:
                urgent.append((name, index, token))
            if event == "last":
                ended.add((name, index))
        kept = copy.deepcopy([one.token_ids for one in deltas])
        lists = [one.token_ids for one in deltas]
        now += seconds
        reader.take(held.take(deltas, now))
        for name, index, newest in urgent:
            assert reader.tokens[name, index][-1] == newest
        held.planned(plan(tokens_of_next), now)
        assert lists == kept, "the engine's own lists were changed"
    reader.take(held.release(now))
    assert reader.tokens == sent
    assert set(reader.ends) == ended
    assert held.release(now) == []


def test_an_urgent_delta_is_sent_without_buffered_ones():
    reader = Reader()
    held = DeltaBuffer(reader.take)
    reader.take(held.take([delta("a", 0, 1)], 7.0))  # nothing was sent for long, so at once
    reader.take(held.take([delta("a", 0, 2), delta("b", 0, 3, prompt=PromptUse(0, 0))], 7.0))
    assert reader.calls == [[("a", 0)], [("b", 0)]]
    reader.take(held.take([delta("a", 0, 4, FinishReason.LENGTH)], 7.0))
    assert reader.tokens["a", 0] == [1, 2, 4]
    assert reader.ends == {("a", 0): FinishReason.LENGTH}


def test_deltas_are_held_longer_with_more_streams_up_to_a_limit():
    for streams, seconds in ((1, 1 / module.EVENTS_PER_SECOND), (10_000, module.MAX_DELAY)):
        held = DeltaBuffer(lambda deltas: None)

        for now, count in ((0.0, streams), (0.9 * seconds, 0), (1.1 * seconds, streams)):
            everyone = [delta(str(i), 0, 1) for i in range(streams)]
            assert len(held.take(everyone, 7.0 + now)) == count


def test_deltas_are_not_buffered_during_an_unusually_long_step():
    reader = Reader()
    held = DeltaBuffer(reader.take)
    everyone = [delta(name, 0, 1) for name in "abcd"]
    reader.take(held.take(copy.deepcopy(everyone), 7.0))
    held.planned(plan(4), 7.0)
    assert held.take(copy.deepcopy(everyone), 7.0) == []
    held.planned(plan(8), 7.0)  # little longer
    assert len(reader.calls) == 1
    held.planned(plan(17), 7.0)
    assert len(reader.calls) == 2 and reader.tokens["a", 0] == [1, 1]
    held.planned(plan(400), 7.0)  # nothing is held now
    assert len(reader.calls) == 2


def test_prompt_logprobs_and_use_are_sent_with_the_first_token():
    """Log probabilities of a prompt arrive in parts, and its cached tokens with the first token."""
    held = DeltaBuffer(lambda deltas: None)
    held.release(7.0)
    rows = [TokenLogprobs(token, -1.0, 1) for token in range(4)]
    used = PromptUse(3, 0)
    for piece in (rows[:2], rows[2:]):
        assert held.take([RequestDelta("a", 0, [], prompt_logprobs=piece)], 7.0) == []
    found = held.take([RequestDelta("a", 0, [7], prompt=used)], 7.0)
    assert found == [RequestDelta("a", 0, [7], prompt=used, prompt_logprobs=rows)]


# The time limit of a step, estimated from earlier steps.


@pytest.mark.parametrize(
    ("steps", "tokens", "limit"),
    [
        ([], 8, None),
        ([(8, 0.01)], 8, 30.0),
        ([(8, 1.6)], 5, 60.0),  # of one size: 32 s, rounded up
        ([(8, 1.6), (8, 0.1)], 8, 60.0),  # the slowest counts
        ([(8, 60.0), *[(8, 0.1)] * 64], 8, 30.0),  # of the last ones
        ([(1, 0.5)], 2048, 30720.0),  # as long as that many steps of one token
        ([(1, 0.5), (1024, 10.0)], 2048, 480.0),  # or as two of 1024
        ([(2048, 100.0)], 1, 1920.0 * 2),  # no longer than a larger one
        ([(2048, 100.0), (1, 0.5)], 1, 30.0),
    ],
)
def test_the_step_limit_by_earlier_steps(
    steps: list[tuple[int, float]], tokens: int, limit: float | None
) -> None:
    clock, now = StepClock(), 0.0
    for size, seconds in steps:
        clock.note(now, now + seconds, size, prefill=False)
        now += seconds
    slowest = clock.at_most(tokens)
    assert (None if slowest is None else step_limit(slowest)) == limit


def test_the_step_limit_follows_the_size_of_the_current_step() -> None:
    """With a simulated clock: a step takes a second per token."""
    now = 100.0
    limits: list[float] = []

    class Slow(FakeExecutor):
        def submit(self, plan: SchedulerOutput) -> object:
            nonlocal now
            now += plan.num_tokens
            return super().submit(plan)

    loop = EngineLoop(EngineCore(tiny_config()), Slow(), lambda: now)
    loop.watch(StepWatch(loop.core.scheduler, limits.append))
    loop.add(EngineRequest("a", [1] * 40, SamplingParams(max_tokens=3, ignore_eos=True)))
    while loop.has_work:
        loop.step()
    # The prompt's step is first. The limit of a step of one token depends on it, and then on its
    # own time.
    assert limits == [960.0, 30.0]
