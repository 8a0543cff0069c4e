"""The engine in a process of its own: `engine_in_process` for the parent, `main` for the child,
which finds its end of their socket, and where it is to beat, under the numbers it is given.

The child lives as long as the socket. Signals that end the programs of a terminal do not end it, as
its parent may still drain; and whatever becomes of the parent, the socket is closed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from mmap import mmap
from pathlib import Path

from kvik.child_process import live_with_parent, python_command
from kvik.config.config import ResolvedConfig
from kvik.core.types import derive_seed
from kvik.engine.host import host_engine
from kvik.engine.remote import EngineClient, RemoteClient
from kvik.engine.sources import Supervisor, restart_policy
from kvik.engine.wire import EngineStart, HostSocket, to_start
from kvik.errors import PLACES_LOG
from kvik.launch import load_loop

log = logging.getLogger(__name__)


def engine_in_process(
    resolved: ResolvedConfig,
    relay: Callable[[str], object],
    record: Path | None = None,
    token: bytes = b"",
) -> EngineClient:
    """Return a client of an engine, or of as many as `data_parallel_size` says.

    It is for an event loop. Nothing is loaded before the client is started; what does not load then
    makes it fail.

    Args:
        relay: takes what the child prints. It is called in the event loop, and must not block.
        record: file that what happens is written to, for `kvik replay`.
        token: that engines of other servers know with which they share KV blocks; b"": none do.
    """
    command, policy = python_command(__name__), restart_policy(resolved)
    count = resolved.runner.replicas
    if count == 1:
        start = EngineStart(resolved, None if record is None else str(record), token=token)
        return RemoteClient(resolved, Supervisor(command, start, policy, relay))
    from kvik.engine.replicas import Replicas

    token = token or secrets.token_bytes(32)  # for each other
    clients = []
    for i, cores in enumerate(_cores(count)):
        file = None if record is None else str(record.with_name(f"{record.name}.{i}"))
        start = EngineStart(_replica(resolved, i), file, cores, True, token)
        source = Supervisor(command, start, policy, relay)
        clients.append(RemoteClient(start.config, source, name=f"replica {i}"))
    return Replicas(resolved, clients)


def _replica(resolved: ResolvedConfig, number: int) -> ResolvedConfig:
    """Return the settings of one replica: seeds and GPUs of its own."""
    runner = resolved.runner
    device = runner.device_of(number * runner.ranks)
    seed = derive_seed(resolved.seed, number)
    return replace(resolved, seed=seed, runner=replace(runner, device=device))


def _cores(count: int) -> list[tuple[int, ...]]:
    """Return the cores of each replica; () where there are too few, or it cannot be said."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(cores) < count:
        return [()] * count
    edges = [len(cores) * i // count for i in range(count + 1)]
    return [tuple(cores[low:high]) for low, high in pairwise(edges)]


def main(arguments: Sequence[str]) -> int:
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    live_with_parent(sock.fileno())
    logging.getLogger(PLACES_LOG).setLevel(logging.INFO)
    _beating = [beat(int(file)) for file in arguments[1:]]  # without one, for nobody
    line = HostSocket(sock)
    try:
        return _serve(line)
    except EOFError:
        return 0
    finally:
        line.close()


def beat(file: int) -> object:
    """Beat in the first number of shared memory for as long as the result lives, if the native
    kernels are there."""
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
    load = partial(load_loop, start.config, record, token=start.token)
    return 0 if host_engine(load, line, reports=start.reports) else 1


def _first_message(line: HostSocket) -> EngineStart:
    """Raises EOFError if there is none."""
    while not (bodies := line.receive(None)):
        pass
    return to_start.decode(bodies[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
