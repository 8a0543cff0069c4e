"""Processes of a group, or stages of a pipeline, that are killed, stopped and aborted at any
moment, under a server with clients: each request ends once, with the right text or with an error,
and nothing is left.

A run prints its figures: `pytest tests/server/test_lost_ranks.py --tier=nightly -n 0 -s`.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers import tiers
from helpers.engine_child import children_of, ranks_of
from helpers.http_server import Reply, ask, until
from helpers.optional_native import needs_native
from helpers.server_process import (
    POOLED,
    ProcessResources,
    ServerProcess,
    children,
    command,
    free_port,
    gone,
    resources,
    serve_command,
    server_process,
)

from kvik.child_process import SILENT_SECONDS
from kvik.cli.main import main
from kvik.engine.sources import RestartPolicy

pytestmark = [
    needs_native,
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

ROUNDS, FEW_ROUNDS = 100, 3
CLIENTS = 6
PATIENCE = 180.0  # limit of a client, with two engines lost and processes stopped at their start
GROUP = ("--tensor-parallel-size", "2", "--threads", "2", "--max-model-len", "512")
FLAGS = (*GROUP, "--max-num-seqs", "3")
STAGES = tuple(flag.replace("tensor", "pipeline") for flag in FLAGS)
MIB = 1 << 20
STORY = "Once upon a time there was a fox who lived by the river. "
# Requests of clients, chosen so that most steps are of this kind.
LOADS: Mapping[str, Mapping[str, Any]] = {
    "prompt": {"prompt": STORY * 25, "max_tokens": 2},
    "decode": {"prompt": STORY, "max_tokens": 250},
}
LOADING, REBUILDING = "loading", "rebuilding"
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT)


@dataclass(frozen=True)
class Round:
    """A signal to a process.

    Attributes:
        phase: "loading" of the first engine, "idle", "prompt", "decode", or "rebuilding" after
            another loss.
    """

    rank: int
    number: signal.Signals
    phase: str

    @property
    def crashes(self) -> int:
        return 2 if self.phase == REBUILDING else 1

    @property
    def at_once(self) -> bool:
        return self.number is not signal.SIGSTOP


def drawn(count: int, dice: random.Random) -> Iterator[Round]:
    """Yield all combinations in random order, repeatedly."""
    phases = (LOADING, "idle", *LOADS, REBUILDING)
    combinations = [Round(*row) for row in product((0, 1), SIGNALS, phases)]
    while count > 0:
        dice.shuffle(combinations)
        yield from combinations[:count]
        count -= len(combinations)


@dataclass
class Figures:
    """Times in seconds.

    Attributes:
        starts: of servers, until they were ready.
        errors: from a kill to the error of each begun request.
        silent: the same for a stopped process.
        rebuilds: from a kill to a ready server, by the number of the loss in the server's life.
        ends: from a kill while the first engine loads to the end of the server.
    """

    starts: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    silent: list[float] = field(default_factory=list)
    rebuilds: dict[int, list[float]] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    answered: int = 0
    failed: int = 0
    refused: int = 0

    def __str__(self) -> str:
        start = statistics.median(self.starts)
        lines = [
            f"requests: {self.answered} answered, {self.failed} ended with an error, "
            f"{self.refused} refused while there was no engine",
            f"start: {_spread(self.starts)}",
            f"from a kill to the error: {_spread(self.errors)}",
            f"from a stop to the error: {_spread(self.silent)}",
            f"from a kill while it loads to the end: {_spread(self.ends)}",
        ]
        for number, found in sorted(self.rebuilds.items()):
            ratio = statistics.median(found) / start
            lines.append(f"rebuild after loss {number}: {_spread(found)}; {ratio:.2f} starts")
        return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    middle, most = statistics.median(seconds), max(seconds)
    return f"median {middle:.3f} s, most {most:.3f} s of {len(seconds)}"


@pytest.fixture(autouse=True, scope="module")
def forked_by_day(request: pytest.FixtureRequest) -> None:
    """Start processes as users do in the nightly tier only."""
    if tiers.tier() != "nightly":
        request.getfixturevalue("forked")


# Clients


@dataclass(frozen=True)
class Answer:
    """The end of a request; `error`: its fields, {} for a complete answer."""

    sent: float
    ended: float
    error: Mapping[str, Any]


def read(reply: Reply, *, stream: bool, text: str) -> Mapping[str, Any]:
    """Return the error of a reply; {} if the text is complete."""
    if reply.status != 200:
        assert reply.status in (500, 503), reply.body
        return reply.error
    if not stream:
        assert reply.json["choices"][0]["text"] == text
        return {}
    found = reply.body.decode().split("\n\n")  # with comments while there is no text
    events = [event.removeprefix("data: ") for event in found if event.startswith("data: ")]
    assert sum('"error"' in event for event in events) + events.count("[DONE]") == 1
    *pieces, last = events
    said = "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces)
    if last == "[DONE]":
        assert said == text
        return {}
    assert text.startswith(said)
    return json.loads(last)["error"]


class Load:
    """Clients that send one request after the other until they are stopped."""

    def __init__(self, server: ServerProcess, kind: str, text: str, dice: random.Random) -> None:
        self._server, self._body, self._text = server, LOADS[kind], text
        self._dice = random.Random(dice.random())
        self._stopping = threading.Event()
        self._wrong: list[BaseException] = []
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Answer]:
        """Wait for the last answers."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a request does not end"
        if self._wrong:
            raise self._wrong[0]
        return self.answers

    def _run(self, number: int) -> None:
        stream = number % 2 == 0
        try:
            while not self._stopping.is_set():
                body = {**self._body, "temperature": 0, "ignore_eos": True, "stream": stream}
                sent = time.monotonic()
                body["cache_salt"] = str(self._dice.random())  # each computes its prompt
                reply = ask(self._server, "POST", "/v1/completions", body, PATIENCE)
                error = read(reply, stream=stream, text=self._text)
                self.answers.append(Answer(sent, time.monotonic(), error))
                if error:
                    self._stopping.wait(0.05)
        except BaseException as error:
            self._wrong.append(error)


