"""Output written by a thread, so that a reader that stalls does not stop an event loop."""

from __future__ import annotations

import os
import select
import threading
from collections import deque

MAX_PENDING = 1 << 20  # bytes that wait for the reader; more are dropped, and counted


class Printer:
    """A text stream whose writers never block.

    Args:
        fd: file to write to. Python's stream over the same file is not used: its lock would be
            held while the reader stalls.
    """

    def __init__(self, fd: int, limit: int = MAX_PENDING) -> None:
        self._fd = fd
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._size = 0  # bytes that wait or are being written
        self._num_lost = 0  # lines
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="printer", daemon=True).start()

    def write(self, text: str) -> int:
        """Print a text soon, or drop it and count its lines."""
        data = text.encode("utf-8", "replace")
        with self._changed:
            if self._size + len(data) > self._limit:
                self._num_lost += max(1, data.count(b"\n"))
            else:
                self._put(self._note() + data)
        return len(text)

    def tell(self, line: str) -> None:
        """Print a line soon."""
        self.write(f"{line}\n")

    def flush(self) -> None:
        """Do nothing: what was written is on its way."""

    def close(self, seconds: float) -> None:
        """Wait until everything is printed, at most `seconds`."""
        with self._changed:
            self._put(self._note())
            self._changed.wait_for(lambda: not self._size, seconds)

    def _note(self) -> bytes:
        """The message about lost lines, once."""
        lost, self._num_lost = self._num_lost, 0
        return f"{lost} lines were lost: nobody read what was printed\n".encode() if lost else b""

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            self._print(data)
            with self._changed:
                self._size -= len(data)
                self._changed.notify_all()

    def _print(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process may have made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:  # it has no reader any more
                return
