"""The processes of a group that computes one model (tensor parallelism): `RankProcesses` for rank
0, `main` for each other rank, whose arguments include the descriptors of its socket and of the
shared memory.

A rank lives as long as its socket, so however rank 0 ends, the others end too. Rank 0 watches the
sockets and the heartbeats. If a socket closes or a heartbeat stops, all ranks stop waiting for each
other, and the step fails.

torch is imported as late as possible, so that all processes of a group import it at the same time.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from mmap import mmap
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec
import numpy as np

from kvik.child_process import (
    LOOK_SECONDS,
    HeartbeatWatch,
    StallTimer,
    cores_of,
    die_with_parent,
    live_with_parent,
    python_command,
)
from kvik.collector import freeze, uncollected
from kvik.config.config import ResolvedConfig
from kvik.config.parallel import OPTION
from kvik.errors import NOTES_LOG, ConfigError, GroupLost, KvikError
from kvik.files import shared_memory
from kvik.kernels.cpu.barrier import BARRIER_BYTES, EXCHANGE_SECONDS, Barrier, BrokenGroup
from kvik.spec.shares import PipelineStage
from kvik.worker.ahead import LoadAhead
from kvik.worker.group import GroupMember, LoadAdapter, Message, RankSetup, decode, encode

if TYPE_CHECKING:
    from torch import Tensor

END_SECONDS = 5.0  # limit for the system to end a process and report its exit code
# All ranks load equally much at the same time. A rank is considered stuck after `LOAD_TIMES` times
# the load time of rank 0, but not before `MIN_LOAD_SECONDS`.
LOAD_TIMES = 10.0
MIN_LOAD_SECONDS = 60.0
# Shared memory is this many times the planned activations and overhead; unused pages take none.
MEMORY = 4
MIN_MEMORY = 1 << 28


log = logging.getLogger(NOTES_LOG)


class RankStart(msgspec.Struct, frozen=True, array_like=True):
    """First message to a rank: what to load, the size of the group, and its cores."""

    config: ResolvedConfig
    size: int
    cores: list[int]
    stage: int | None  # None: the group has all layers


class RankReady(msgspec.Struct, frozen=True, array_like=True):
    """Reply of a rank: what it has loaded, or why it cannot load."""

    digest: str  # of what it has loaded (`GroupMember.digest`); "" after an error
    error: str  # "": none


class LinkedProcesses:
    """Processes that compute with this one; if one of them is lost, all are. See `Followers`."""

    def __init__(self, kind: str, option: str, first: int = 0) -> None:
        """
        Args:
            kind: of the processes, numbered from `first`.
            option: which sets their number, for errors.
        """
        self.lost = ""  # see `Followers.lost`
        self._lost_set = threading.Event()  # `lost` is set
        self._lines: list[Connection] = []
        self._kind, self._option, self._first = kind, option, first

    def send(self, message: Message) -> None:
        """See `Followers.send`."""
        data = encode(message)
        try:
            for line in self._lines:
                line.send_bytes(data)
        except OSError:
            self._raise_lost()
        if self.lost:
            self._raise_lost()

    def ask(self, message: LoadAdapter) -> None:
        """See `Followers.ask`."""
        self.send(message)
        try:  # all replies come before the next message
            replies = [line.recv_bytes().decode() for line in self._lines]
        except (EOFError, OSError):
            self._raise_lost()
        for number, reason in enumerate(replies, self._first):
            if reason:
                raise ConfigError("adapters", f"{self._kind} {number} cannot load it: {reason}")

    def give_up(self, reason: str) -> None:
        """Make every later call raise `GroupLost`."""
        self.lost = self.lost or reason
        self._lost_set.set()

    def _raise_lost(self) -> NoReturn:
        self._lost_set.wait(END_SECONDS)
        raise GroupLost(self._option, self.lost or f"a {self._kind} is gone") from None


class RankProcesses(LinkedProcesses):
    """The other ranks of a group, for rank 0; see `OtherRanks`."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        stage: PipelineStage | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        """Start the processes. They import what they need, then wait for `loading`.

        Args:
            stage: the pipeline stage of the group; None: the group has all layers.
            cores: of the group; (): all cores that this process may use.
        """
        super().__init__("rank", OPTION, 1)
        size = resolved.runner.ranks
        memory = resolved.memory
        num_bytes = max(MIN_MEMORY, MEMORY * (memory.activations + memory.overhead))
        self._files = ExitStack()  # the folder in which torch's processes find each other
        self._store = ""
        if resolved.runner.kernels != "native":
            num_bytes = BARRIER_BYTES  # heartbeats alone: torch connects the processes
            folder = self._files.enter_context(tempfile.TemporaryDirectory(prefix="kvik-"))
            self._store = os.path.join(folder, "store")
        file = shared_memory(num_bytes)
        self._mapping = mmap(file, num_bytes)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self._barrier = Barrier(self.memory)
        self._began = time.monotonic()
        self._closed = False
        self._children: list[subprocess.Popen[bytes]] = []
        self._group: GroupMember | None = None
        self._watcher = threading.Thread(target=self._watch, name="kvik-ranks", daemon=True)
        shares, number = cores_of(size, cores), None if stage is None else stage.number
        for rank, share in enumerate(shares):
            device = resolved.runner.device_of(rank)
            log.info("rank %d of %d: %s%s", rank, size, device, on_cores(share))
        try:
            for rank in range(1, size):
                ours, theirs = socket.socketpair()
                self._lines.append(Connection(ours.detach()))
                numbers = theirs.fileno(), file
                command = python_command(
                    "kvik.rank_process", *map(str, (*numbers, rank)), self._store
                )
                with theirs:
                    child = subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL)
                self._children.append(child)
            self._watcher.start()
            for rank, line in enumerate(self._lines, 1):
                runner = replace(resolved.runner, device=resolved.runner.device_of(rank))
                config = replace(resolved, runner=runner)
                start = RankStart(config, size, shares[rank], number)
                with suppress(OSError):  # `wait_loaded` reports it
                    line.send_bytes(msgspec.msgpack.encode(start))
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(file)

    @contextmanager
    def loading(self) -> Iterator[RankSetup]:
        """Return a context in which all ranks load; it yields the setup of rank 0. If the block
        fails, the other ranks end. Raises ConfigError and GroupLost as `wait_loaded`."""
        for line in self._lines:  # the files that they will map exist
            with suppress(OSError):
                line.send_bytes(b"")
        try:
            yield RankSetup(0, 1 + len(self._lines), self.memory, self, self._store)
        except BrokenGroup:
            error = self._failure()
            self.stop()
            raise error from None
        except BaseException:
            self.stop()
            raise

    def wait_loaded(self, group: GroupMember) -> None:
        """Wait until the other ranks have loaded.

        Raises:
            ConfigError: a rank cannot load, or has another digest than rank 0.
            GroupLost: a rank has ended, or is stuck.
        """
        self._group = group
        took = time.monotonic() - self._began
        limit = max(MIN_LOAD_SECONDS, LOAD_TIMES * took)
        loading = {line: rank for rank, line in enumerate(self._lines, 1)}
        while loading:
            if self.lost:
                raise self._failure()
            if time.monotonic() - self._began > limit:
                rank = min(loading.values())
                reason = f"rank {rank} has not loaded in {limit:.0f} s, and rank 0 in {took:.0f} s"
                raise GroupLost(OPTION, reason)
            for line in wait(list(loading), LOOK_SECONDS):
                assert isinstance(line, Connection)
                rank = loading.pop(line)
                try:
                    ready = msgspec.msgpack.decode(line.recv_bytes(), type=RankReady)
                except (EOFError, OSError):
                    self._lost_set.wait(END_SECONDS)
                    raise self._failure() from None
                if ready.error or ready.digest != group.digest:
                    why = ready.error or f"has {ready.digest}, and rank 0 {group.digest}"
                    raise ConfigError(OPTION, f"rank {rank} {why}")

    def _failure(self) -> KvikError:
        """Return why the group was lost while it loaded: the error that a rank has sent, if any."""
        for rank, line in enumerate(self._lines, 1):
            with suppress(EOFError, OSError):
                if line.poll():
                    ready = msgspec.msgpack.decode(line.recv_bytes(), type=RankReady)
                    if ready.error:
                        return ConfigError(OPTION, f"rank {rank} {ready.error}")
        return GroupLost(OPTION, f"{self.lost or 'a rank is gone'} while it loaded")

    @contextmanager
    def jointly(self, message: Message) -> Iterator[None]:
        self.send(message)
        try:
            yield
        except BrokenGroup as error:
            if not self._lost_set.wait(END_SECONDS):
                self.give_up(f"an exchange between ranks failed: {str(error) or 'one is gone'}")
            raise GroupLost(OPTION, self.lost) from None
        except BaseException:
            self.give_up("rank 0 was interrupted while all ranks computed")
            raise
        if self._barrier.broken:
            raise GroupLost(OPTION, self.lost)

    def begin(self) -> None:
        assert self._group is not None
        self._group.begin()

    def share(self, hidden: Tensor) -> Tensor:
        assert self._group is not None
        return self._group.share(hidden)

    def spread(self, hidden: Tensor) -> Tensor:
        assert self._group is not None
        return self._group.spread(hidden)

    def stop(self) -> None:
        """Kill the other ranks, which have no state to save; safe to call twice."""
        self._closed = True
        for child in self._children:
            child.kill()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):  # it is still freeing its memory
                child.wait(END_SECONDS)
        if self._watcher.is_alive():
            self._watcher.join(END_SECONDS)
        for line in self._lines:
            line.close()
        if self._group is not None:
            self._group.close()
        self._files.close()

    def give_up(self, reason: str) -> None:
        """Note why the group is lost, and make all ranks stop waiting for each other."""
        super().give_up(reason)
        self._barrier.give_up()
        if self._group is not None:
            self._group.give_up()

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {line.fileno(): rank for rank, line in enumerate(self._lines, 1)}
        for number in ranks:
            poll.register(number, 0)  # a hang-up is reported in any case
        heartbeats = {rank: HeartbeatWatch() for rank in ranks.values()}
        waits = {rank: StallTimer() for rank in ranks.values()}
        while not self._closed:
            gone = poll.poll(1000 * LOOK_SECONDS)
            if self._closed:
                return
            if gone:
                rank = ranks[gone[0][0]]
                self.give_up(f"rank {rank} {exit_message(self._children[rank - 1])}")
                return
            for rank, watch in heartbeats.items():
                silent = watch.look(self._barrier.beats(rank), time.monotonic())
                if silent:
                    self.give_up(f"rank {rank} {silent}")
                    self._children[rank - 1].kill()
                    return
                arrived = self._barrier.arrivals(rank)
                behind = 0 < (self._barrier.arrivals(0) - arrived) % 2**32 < 2**31
                waited = waits[rank].look(arrived, time.monotonic(), expected=behind)
                if waited >= EXCHANGE_SECONDS:
                    self.give_up(f"rank {rank} has not come to an exchange within {waited:.0f} s")
                    self._children[rank - 1].kill()
                    return


class Process(Protocol):
    """A process that was started, here or on another machine; as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Return its exit code, or minus the signal that ended it; None: it is running."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return what `poll` returns; raise TimeoutExpired if it has not
        ended."""
        ...

    def kill(self) -> None: ...


def exit_message(child: Process) -> str:
    """Say how a process whose socket has closed has ended."""
    try:
        code = child.wait(0.5)
    except subprocess.TimeoutExpired:
        return "has closed its socket"
    return f"has ended with {f'signal {-code}' if code < 0 else f'code {code}'}"


def on_cores(cores: Sequence[int]) -> str:
    """Return where a process runs, in words that follow others; "": it cannot be said."""
    return f", cores {', '.join(map(str, cores))}" if cores else ""


def main(arguments: Sequence[str]) -> int:
    *numbers, store = arguments
    number, file, rank = map(int, numbers)
    line = Connection(number)
    mapping = mmap(file, os.fstat(file).st_size)
    os.close(file)
    memory = np.frombuffer(mapping, np.uint8)
    _beating = Barrier(memory).beat(rank)
    die_with_parent()
    live_with_parent(line.fileno())  # also where a kernel waits for others
    with suppress(EOFError, OSError):
        start = msgspec.msgpack.decode(line.recv_bytes(), type=RankStart)
        if start.cores and sys.platform == "linux":
            os.sched_setaffinity(0, start.cores)
        with LoadAhead(start.config, rank) as ahead:
            import torch

            from kvik.worker.ranks import make_rank

            line.recv_bytes()  # see `RankProcesses.loading`
            stages = start.config.runner.stages
            stage = None if start.stage is None else stages[start.stage]
            setup = RankSetup(rank, start.size, memory, file=store)
            try:
                with uncollected(), torch.inference_mode():
                    share = make_rank(start.config, setup, stage, ahead.memory())
                    freeze()
            except BrokenGroup:
                return 1  # the rank that failed reports the error
            except Exception as error:
                line.send_bytes(msgspec.msgpack.encode(RankReady("", f"cannot load: {error}")))
                return 1
        line.send_bytes(msgspec.msgpack.encode(RankReady(share.digest, "")))
        share.serve(lambda: decode(line.recv_bytes()), line.send_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
