"""The engine in a separate process: `engine_in_process` for the parent, `main` for the child, whose
arguments are file descriptors: its end of the socket, and shared memory for its heartbeat.

The child lives as long as the socket. It ignores the signals of a terminal, because its parent may
still drain; however the parent ends, the socket is closed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from mmap import mmap
from pathlib import Path

from kvik.child_process import cores_of, live_with_parent, python_command
from kvik.collector import freeze, uncollected
from kvik.config.config import ResolvedConfig
from kvik.core.types import derive_seed
from kvik.engine.client import EngineClient
from kvik.engine.host import host_engine
from kvik.engine.loop import EngineLoop
from kvik.engine.sources import Supervisor, restart_policy
from kvik.engine.wire import EngineStart, HostSocket, to_start
from kvik.errors import NOTES_LOG
from kvik.launch import load_loop

log = logging.getLogger(__name__)


def engine_in_process(
    resolved: ResolvedConfig,
    relay: Callable[[str], object],
    record: Path | None = None,
    token: bytes = b"",
) -> EngineClient:
    """Return a client of `data_parallel_size` engines, for an event loop.

    Nothing is loaded before the client is started; if loading fails, the client fails.

    Args:
        relay: called with the child's output, in the event loop; it must not block.
        record: file to record events to, for `kvik replay`.
        token: shared secret of the servers that exchange KV blocks; b"": no exchange.
    """
    command, policy = python_command(__name__), restart_policy(resolved)
    starts = [EngineStart(resolved, None if record is None else str(record), token=token)]
    count = resolved.runner.replicas
    if count > 1:
        token = token or secrets.token_bytes(32)  # shared by the replicas
        starts = []
        for i, cores in enumerate(cores_of(count)):
            file = None if record is None else str(record.with_name(f"{record.name}.{i}"))
            starts.append(EngineStart(_replica(resolved, i), file, tuple(cores), True, token))
    sources = [Supervisor(command, start, policy, relay) for start in starts]
    return EngineClient(resolved, sources)


def _replica(resolved: ResolvedConfig, number: int) -> ResolvedConfig:
    """Return the settings of one replica, with its own seed and GPUs."""
    runner = resolved.runner
    device = runner.device_of(number * runner.ranks * max(1, len(runner.stages)))
    seed = derive_seed(resolved.seed, number)
    return replace(resolved, seed=seed, runner=replace(runner, device=device))


def main(arguments: Sequence[str]) -> int:
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    live_with_parent(sock.fileno())
    logging.getLogger(NOTES_LOG).setLevel(logging.INFO)
    _beating = [beat(int(file)) for file in arguments[1:]]  # none: no process watches
    line = HostSocket(sock)
    try:
        return _serve(line)
    except EOFError:
        return 0
    finally:
        line.close()


def beat(file: int) -> object:
    """Count heartbeats in the first integer of shared memory while the result lives; None: the
    native kernels are not installed."""
    memory = mmap(file, 0)
    os.close(file)
    try:
        from kvik.kernels.cpu._native import Heartbeat
    except ImportError:
        return None
    return Heartbeat(memoryview(memory).cast("I")[:1])


def _serve(line: HostSocket) -> int:
    start = _first_message(line)
    record = None if start.record is None else Path(start.record)
    if start.cores and sys.platform == "linux":
        os.sched_setaffinity(0, start.cores)

    def load() -> EngineLoop:
        with uncollected():
            loop = load_loop(start.config, record, token=start.token)
            freeze()
        return loop

    return 0 if host_engine(load, line, reports=start.reports) else 1


def _first_message(line: HostSocket) -> EngineStart:
    """Wait for the first message; raise EOFError if the socket closes before it."""
    while not (bodies := line.receive(None)):
        pass
    return to_start.decode(bodies[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
