"""Processes of a group, forked by one process that has already loaded torch.

A short test of a group mostly starts processes: importing Python's modules takes each 1.5 seconds
of CPU time. Here another process imports them and forks for each process of a group, which then
runs the same `main` with the same arguments, sockets and memory as a fresh one.
`tests/test_tensor_parallel.py` and `tests/test_pipeline.py` start fresh ones, as users do.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, Any

LOADED = ("torch", "kvik.worker.ranks", "kvik.rank_process", "kvik.stage_process")
LARGEST = 1 << 17  # bytes of a request, including the environment
ABOVE = 400  # file descriptors from here on are unused otherwise

# "cpu": seconds of all ended processes, which are not children of this one.
spent: Counter[str] = Counter()


class ForkedProcess:
    """Replaces `subprocess.Popen` for processes of a group."""

    stdin: IO[bytes] | None = None
    returncode: int | None = None

    def __init__(
        self,
        requests: socket.socket,
        command: Sequence[str],
        pass_fds: Sequence[int] = (),
        stdin: int | None = None,
    ) -> None:
        python, isolated, of_module, module, *arguments = command
        assert (python, isolated, of_module) == (sys.executable, "-P", "-m")
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        places = {number: number for number in (1, 2, *pass_fds)}
        if stdin == subprocess.PIPE:
            places[0], own = os.pipe()
            self.stdin = os.fdopen(own, "wb")
        facts = {"cwd": os.getcwd(), "environment": dict(os.environ)}
        facts |= {"module": module, "arguments": arguments, "places": list(places)}
        with theirs:
            numbers = [theirs.fileno(), *places.values()]
            socket.send_fds(requests, [json.dumps(facts).encode()], numbers)
        if stdin == subprocess.PIPE:
            os.close(places[0])
        self.pid: int = json.loads(self._line.recv(LARGEST))

    def poll(self) -> int | None:
        """See `Popen.poll`."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """See `Popen.wait`."""
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def kill(self) -> None:
        """See `Popen.kill`."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], timeout)[0]:
            with self._line:
                self.returncode, cpu = json.loads(self._line.recv(LARGEST))
            spent["cpu"] += cpu
        return self.returncode


@contextmanager
def warm_process() -> Iterator[SimpleNamespace]:
    """Provide a replacement of the module `subprocess` for code that starts groups."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
            )

        def start(command: Sequence[str], **options: Any) -> ForkedProcess:
            return ForkedProcess(ours, command, **options)

        names = ("DEVNULL", "PIPE", "TimeoutExpired")
        yield SimpleNamespace(Popen=start, **{name: getattr(subprocess, name) for name in names})
    process.wait(30)
    spent.clear()  # it is part of that process's time


def serve(requests: socket.socket) -> None:
    """Fork for each request, and report how each fork ended."""
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    for number in (woken, wake):
        os.set_blocking(number, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    lines: dict[int, socket.socket] = {}
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 10)
            _tell_of_ended(lines)
        if requests not in ready:
            continue
        data, numbers, _, _ = socket.recv_fds(requests, LARGEST, 16)
        if not data:
            return
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            for each in (requests, *lines.values()):
                each.close()
            _become(json.loads(data), numbers[1:])
        lines[pid] = socket.socket(fileno=numbers[0])
        lines[pid].send(json.dumps(pid).encode())
        for number in numbers[1:]:
            os.close(number)


def _tell_of_ended(lines: dict[int, socket.socket]) -> None:
    while lines:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if not pid:
            return
        with lines.pop(pid) as line, contextlib.suppress(OSError):
            code, cpu = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            line.send(json.dumps([code, cpu]).encode())


def _become(facts: dict[str, Any], numbers: Sequence[int]) -> None:
    """In the forked process, put descriptors in their places and run the requested module."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        above = [fcntl.fcntl(number, fcntl.F_DUPFD, ABOVE) for number in numbers]
        for number in numbers:
            os.close(number)
        for number, place in zip(above, facts["places"], strict=True):
            os.dup2(number, place)
            os.close(number)
        os.chdir(facts["cwd"])
        os.environ.clear()
        os.environ.update(facts["environment"])
        code = importlib.import_module(facts["module"]).main(facts["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        serve(asked)
