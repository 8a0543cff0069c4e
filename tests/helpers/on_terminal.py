"""The command line on a terminal of its own: keys go in, what it writes to the screen comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from types import TracebackType

PATIENCE = 60.0  # seconds until something must have been written


class OnTerminal:
    """Runs `kvik` with these arguments; leaving the `with` ends it. `written` is all it wrote."""

    def __init__(self, *arguments: str, columns: int = 80, **environ: str) -> None:
        self.written = b""
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvik", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull, "COLUMNS": str(columns)}
            | environ,
        )
        os.close(inner)

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait_for(self, text: str) -> str:
        """Until it has written this; returns what it wrote before, and forgets both."""
        expected = text.encode()
        while expected not in self.written:
            assert self._read(), f"ended without {text!r} after {self.written!r}"
        before, _, self.written = self.written.partition(expected)
        return before.decode()

    def finish(self) -> tuple[int, str]:
        """Wait for its end: the exit code, and what it wrote since the last `wait_for`."""
        while self._read():
            pass
        return self._process.wait(PATIENCE), self.written.decode()

    def _read(self) -> bool:
        ready, _, _ = select.select([self._end], [], [], PATIENCE)
        assert ready, f"is silent after {self.written!r}"
        try:
            piece = os.read(self._end, 65536)
        except OSError:  # EIO: no process has the other end open
            piece = b""
        self.written += piece
        return bool(piece)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._end)
