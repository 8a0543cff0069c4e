"""The stages of a pipeline before the last one: `StageProcesses` for the engine's process, which is
the last stage, and `main` for the first process of each other stage.

A stage may be on another machine. There are three kinds of connections. The "line" carries messages
from the engine to a stage, which lives as long as its line. The "beat" carries the heartbeats of a
stage. A "hop" carries the hidden states of a step to the next stage, where a thread receives them,
so that the sender does not wait.

torch is imported as late as possible, so that all processes import it at the same time.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from kvik.child_process import (
    HANG_UP,
    LOOK_SECONDS,
    HeartbeatWatch,
    cores_of,
    die_with_parent,
    live_with_parent,
    python_command,
)
from kvik.collector import freeze, uncollected
from kvik.config.config import ResolvedConfig, RunnerConfig
from kvik.config.hardware import detect
from kvik.errors import NOTES_LOG, ConfigError
from kvik.kernels.cpu._native import Heartbeat
from kvik.links import Address, Handshake, LinkError, LinkListener, connect, hang_up, host_of
from kvik.rank_process import (
    END_SECONDS,
    LOAD_TIMES,
    MIN_LOAD_SECONDS,
    LinkedProcesses,
    Process,
    RankProcesses,
    exit_message,
    on_cores,
)
from kvik.worker.group import IdleStep, decode

OPTION = "pipeline_parallel_size"
JOIN_SECONDS = 60.0  # limit for a stage to start and to connect
log = logging.getLogger(NOTES_LOG)
NOT_CONNECTED = 3  # exit code of a stage that cannot connect to the engine


class StageStart(msgspec.Struct, frozen=True, array_like=True):
    """First message to a stage: what to load."""

    config: ResolvedConfig
    cores: list[int]
    next: Address  # address at which the next stage listens


class StageReady(msgspec.Struct, frozen=True, array_like=True):
    """Reply of a stage: why it cannot load, or "" and the facts that all stages must share."""

    error: str
    machine: str = ""
    weights: str = ""


class Launcher(Protocol):
    """Starts processes, here or on other machines."""

    host: str  # address of this machine that they connect to
    is_local: bool  # they run on this machine, and share its cores

    def start(self, stage: int, arguments: Sequence[str], token: str) -> Process:
        """Start a stage; the launcher appends the host of its machine to the arguments."""
        ...

    def stop(self) -> None:
        """Release what was reserved. Safe to call twice."""
        ...


class LocalLauncher:
    """Starts processes on this machine."""

    host = "127.0.0.1"
    is_local = True

    def start(self, stage: int, arguments: Sequence[str], token: str) -> Process:
        return start_stage([*arguments, self.host], token)

    def stop(self) -> None:
        pass


def start_stage(arguments: Sequence[str], token: str) -> subprocess.Popen[bytes]:
    """Start the first process of a stage on this machine; it reads the token from its stdin."""
    command = python_command("kvik.stage_process", *arguments)
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(token.encode())
    return process


class StageReceiver:
    """Receives the hidden states of each step from the previous stage, in order."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._take_in, name="kvik-hop", daemon=True)
        self._thread.start()

    def take(self) -> bytes:
        """Wait for the hidden states of the next step: [tokens, hidden]. Raises EOFError if the
        previous stage has ended."""
        data = self._arrived.get()
        if data is None:
            self._arrived.put(None)  # for later calls
            raise EOFError
        return data

    def stop(self) -> None:
        """Close the connection."""
        hang_up(self._line)
        self._thread.join(END_SECONDS)

    def _take_in(self) -> None:
        with self._line, suppress(EOFError, OSError):
            while True:
                self._arrived.put(self._line.recv_bytes())
        self._arrived.put(None)


