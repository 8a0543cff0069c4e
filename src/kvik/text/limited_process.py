"""A child process with limits, for work on untrusted input.

A template is a program, and building a grammar may take hours or crash the process. So a child does
such work: the system limits its memory, and the parent kills it when an answer takes too long. A
frame is a length in 4 bytes and msgpack. The first frame to the child initialises it; then it
answers each frame with one frame.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

import msgspec

LENGTH_BYTES = 4
START_SECONDS = 60.0  # limit of the start, with imports, on a busy machine
ORPHAN_SECONDS = 60  # limit of one answer, in case the parent no longer exists to kill the process


def framed(message: object) -> bytes:
    """Encode a message as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_frame(stream: IO[bytes], limit: int) -> bytes:
    """Read the body of the next frame.

    Raises:
        EOFError: the stream has ended, or the frame has more than `limit` bytes.
    """
    size = int.from_bytes(_read_exactly(stream, LENGTH_BYTES), "big")
    if size > limit:
        raise EOFError
    return _read_exactly(stream, size)


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


# The parent's side.


class LimitedProcess:
    """The parent's handle of the child; threads may share it.

    The child starts with the first question and lives until `close`. If it takes too long or ends,
    the next question starts a new one. If it took too long without computing, as one does that was
    stopped or has no core, the question is not to blame: a new child gets it too.

    Args:
        command: starts the child.
        first: makes the first message to a new child.
        seconds: limit of one answer.
        max_answer: limit of an answer in bytes.
    """

    def __init__(
        self,
        command: Sequence[str],
        first: Callable[[], object],
        *,
        seconds: float,
        max_answer: int,
    ) -> None:
        self._command = command
        self._first = first
        self._seconds = seconds
        self._max_answer = max_answer
        self._lock = threading.Lock()  # one question at a time
        self._child: _Child | None = None
        self._closed = False
        self._parent = os.getpid()

    @property
    def pid(self) -> int | None:
        """Id of the child; None: it is not running."""
        return None if self._child is None else self._child.pid

    def ask(self, frame: bytes) -> bytes:
        """Return the body of the answer to a frame.

        Raises:
            TimeoutError: the answer takes too long.
            EOFError, OSError: the child ended during the question, or its answer is too long.
            RuntimeError: `close` was called.
        """
        with self._lock:
            while True:
                is_new = self._child is None
                try:
                    child = self._child = self._child or _Child(self._command, self._max_answer)
                    if self._closed:
                        raise RuntimeError("this process is closed")
                    if is_new:
                        child.exchange(framed(self._first()), START_SECONDS)
                    return child.exchange(frame, self._seconds)
                except BaseException as error:
                    # Also after Ctrl-C, or else the next question would read this answer.
                    self._end()
                    lost = isinstance(error, (EOFError, OSError)) and not is_new
                    # TimeoutError is an OSError.
                    if lost and (child.was_idle or not isinstance(error, TimeoutError)):
                        continue  # it may have died, or been stopped, while it was idle
                    raise

    def close(self) -> None:
        """End the process. Questions of other threads fail at once, and so do all later ones."""
        if os.getpid() != self._parent:
            return  # this is a forked process; the child belongs to the original one
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    def __init__(self, command: Sequence[str], max_answer: int) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._max_answer = max_answer
        self._is_late = False
        self.was_idle = False  # when it was late

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, frame: bytes, seconds: float) -> bytes:
        """Send a frame and return the answer; raises the errors of `LimitedProcess.ask`."""
        timer = threading.Timer(seconds, self._kill_late, (seconds, self._cpu_time()))
        timer.daemon = True
        timer.start()
        try:
            self._stdin.write(frame)
            self._stdin.flush()
            return read_frame(self._stdout, self._max_answer)
        except (EOFError, OSError):
            if self._is_late:
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Make `exchange` fail in the thread that calls it."""
        self._process.kill()

    def end(self) -> None:
        self.kill()
        with suppress(OSError):  # unsent data
            self._stdin.close()
        self._stdout.close()
        self._process.wait()

    def _kill_late(self, seconds: float, before: float) -> None:
        self._is_late, self.was_idle = True, self._cpu_time() - before < seconds / 2
        self.kill()

    def _cpu_time(self) -> float:
        """Return the seconds that it has computed; NaN if the system does not say."""
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # the id of the clock in Linux
        except OSError:
            return math.nan


# The child's side.


def serve(begin: Callable[[bytes], Callable[[bytes], object]], *, max_memory: int) -> int:
    """Answer the frames of stdin on stdout until stdin ends; return the exit status.

    Args:
        begin: takes the body of the first frame; returns the function that answers later ones.
        max_memory: limit of the address space in bytes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with suppress(ValueError, OSError):  # not every system supports it
        resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    frames, answers = sys.stdin.buffer, sys.stdout.buffer

    def send(message: object) -> None:
        answers.write(framed(message))
        answers.flush()

    with suppress(EOFError):
        answer = begin(read_frame(frames, sys.maxsize))
        send(None)
        while True:
            body = read_frame(frames, sys.maxsize)
            signal.alarm(ORPHAN_SECONDS)
            send(answer(body))
            signal.alarm(0)
    return 0
