"""A process with limits that answers frames, for work on what callers send.

A template is a program and a grammar may be built for hours, or end the process that builds it. So
a child does such work: the system refuses it memory, and the parent kills it when an answer takes
too long. A frame is a length in 4 bytes and msgpack. The child's first frame is what it works with;
then it answers each frame with one.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

import msgspec

LENGTH_BYTES = 4
START_SECONDS = 60.0  # for the process to import what it needs, on a busy machine
ORPHAN_SECONDS = 60  # for one answer, if the parent is no longer there to end the process


def framed(message: object) -> bytes:
    """Encode a message as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_frame(stream: IO[bytes], most: int) -> bytes:
    """Read the body of the next frame.

    Raises:
        EOFError: the stream has ended, or the frame has more than `most` bytes.
    """
    size = int.from_bytes(_read_exactly(stream, LENGTH_BYTES), "big")
    if size > most:
        raise EOFError
    return _read_exactly(stream, size)


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


# The parent's side.


class LimitedProcess:
    """The child as its parent sees it; threads may share it.

    It starts with the first question and stays until `close`. One that took too long or that ended
    is replaced at the next question.

    Args:
        command: that starts it.
        first: message that it works with, made when a process starts.
        seconds: for one answer.
        max_answer: bytes.
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
        """Of the child; None: there is none."""
        return None if self._child is None else self._child.pid

    def ask(self, frame: bytes) -> bytes:
        """Return the body of the answer to a frame.

        Raises:
            TimeoutError: it takes too long.
            EOFError, OSError: the process ended over it, or its answer is too long.
            RuntimeError: this is closed.
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
                    # Also after Ctrl-C: the next question would read this answer.
                    self._end()
                    late = isinstance(error, TimeoutError)  # which is an OSError
                    if isinstance(error, (EOFError, OSError)) and not is_new and not late:
                        continue  # it may have died while it was idle
                    raise

    def close(self) -> None:
        """End the process. Another thread's question fails at once, and so do all later ones."""
        if os.getpid() != self._parent:
            return  # the process belongs to the one that this is a fork of
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, frame: bytes, seconds: float) -> bytes:
        """Send a frame and return the answer; errors as of `LimitedProcess.ask`."""
        timer = threading.Timer(seconds, self._kill_late)
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
        with suppress(OSError):  # what was not sent
            self._stdin.close()
        self._stdout.close()
        self._process.wait()

    def _kill_late(self) -> None:
        self._is_late = True
        self.kill()


# The child's side.


def serve(begin: Callable[[bytes], Callable[[bytes], object]], *, max_memory: int) -> int:
    """Answer the frames of stdin on stdout until it ends; the exit status of the process.

    Args:
        begin: takes the body of the first frame; returns what makes the answer to each later one.
        max_memory: bytes that the process may have.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with suppress(ValueError, OSError):  # not every system limits it
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