# Servers


def engine_of(server: int) -> int | None:
    """Return the engine process of a server, if there is one."""
    with suppress(OSError, ValueError):
        for pid in children(server):
            if "engine_process" in command(pid):
                return pid
    return None


def target(server: int, rank: int) -> int | None:
    """Return the process of a rank, if there is one."""
    engine = engine_of(server)
    if rank == 0 or engine is None:
        return engine
    return next(iter(parts_of(engine)), None)


def parts_of(engine: int) -> list[int]:
    """Return its other processes that compute the model: of its group, or a stage."""
    return ranks_of(engine) + children_of(engine, "kvik.stage_process")


def memory_files(pid: int) -> int:
    """Return how many anonymous files a process has open."""
    count = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it has been closed
            count += "memfd:" in os.readlink(f"/proc/{pid}/fd/{number}")
    return count


class Session:
    """One server through several losses."""

    def __init__(self, server: ServerProcess, dice: random.Random, figures: Figures) -> None:
        self.server, self.pid = server, server.process.pid
        self.crashes = 0
        self._dice, self._figures = dice, figures
        self.texts = {}
        for kind, body in LOADS.items():
            whole = {**body, "temperature": 0, "ignore_eos": True}
            reply = ask(server, "POST", "/v1/completions", whole)
            self.texts[kind] = reply.json["choices"][0]["text"]
        self.seen: set[int] = set()
        for kind in LOADS:  # start threads and pools
            load = Load(server, kind, self.texts[kind], dice)
            time.sleep(0.5)
            assert not any(answer.error for answer in load.stop())
        self._before = self._resources()

    def play(self, one: Round) -> None:
        kind = "decode" if one.phase == REBUILDING else one.phase
        load = None
        if kind in LOADS:
            load = Load(self.server, kind, self.texts[kind], self._dice)
            time.sleep(self._dice.uniform(0.2, 0.8))
        if one.phase == REBUILDING:
            self._send(self._dice.choice((0, 1)), signal.SIGKILL)
            until(self._begun_again, 60)
            until(lambda: target(self.pid, one.rank), 60)
            time.sleep(self._dice.uniform(0.0, 2.0))
        sent = self._send(one.rank, one.number)
        until(self._ready_again, 120)
        ready = time.monotonic() - sent
        if one.at_once and one.phase != REBUILDING:
            self._figures.rebuilds.setdefault(self.crashes, []).append(ready)
        if load is not None:
            self._count(load.stop(), one, sent)
        self._at_rest()

    def _send(self, rank: int, number: int) -> float:
        """Send the signal and return the time."""
        pid = until(lambda: target(self.pid, rank), 60)
        engine = engine_of(self.pid)
        self._lost = engine
        self.seen |= {engine, *parts_of(engine)}
        self.crashes += 1
        os.kill(pid, number)
        return time.monotonic()

    def _begun_again(self) -> bool:
        return engine_of(self.pid) not in (None, self._lost)

    def _ready_again(self) -> bool:
        return self._begun_again() and self.server.get("/health")[0] == 200

    def _count(self, answers: list[Answer], one: Round, sent: float) -> None:
        figures = self._figures
        for answer in answers:
            if not answer.error:
                figures.answered += 1
            elif answer.error["code"] == "unavailable":
                figures.refused += 1
            else:
                figures.failed += 1
                if one.phase != REBUILDING:
                    assert answer.sent < sent, answer
                    (figures.errors if one.at_once else figures.silent).append(answer.ended - sent)
                    if one.rank == 1:
                        how = f"signal {one.number.value}" if one.at_once else "silent for 10 s"
                        which = rf"(rank 1|stage 0) has .*{how}"
                        assert re.search(which, answer.error["message"]), answer

    def _resources(self) -> tuple[tuple[ProcessResources, int], ...]:
        pids = (self.pid, engine_of(self.pid))
        return tuple((resources(pid), memory_files(pid)) for pid in pids)

    def _at_rest(self) -> None:
        """Check that nothing is left of earlier engines."""
        engine = engine_of(self.pid)
        ranks = parts_of(engine)
        assert sorted(children(self.pid)) == sorted((engine, *ranks)) and len(ranks) == 1
        until(lambda: all(map(gone, self.seen)), 10)
        until(self._idle, 30)
        for (then, memory), (now, files) in zip(self._before, self._resources(), strict=True):
            assert now.threads <= then.threads + POOLED
            assert now.files <= then.files + 2 and files <= memory
            assert now.memory <= then.memory + 64 * MIB

    def _idle(self) -> bool:
        found = self.server.metrics()
        busy = found["num_requests_running"] + found["num_requests_waiting"]
        return not busy and found["kv_cache_usage_perc"] == 0.0


