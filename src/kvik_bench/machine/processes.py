"""What processes that divide a model take to meet, and to send each other messages."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from kvik.child_process import live_with_parent, python_command
from kvik.planner.calibration import ExchangeCost
from kvik.spec.shares import MAX_RANKS

EXCHANGES = 1000  # in a row
MESSAGES = 200
SMALL, LARGE = 64, 4 << 20  # bytes of a message


def measure_exchanges(threads: int, samples: int) -> tuple[ExchangeCost, ...]:
    """Return the costs of 2, 4, 8, ... processes, as long as each has a thread."""
    found, count = [], 2
    while count <= min(threads, MAX_RANKS):
        found.append(ExchangeCost(count, exchange_seconds(count, samples)))
        count *= 2
    return tuple(found)


def exchange_seconds(processes: int, samples: int) -> float:
    """Return the seconds of an exchange between threads that run, the median of some runs. They
    share memory as processes do, and wait in the same way."""
    from kvik.kernels.cpu.group import Group
    from kvik.kernels.cpu.native import Native

    memory, tapes = np.zeros(1 << 20, np.uint8), []
    for rank in range(processes):
        native = Native(1)
        group = Group(native, memory, rank, processes)
        with native.record({1: 0}) as recording:
            for _ in range(EXCHANGES):
                group.exchange()
        tapes.append((native, recording))
    times = []
    with ThreadPoolExecutor(processes) as pool:
        for _ in range(samples + 1):
            begun = time.perf_counter()
            list(pool.map(lambda tape: tape[0].replay(tape[1], (1,)), tapes))
            times.append((time.perf_counter() - begun) / EXCHANGES)
    return median(times[1:])


def hop_seconds(messages: int = MESSAGES) -> tuple[float, float]:
    """Return the seconds of a small message to another process, which wakes it, and the bytes a
    second of a large one."""
    ours, theirs = socket.socketpair()
    command = python_command(__name__, str(theirs.fileno()))
    with theirs:
        child = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    with Connection(ours.detach()) as line:

        def answered(size: int) -> Callable[[], float]:
            data = bytes(size)

            def seconds() -> float:
                begun = time.perf_counter()
                line.send_bytes(data)
                line.recv_bytes()
                return time.perf_counter() - begun

            return seconds

        try:
            small, large = (
                median(send() for _ in range(count))
                for send, count in ((answered(SMALL), messages), (answered(LARGE), messages // 10))
            )
        finally:
            line.close()
            child.wait()
    return small / 2, LARGE / max(1e-9, large - small)


def main(arguments: Sequence[str]) -> int:
    """Answer each message, until the other process has gone."""
    line = Connection(int(arguments[0]))
    live_with_parent(line.fileno())
    with suppress(EOFError, OSError):
        while True:
            line.recv_bytes()
            line.send_bytes(b"")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
