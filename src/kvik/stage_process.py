"""Stages of a pipeline before the last one: `StageProcesses` for the engine's process, which is the
last stage, and `main` for the first process of each other stage.

Two kinds of sockets join them. By its line each stage is told what to do; it lives as long as that.
By a hop a stage hands on what its layers have made of a step. A thread takes in what comes by a
hop, so that the stage before goes on meanwhile.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
import torch

from kvik.child_process import live_with_parent, python_command
from kvik.config.config import ResolvedConfig
from kvik.errors import ConfigError, GroupLost
from kvik.rank_process import END_SECONDS, RankProcesses, cores_of, exit_told
from kvik.worker.group import Message
from kvik.worker.ranks import LeadingRank, encode

OPTION = "pipeline_parallel_size"


class StageStart(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a stage: which it is, and what to load."""

    config: ResolvedConfig
    stage: int
    cores: list[int]


class StageReady(msgspec.Struct, frozen=True, array_like=True):
    """Its answer: "", or why it cannot load."""

    error: str


class Hop:
    """What the stage before has made of each step, in order."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._take_in, name="kvik-hop", daemon=True).start()

    def take(self) -> bytes:
        """Wait for that of the next step: [tokens, hidden].

        Raises:
            EOFError: the stage has gone.
        """
        data = self._arrived.get()
        if data is None:
            self._arrived.put(None)  # and for those that ask later
            raise EOFError
        return data

    def _take_in(self) -> None:
        with self._line, suppress(EOFError, OSError):
            while True:
                self._arrived.put(self._line.recv_bytes())
        self._arrived.put(None)


class StageProcesses:
    """The stages before the last one; see `EarlierStages`."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        """Start them. They load while the last one does."""
        stages = resolved.runner.stages
        shares = cores_of(len(stages))
        self.cores = shares[-1]
        self._lost = ""
        self._known = threading.Event()  # who is lost
        self._closed = False
        self._children: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        before: socket.socket | None = None
        for stage in stages[:-1]:
            ours, theirs = socket.socketpair()
            after, leaves = socket.socketpair()
            numbers = [theirs.fileno(), leaves.fileno()]
            numbers += [] if before is None else [before.fileno()]
            command = python_command("kvik.stage_process", *map(str, numbers))
            with theirs, leaves:
                child = subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL)
            if before is not None:
                before.close()
            before = after
            self._children.append(child)
            line = Connection(ours.detach())
            self._lines.append(line)
            start = StageStart(resolved, stage.number, shares[stage.number])
            with suppress(OSError):  # `meet` finds it gone
                line.send_bytes(msgspec.msgpack.encode(start))
        assert before is not None
        self._hop = Hop(Connection(before.detach()))

    def meet(self) -> None:
        """Wait until they have loaded, and watch them from then on.

        Raises:
            ConfigError: one of them cannot.
        """
        for stage, line in enumerate(self._lines):
            try:
                ready = msgspec.msgpack.decode(line.recv_bytes(), type=StageReady)
            except (EOFError, OSError):
                ready = StageReady("ended while it loaded")
            if ready.error:
                self.stop()
                raise ConfigError(OPTION, f"stage {stage} {ready.error}")
        threading.Thread(target=self._watch, name="kvik-stages", daemon=True).start()

    def tell(self, message: Message) -> None:
        """
        Raises:
            GroupLost: one of them is gone.
        """
        data = encode(message)
        for line in self._lines:
            try:
                line.send_bytes(data)
            except OSError:
                self._raise_lost()
        if self._lost:
            self._raise_lost()

    def entered(self) -> bytes:
        """
        Raises:
            GroupLost: one of them is gone.
        """
        try:
            return self._hop.take()
        except EOFError:
            self._raise_lost()
            raise

    def give_up(self, why: str) -> None:
        self._lost = self._lost or why
        self._known.set()

    def stop(self) -> None:
        """End them; safe to call twice."""
        self._closed = True
        for line in self._lines:
            line.close()
        for child in self._children:
            try:
                child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _raise_lost(self) -> None:
        self._known.wait(END_SECONDS)
        raise GroupLost(OPTION, self._lost or "a stage is gone") from None

    def _watch(self) -> None:
        poll = select.poll()
        stages = {line.fileno(): stage for stage, line in enumerate(self._lines)}
        for number in stages:
            poll.register(number, 0)  # a hang-up is reported in any case
        gone = poll.poll()
        if self._closed or not gone:
            return
        stage = stages[gone[0][0]]
        self.give_up(f"stage {stage} {exit_told(self._children[stage])}")


def main(arguments: Sequence[str]) -> int:
    line, leaves = (Connection(int(number)) for number in arguments[:2])
    hop = Hop(Connection(int(arguments[2]))) if len(arguments) > 2 else None
    live_with_parent(line.fileno())  # also where a kernel waits for others
    group: RankProcesses | None = None
    with suppress(EOFError, OSError):
        start = msgspec.msgpack.decode(line.recv_bytes(), type=StageStart)
        config = start.config
        stage = config.runner.stages[start.stage]
        if start.cores and sys.platform == "linux":
            os.sched_setaffinity(0, start.cores)
        try:
            if config.runner.ranks > 1:
                group = RankProcesses(config, stage)
            with torch.inference_mode():
                seat = None if group is None else group.seat(config)
                rank = LeadingRank(config, stage, seat)
        except Exception as error:
            line.send_bytes(msgspec.msgpack.encode(StageReady(f"cannot load: {error}")))
            return 1
        line.send_bytes(msgspec.msgpack.encode(StageReady("")))
        rank.serve(line.recv_bytes, (lambda: b"") if hop is None else hop.take, leaves.send_bytes)
    if group is not None:
        group.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
