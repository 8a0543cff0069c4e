"""What a process prints, written by a thread: a reader who stalls must not stop an event loop."""

from __future__ import annotations

import os
import select
import threading
from collections import deque

MAX_PENDING = 1 << 20  # bytes that wait for the reader; what comes beyond is lost, and counted


class Printer:
    """A text stream whose writers never wait.

    Args:
        fd: of the file that it writes to. The stream of Python over the same file is not used:
            its lock would be held while the reader stalls.
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
        """Print a text soon, or count it as lost."""
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
        """Wait until everything is printed, for so many seconds at most."""
        with self._changed:
            self._put(self._note())
            self._changed.wait_for(lambda: not self._size, seconds)

    def _note(self) -> bytes:
        """What to say of lines that were lost; they are told of once."""
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
            except BlockingIOError:  # another process may have made it so
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:  # nobody will ever read it
                return
