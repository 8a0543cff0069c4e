"""Python processes that are forked from one that has already imported torch and kvik.

Importing Python's modules takes a process of kvik 1.5 to 2.5 seconds of CPU, most of what a short
test of a server or a group takes. `Popen` replaces `subprocess.Popen`: another process imports the
modules once, and forks for each command of Python. The forked process then runs the same `main`
with the same arguments, files and environment as a fresh one, it is a child of the process that
called `Popen`, and `/proc` shows its command. The engines and ranks that it starts are forked, too.

Tests use the fixture `forked`. These start processes as users do, with their imports:
`cli/test_serve.py`, `server/test_lost_ranks.py` in the nightly tier, tests with the fixture
`fresh`, and commands with other variables that Python or a library reads when it starts.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

WITHOUT_TORCH = ("kvik.engine_process", "helpers.served_engine")
LOADED = (
    *("torch", "kvik.attention.cpu", "kvik.kernels.torch_group", "kvik.worker.ranks"),
    *("kvik.worker.worker", "kvik.llm", "kvik.rank_process", "kvik.stage_process"),
    *("kvik.cli.main", "kvik.cli.serve", "kvik.cli.route", "aiohttp", "uvloop", *WITHOUT_TORCH),
)
READ_AT_START = ("PYTHON", "NUMPY_", "OMP_", "LD_")  # variables; of Python and libraries
LARGEST = 1 << 17  # bytes of a request, including the environment
MAX_FILES = 64  # of a request
ABOVE = 400  # file descriptors from here on are unused otherwise
PADDING = 1 << 12  # bytes for the command of a forked process
_PR_SET_CHILD_SUBREAPER = 36
_PARAMETERS = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]


class Popen(subprocess.Popen[Any]):
    """Forks a process for a command of Python; starts other commands as its base class does."""

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(_PARAMETERS, values, strict=True))
        command = given["args"]
        environment = dict(os.environ if given["env"] is None else given["env"])
        changed = environment.items() ^ os.environ.items()
        # Torch would exceed the limits of the processes with a session of their own.
        fresh = given["start_new_session"] or any(n.startswith(READ_AT_START) for n, _ in changed)
        if command[0] != sys.executable or fresh:
            super()._execute_child(*values)
            return
        pipes = [given[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")]
        pipes += [given["errread"], given["errwrite"]]
        places = {number: number for number in (0, 1, 2, *given["pass_fds"])}
        places |= {place: pipes[i] for place, i in enumerate((0, 3, 5)) if pipes[i] != -1}
        facts = {
            "command": [os.fspath(word) for word in command],
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "environment": environment,
            "group": given["process_group"] == 0,
        }
        self.pid = fork(facts, places) if is_forked else parent().fork(facts, places)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class Parent:
    """The process that has imported the modules."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(number), " " * PADDING],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(process.wait)
        atexit.register(self._line.close)  # before that

    def fork(self, facts: Mapping[str, Any], places: Mapping[int, int]) -> int:
        """Return the id of a new process, which becomes a child of this one.

        Args:
            places: its file descriptors, and the ones of this process that they are copies of.
        """
        adopt = functools.partial(ctypes.CDLL(None).prctl, _PR_SET_CHILD_SUBREAPER)
        request = json.dumps({**facts, "places": list(places)}).encode()
        with self._lock:
            adopt(1)
            try:
                socket.send_fds(self._line, [request], list(places.values()))
                return int(self._line.recv(LARGEST))
            finally:
                adopt(0)


@functools.cache
def parent() -> Parent:
    """Return the one of this process, which ends with it."""
    return Parent()


# In the process that has imported the modules, and in those that are forked


is_forked = False


def serve(requests: socket.socket) -> None:
    """Fork twice for each request. The process in between ends at once, so that the requesting
    process, which adopts orphans, gets the new one as its child."""
    while True:
        data, numbers, _, _ = socket.recv_fds(requests, LARGEST, MAX_FILES)
        if not data:
            return
        facts = json.loads(data)
        is_script = facts["command"][1].endswith("engine_child.py")
        for name in WITHOUT_TORCH if is_script else LOADED:
            with suppress(ImportError):  # an optional part
                importlib.import_module(name)
        places = dict(zip(facts.pop("places"), numbers, strict=True))
        read, write = os.pipe()
        if not (between := os.fork()):
            os.write(write, str(fork({**facts, "between": os.getpid()}, places)).encode())
            os._exit(0)
        os.waitpid(between, 0)
        requests.send(os.read(read, LARGEST))
        for number in (read, write, *numbers):
            os.close(number)


def fork(facts: Mapping[str, Any], places: Mapping[int, int]) -> int:
    """Return the id of a child that runs a command; see `Parent.fork`."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The child must not close numbers that were files of this process: Python's objects are frozen,
    # so they are not collected there, and after a fork libraries close only numbers below ABOVE.
    gc.freeze()
    above = {place: fcntl.fcntl(n, fcntl.F_DUPFD_CLOEXEC, ABOVE) for place, n in places.items()}
    if not (pid := os.fork()):
        _become(facts, above)
    gc.unfreeze()
    for number in above.values():
        os.close(number)
    if facts["group"]:
        with suppress(OSError):  # it has already done so, or has ended
            os.setpgid(pid, pid)
    return pid


def _become(facts: Mapping[str, Any], places: Mapping[int, int]) -> None:
    """In a forked process: put its files in their places, and run the command."""
    global is_forked
    is_forked, code = True, 1
    try:
        while os.getppid() == facts.get("between"):  # whose end may kill: see `die_with_parent`
            time.sleep(0.0005)
        if facts["group"]:
            os.setpgid(0, 0)
        _show(facts["command"])
        for kind in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(kind, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        for place, number in places.items():
            os.dup2(number, place)
        for low, high in pairwise([*sorted(places), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(low + 1, high)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        os.chdir(facts["cwd"])
        os.environ.clear()
        os.environ.update(facts["environment"])
        subprocess.Popen = Popen
        code = _run(facts["command"][1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _show(command: Sequence[str]) -> None:
    """Let /proc show a command in place of the one of the first process."""
    first, last = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"\0".join(word.encode() for word in command)[: last - first - 1]
    ctypes.memmove(first, text.ljust(last - first, b"\0"), last - first)


def _run(words: Sequence[str]) -> int:
    """Run the arguments of a command of Python, and return the exit code."""
    first, *rest = words[1:] if words[0] == "-P" else words
    if first == "-m":
        module = "kvik.cli.main" if rest[0] == "kvik" else rest[0]
        return int(importlib.import_module(module).main(rest[1:]))
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        serve(asked)