class StageProcesses(LinkedProcesses):
    """The stages before the last one; see `EarlierStages`."""

    def __init__(self, resolved: ResolvedConfig, launcher: Launcher) -> None:
        """Start the stages. They load at the same time as the last one."""
        super().__init__("stage", OPTION)
        self._resolved, self._launcher = resolved, launcher
        count = len(resolved.runner.stages)
        self._cores = cores_of(count) if launcher.is_local else [[] for _ in range(count)]
        token = secrets.token_hex()
        self._listener = LinkListener(launcher.host, bytes.fromhex(token))
        self._processes: list[Process] = []
        self._beats: list[Connection] = []
        self._receiver: StageReceiver | None = None
        self._error = ""  # why a stage cannot load
        self._may_load, self._joined = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._main, name="kvik-stages", daemon=True)
        self._began = time.monotonic()
        self._took = 0.0  # seconds until the last stage had loaded; 0: it has not
        address = self._listener.address
        try:
            for stage in range(count - 1):
                arguments = (address.host, str(address.port), str(stage))
                self._processes.append(launcher.start(stage, arguments, token))
        except BaseException:
            self.stop()
            raise
        self._watcher.start()

    @property
    def cores(self) -> list[int]:
        """Cores of the last stage; []: not known."""
        return self._cores[-1]

    def load(self) -> None:
        """Let the stages load: the files that they will map exist."""
        self._may_load.set()

    def wait_loaded(self) -> None:
        """Wait until the stages have loaded; raise ConfigError if one cannot load."""
        self._took = time.monotonic() - self._began
        self._joined.wait()
        if self._error:
            self.stop()
            raise ConfigError(OPTION, self._error)

    def idle_step(self) -> bool:
        """See `EarlierStages.idle_step`."""
        self.send(IdleStep())
        try:
            return bool(b"".join(line.recv_bytes() for line in self._lines))
        except (EOFError, OSError):
            self._raise_lost()

    def entered(self) -> bytes:
        """Wait for the hidden states of the next step; see `EarlierStages.entered`."""
        assert self._receiver is not None
        try:
            return self._receiver.take()
        except EOFError:
            self._raise_lost()

    def stop(self) -> None:
        """End the stages; safe to call twice."""
        self._closed.set()
        self._listener.close()
        for line in self._lines:
            hang_up(line)
        for process in self._processes:
            try:
                process.wait(END_SECONDS if self._lines else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._launcher.stop()
        if self._watcher.is_alive():
            self._watcher.join(END_SECONDS)
        if self._receiver is not None:
            self._receiver.stop()
        for line in (*self._lines, *self._beats):
            line.close()

    # -- a thread: connects the stages while the last one loads, then watches them ----------------

    def _main(self) -> None:
        try:
            self._join()
        except (LinkError, OSError, EOFError, msgspec.MsgspecError) as error:
            self._error = str(error) or type(error).__name__
        finally:
            self._joined.set()
        if not self._error:
            self._watch()

    def _join(self) -> None:
        """Accept the connections of all stages and let them load.

        Raises:
            LinkError: a stage cannot load.
            OSError, EOFError, MsgspecError: the same, or `stop` was called.
        """
        hops: dict[int, Address | None] = {len(self._processes): self._listener.address}
        roles: dict[str, dict[int, Connection]] = {"line": {}, "beat": {}}
        stages = set(range(len(self._processes)))
        while missing := {
            stage for connections in roles.values() for stage in stages - connections.keys()
        }:
            handshake, line = self._accept(min(missing), *roles)
            roles[handshake.role][handshake.stage] = line
            hops.setdefault(handshake.stage, handshake.hop)
        self._lines, self._beats = (
            [connections[i] for i in sorted(connections)] for connections in roles.values()
        )
        self._watches = [HeartbeatWatch() for _ in self._beats]
        self._beaten = [0] * len(self._beats)
        for beat in self._beats:
            os.set_blocking(beat.fileno(), False)
        while not self._may_load.wait(LOOK_SECONDS):
            if self._closed.is_set():
                return
        for stage, line in enumerate(self._lines):
            following = hops[stage + 1]
            if following is None:
                raise LinkError(f"stage {stage + 1} has not said where it listens")
            start = StageStart(self._of_stage(stage), self._cores[stage], following)
            line.send_bytes(msgspec.msgpack.encode(start))
        from kvik.worker.engine_cache import fingerprints

        runner = self._resolved.runner
        engine = StageReady("", _machine(runner), fingerprints(self._resolved))
        for stage, line in enumerate(self._lines):
            while not line.poll(LOOK_SECONDS):
                if gone := self._gone():
                    raise LinkError(f"{gone} while it loaded")
                limit = max(MIN_LOAD_SECONDS, LOAD_TIMES * self._took)
                if self._took and time.monotonic() - self._began > limit:
                    reason = f"stage {stage} has not loaded in {limit:.0f} s"
                    raise LinkError(f"{reason}, and the last one in {self._took:.0f} s")
            try:
                ready = msgspec.msgpack.decode(line.recv_bytes(), type=StageReady)
            except (EOFError, OSError):
                process = self._processes[stage]
                raise LinkError(f"stage {stage} {exit_message(process)} while it loaded") from None
            if ready.error:
                raise LinkError(f"stage {stage} cannot load: {ready.error}")
            if ready.machine != engine.machine:
                reason = f"kernels for {ready.machine}, the engine for {engine.machine}"
                raise LinkError(
                    f"stage {stage} has {reason}: results would differ in their last bits; use "
                    "machines of one kind"
                )
            if ready.weights != engine.weights:
                reason = "other files of the model than the engine: copy the same to each machine"
                raise LinkError(f"stage {stage} has {reason}")
        for stage, line in enumerate(self._lines):  # all wait for each other now
            line.send_bytes(b"")
            layers, device = runner.stages[stage].layers, self._of_stage(stage).runner.device
            where = f"{device} at {host_of(line)}{on_cores(self._cores[stage])}"
            reason = f"layers {layers.start} to {layers.stop - 1}, {where}"
            log.info("stage %d of %d: %s", stage, len(runner.stages), reason)
        self._receiver = StageReceiver(self._accept(len(self._processes) - 1, "hop")[1])

    def _of_stage(self, stage: int) -> ResolvedConfig:
        runner = self._resolved.runner
        return replace(self._resolved, runner=runner.of_stage(runner.stages[stage]))

    def _accept(self, missing: int, *roles: str) -> tuple[Handshake, Connection]:
        """Return the next connection in one of some roles.

        Args:
            missing: a stage that has not connected yet.

        Raises:
            LinkError: a stage has ended, or did not connect in time.
        """
        end, address = time.monotonic() + JOIN_SECONDS, self._listener.address
        while time.monotonic() < end:
            for stage, process in enumerate(self._processes):
                code, (host, port) = process.poll(), msgspec.structs.astuple(address)
                if code == NOT_CONNECTED:
                    reason = f"cannot connect to the engine at {host}:{port}"
                    raise LinkError(f"stage {stage} {reason}: its machine must reach that address")
                if code is not None:
                    raise LinkError(f"stage {stage} {exit_message(process)} before it could load")
            with suppress(TimeoutError):
                handshake, line = self._listener.accept(1.0)
                if handshake.role in roles and handshake.stage < len(self._processes):
                    return handshake, line
                line.close()
        raise LinkError(f"stage {missing} has not connected within {JOIN_SECONDS:.0f} seconds")

    def _watch(self) -> None:
        while not self._closed.is_set():
            gone = self._gone()
            if gone and not self._closed.is_set():
                self.give_up(gone)
                for process in self._processes:  # the others wait for it
                    process.kill()
                return
            self._closed.wait(LOOK_SECONDS)

    def _gone(self) -> str:
        """Return which stage has ended or is silent, and how; "": all are alive."""
        for stage, (line, beat, watch) in enumerate(
            zip(self._lines, self._beats, self._watches, strict=True)
        ):
            try:
                self._beaten[stage] += len(os.read(beat.fileno(), 1 << 16))
            except BlockingIOError:
                pass
            except OSError as error:
                return f"stage {stage} cannot be reached: {error.strerror}"
            poll = select.poll()
            poll.register(line.fileno(), HANG_UP)
            if poll.poll(0):
                return f"stage {stage} {exit_message(self._processes[stage])}"
            silent = watch.look(self._beaten[stage], time.monotonic())
            if silent:
                return f"stage {stage} {silent}"
        return ""


def _machine(runner: RunnerConfig) -> str:
    """Return what determines the last bits of results: the instruction set, or the GPU."""
    if runner.device == "cpu":
        return detect().native_isa
    import torch

    return torch.cuda.get_device_name(runner.device)


def main(arguments: Sequence[str]) -> int:
    """Run the first process of a stage.

    Args:
        arguments: host and port of the engine, number of the stage, host of this machine.
    """
    host, port, number, own_host = arguments
    stage_number, token = int(number), bytes.fromhex(sys.stdin.read())
    before = LinkListener(own_host, token) if stage_number else None
    handshake = Handshake("line", stage_number, None if before is None else before.address)
    engine = Address(host, int(port))
    try:
        line = connect(engine, token, handshake)
        beat = connect(engine, token, Handshake("beat", stage_number))
    except LinkError as error:
        print(f"stage {number}: {error}", file=sys.stderr)
        return NOT_CONNECTED
    _beating = Heartbeat(beat.fileno())
    die_with_parent()
    live_with_parent(line.fileno())  # also where a kernel waits for others
    import torch

    from kvik.worker.engine_cache import fingerprints
    from kvik.worker.ranks import LeadingRank

    group: RankProcesses | None = None
    with suppress(EOFError, OSError, LinkError):
        start = msgspec.msgpack.decode(line.recv_bytes(), type=StageStart)
        config = start.config
        stage = config.runner.stages[stage_number]
        try:
            if start.cores and sys.platform == "linux":
                os.sched_setaffinity(0, start.cores)
            if config.runner.ranks > 1:
                group = RankProcesses(config, stage)
            with (
                uncollected(),
                torch.inference_mode(),
                nullcontext() if group is None else group.loading() as setup,
            ):
                rank = LeadingRank(config, stage, setup)
                freeze()
            ready = StageReady("", _machine(config.runner), fingerprints(config))
        except Exception as error:
            ready = StageReady(f"{type(error).__name__}: {error}")
        line.send_bytes(msgspec.msgpack.encode(ready))
        if not ready.error:
            line.recv_bytes()  # all others have loaded
            leaves = connect(start.next, token, Handshake("hop", stage_number))
            entered = (
                (lambda: b"")
                if before is None
                else StageReceiver(before.accept(JOIN_SECONDS)[1]).take
            )
            rank.lead(
                lambda: decode(line.recv_bytes()), line.send_bytes, entered, leaves.send_bytes
            )
    if group is not None:
        group.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