@contextmanager
def session(
    dice: random.Random, figures: Figures, flags: tuple[str, ...] = FLAGS
) -> Iterator[Session]:
    """Provide a ready server, and check that it leaves nothing behind."""
    began = time.monotonic()
    with server_process(*flags) as server:
        figures.starts.append(time.monotonic() - began)
        made = Session(server, dice, figures)
        yield made
        made.seen |= {made.pid, *children(made.pid)}
    until(lambda: all(map(gone, made.seen)), 10)


def lose_while_it_loads(
    one: Round, dice: random.Random, figures: Figures, flags: tuple[str, ...]
) -> None:
    """The server ends with the reason if a rank is lost, and starts another engine if the engine
    is."""
    port = free_port()
    with subprocess.Popen(
        serve_command(port, *flags), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        server = ServerProcess(process, port)
        try:
            pid = until(lambda: target(process.pid, one.rank), 60)
            time.sleep(dice.uniform(0.0, 1.5))
            seen = {pid, *children(process.pid)}
            os.kill(pid, one.number)
            sent, ready = time.monotonic(), False
            while process.poll() is None and not ready:
                time.sleep(0.01)
                with suppress(OSError):
                    ready = engine_of(process.pid) not in (None, *seen) and (
                        server.get("/health")[0] == 200
                    )
                assert time.monotonic() - sent < 120, "it neither ends nor begins again"
            if ready:
                seen |= set(children(process.pid))
                process.send_signal(signal.SIGTERM)
            elif one.at_once:
                figures.ends.append(time.monotonic() - sent)
            _, output = process.communicate(timeout=60)
            assert process.returncode == (0 if ready else 1), output
            if not ready:  # one error
                why = re.findall(
                    "while it loaded|before it could load|not connected within", output
                )
                assert one.rank == 1 and len(why) == 1, output
        finally:
            process.kill()
    until(lambda: all(map(gone, seen)), 10)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(FLAGS, id="ranks"),
        pytest.param(STAGES, id="stages", marks=pytest.mark.nightly),
    ],
)
def test_processes_are_lost_at_any_moment(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    dice, figures, shared = random.Random(tiers.seed()), Figures(), set(os.listdir("/dev/shm"))
    count = ROUNDS if tiers.tier() == "nightly" else FEW_ROUNDS
    most = RestartPolicy().crashes - 1  # with one more loss, a server ends
    with ExitStack() as stack:
        playing: Session | None = None
        for number, one in enumerate(drawn(count, dice), 1):
            began = time.monotonic()
            if one.phase == LOADING:
                lose_while_it_loads(one, dice, figures, flags)
            else:
                if playing is None or playing.crashes + one.crashes > most:
                    stack.close()
                    playing = stack.enter_context(session(dice, figures, flags))
                playing.play(one)
            with capsys.disabled():
                took = time.monotonic() - began
                print(f"{number}: rank {one.rank}, {one.number.name}, {one.phase}: {took:.1f} s")
    assert set(os.listdir("/dev/shm")) <= shared
    with capsys.disabled():
        print(figures)


@pytest.mark.nightly
def test_processes_of_a_torch_group_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIK_KERNELS", "torch")
    monkeypatch.setenv("KVIK_TENSOR_PARALLEL_CUT", "fast")
    dice = random.Random(tiers.seed())
    with session(dice, Figures(), (*FLAGS, "--dtype", "float32")) as playing:
        playing.play(Round(1, signal.SIGKILL, "decode"))
        playing.play(Round(0, signal.SIGKILL, "prompt"))


@pytest.mark.nightly
def test_a_machine_with_twice_the_work_loses_nothing() -> None:
    """For longer than a process may be silent."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        with server_process(*FLAGS) as server:
            end = time.monotonic() + 2.5 * SILENT_SECONDS
            while time.monotonic() < end:
                body = {"prompt": STORY, "max_tokens": 4}
                assert ask(server, "POST", "/v1/completions", body).status == 200
            assert server.metrics()["engine_starts_total"] == 1
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "lost"), [(FLAGS, "rank 1"), (STAGES, "stage 0")], ids=["ranks", "stages"]
)
def test_recordings_of_both_groups_are_replayed(
    flags: tuple[str, ...], lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "flight"
    with server_process(*flags, "--record", str(file)) as server:
        text = ask(server, "POST", "/v1/completions", {**LOADS["decode"], "temperature": 0}).json
        load = Load(server, "decode", text["choices"][0]["text"], random.Random(0))
        time.sleep(0.5)
        engine = server.engine_pid
        os.kill(parts_of(engine)[0], signal.SIGKILL)
        until(lambda: engine_of(server.process.pid) not in (None, engine))
        server.wait_ready()
        time.sleep(0.5)
        load.stop()
    for name, end in (("flight.previous", f"{lost} has ended with signal 9"), ("flight", "closed")):
        assert main(["replay", str(tmp_path / name), "--tensor-parallel-size", "1"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("equal: ") and f"{end}\n" in out
