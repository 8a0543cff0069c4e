"""The command line on a pseudo-terminal: tests send keys and read the output."""

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

PATIENCE = 60.0  # longest wait for output, in seconds


class OnTerminal:
    """Runs `kvik` with these arguments until the `with` block ends. `written` is its output."""

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
        """Wait for `text` in the output; return what was before it, and discard both."""
        expected = text.encode()
        while expected not in self.written:
            assert self._read(), f"ended without {text!r} after {self.written!r}"
        before, _, self.written = self.written.partition(expected)
        return before.decode()

    def finish(self) -> tuple[int, str]:
        """Wait for its end, and return the exit code and the output since the last `wait_for`."""
        while self._read():
            pass
        return self._process.wait(PATIENCE), self.written.decode()

    def _read(self) -> bool:
        ready, _, _ = select.select([self._end], [], [], PATIENCE)
        assert ready, f"is silent after {self.written!r}"
        try:
            piece = os.read(self._end, 65536)
        except OSError:  # EIO: all processes have closed the other end
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
