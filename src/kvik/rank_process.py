"""Further processes of a group that computes one model: `RankProcesses` for the first, `main` for
each of the others, which finds its socket and the common memory under the numbers it is given.

A process lives as long as its socket: whatever becomes of the first one, the others end. That one
watches the sockets; when one closes, none waits for another any more, and its step fails.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvik.child_process import live_with_parent, python_command
from kvik.config.config import ResolvedConfig
from kvik.errors import ConfigError, GroupLost
from kvik.kernels.cpu.group import Group
from kvik.spec.shares import PipelineStage
from kvik.worker.group import Message, Seat
from kvik.worker.ranks import Rank, encode

END_SECONDS = 5.0  # that a process may take to end
# Times the activations and tables that the plan counts; pages take memory once they are written.
MEMORY = 4
LEAST_MEMORY = 1 << 28


class RankStart(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a process: its place, and what to load."""

    config: ResolvedConfig
    rank: int
    size: int
    cores: list[int]
    stage: int | None  # None: the group has all layers


class RankReady(msgspec.Struct, frozen=True, array_like=True):
    """Its answer: what it has recorded, or why it cannot.

    Attributes:
        digest: of what it has recorded (`Group.digest`).
        error: "" if there is none; the other is then empty.
    """

    digest: str
    error: str


class RankProcesses:
    """The other processes, as the first one sees them; see `Others`."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        stage: PipelineStage | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        """Start them. They load while the first one does.

        Args:
            stage: of which the group is; None: it has all layers.
            cores: of the group; (): those that this process may use.
        """
        size = resolved.runner.ranks
        memory = resolved.memory
        wanted = max(LEAST_MEMORY, MEMORY * (memory.activations + memory.overhead))
        file = _common_memory(wanted)
        self._mapping = mmap(file, wanted)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self._lost = ""
        self._known = threading.Event()  # who is lost
        self._closed = False
        self._children: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        self._group: Group | None = None
        shares, number = cores_of(size, cores), None if stage is None else stage.number
        try:
            for rank in range(1, size):
                ours, theirs = socket.socketpair()
                numbers = theirs.fileno(), file
                command = python_command("kvik.rank_process", *map(str, numbers))
                with theirs:
                    child = subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL)
                self._children.append(child)
                line = Connection(ours.detach())
                self._lines.append(line)
                start = RankStart(resolved, rank, size, shares[rank], number)
                with suppress(OSError):  # `meet` finds it gone
                    line.send_bytes(msgspec.msgpack.encode(start))
        finally:
            os.close(file)

    def seat(self, resolved: ResolvedConfig) -> Seat:
        """Return the place of the first process."""
        return Seat(0, resolved.runner.ranks, self.memory, self)

    def meet(self, group: Group) -> None:
        """Wait until the others have loaded, and watch them from then on.

        Raises:
            ConfigError: one of them cannot, or has recorded something else.
        """
        self._group = group
        for rank, line in enumerate(self._lines, 1):
            try:
                ready = msgspec.msgpack.decode(line.recv_bytes(), type=RankReady)
            except (EOFError, OSError):
                self.stop()
                raise ConfigError(
                    "tensor_parallel_size", f"rank {rank} ended while it loaded"
                ) from None
            if ready.error or ready.digest != group.digest:
                self.stop()
                why = ready.error or f"has recorded {ready.digest}, and rank 0 {group.digest}"
                raise ConfigError("tensor_parallel_size", f"rank {rank} {why}")
        threading.Thread(target=self._watch, name="kvik-ranks", daemon=True).start()

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
                self._known.wait(END_SECONDS)
                raise GroupLost("tensor_parallel_size", self._lost or "a rank is gone") from None
        if self._lost:
            raise GroupLost("tensor_parallel_size", self._lost)

    @contextmanager
    def together(self, message: Message) -> Iterator[None]:
        assert self._group is not None
        self.tell(message)
        try:
            yield
        except BaseException:
            self._lost = self._lost or "what all processes compute was interrupted in the first"
            self._known.set()
            self._group.give_up()
            raise
        if self._group.broken:
            self._known.wait(END_SECONDS)
            raise GroupLost("tensor_parallel_size", self._lost)

    def begin(self) -> None:
        assert self._group is not None
        self._group.begin()

    def share(self, hidden: Tensor) -> Tensor:
        self.begin()
        assert self._group is not None
        return self._group.take(tuple(hidden.shape), hidden.dtype).copy_(hidden)

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

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {line.fileno(): rank for rank, line in enumerate(self._lines, 1)}
        for number in ranks:
            poll.register(number, 0)  # a hang-up is reported in any case
        gone = poll.poll()
        if self._closed or not gone:
            return
        rank = ranks[gone[0][0]]
        self._lost = f"rank {rank} {exit_told(self._children[rank - 1])}"
        self._known.set()
        assert self._group is not None
        self._group.give_up()


class Process(Protocol):
    """A process that was started, here or on another machine; as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal that ended it; None: it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """
        Raises:
            TimeoutExpired: it has not ended.
        """
        ...

    def kill(self) -> None: ...


def exit_told(child: Process) -> str:
    """Return how a process has ended whose socket has closed."""
    try:
        code = child.wait(0.5)
    except subprocess.TimeoutExpired:
        return "has closed its socket"
    return f"has ended with {f'signal {-code}' if code < 0 else f'code {code}'}"


def _common_memory(size: int) -> int:
    """Return the number of a file without a name, as large as asked and full of zeros."""
    if sys.platform == "linux":
        file = os.memfd_create("kvik-group")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, size)
    return file


def cores_of(size: int, among: Sequence[int] = ()) -> list[list[int]]:
    """Return the cores of each process; [] where it cannot be said.

    Args:
        among: of which cores; (): of those that this process may use.
    """
    cores = sorted(among or os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(cores) < size:
        return [[] for _ in range(size)]
    return [cores[len(cores) * r // size : len(cores) * (r + 1) // size] for r in range(size)]


def main(arguments: Sequence[str]) -> int:
    line, file = Connection(int(arguments[0])), int(arguments[1])
    mapping = mmap(file, os.fstat(file).st_size)
    os.close(file)
    memory = np.frombuffer(mapping, np.uint8)
    live_with_parent(line.fileno())  # also where a kernel waits for others
    with suppress(EOFError, OSError):
        start = msgspec.msgpack.decode(line.recv_bytes(), type=RankStart)
        if start.cores and sys.platform == "linux":
            os.sched_setaffinity(0, start.cores)
        try:
            with torch.inference_mode():
                stages = start.config.runner.stages
                stage = None if start.stage is None else stages[start.stage]
                rank = Rank(start.config, Seat(start.rank, start.size, memory), stage)
        except Exception as error:
            line.send_bytes(msgspec.msgpack.encode(RankReady("", f"cannot load: {error}")))
            return 1
        line.send_bytes(msgspec.msgpack.encode(RankReady(rank.digest, "")))
        rank.serve(line.recv_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
