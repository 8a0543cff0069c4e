"""The engine process as its parent sees it: a socket, what it prints, and its end."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

TAIL = 2000  # characters of what it printed last that are kept
_TICK = 0.01  # seconds
_REAP = 10.0  # seconds; the memory of a large model is not given back at once
_READ = 1 << 16


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Make the command that runs a module of kvik in a Python of its own.

    With -P, as files of the current folder are not imported: they may be anyone's.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


class Child:
    """A process that is told the number of its end of a socket as its last argument.

    It has a process group of its own, so that Ctrl-C in a terminal does not reach it: its end is
    that of the socket. It stays in our session, as Linux shares processors between sessions: all
    threads of the engine would end up on one core whenever another program is busy.

    Args:
        command: to start it.
        relay: takes what it prints, as it comes.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], relay: Callable[[str], object]) -> None:
        self.socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        except OSError:
            self.socket.close()
            raise
        finally:
            theirs.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._relay = relay
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tail = ""
        os.set_blocking(self._output.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._output, self._printed)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    async def end(self, patience: float) -> str:
        """Wait for it to end by itself, kill it if it does not, and free what it had here. If that
        is cancelled, it has to be called again.

        Args:
            patience: seconds.

        Returns:
            How it ended.
        """
        await self._wait(patience)
        self._kill()
        await self._wait(_REAP)
        self._printed()
        self._loop.remove_reader(self._output)
        self._output.close()
        self.socket.close()
        return self._ending()

    def _kill(self) -> None:
        """With all of its group, as compilers and the like may work for it."""
        if self.running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _wait(self, patience: float) -> None:
        until = self._loop.time() + patience
        while self.running and self._loop.time() < until:
            await asyncio.sleep(_TICK)

    def _ending(self) -> str:
        status = self._process.returncode
        if status is None:
            return "the engine process cannot be killed"
        if status < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"the engine process was killed by {known.get(-status, f'signal {-status}')}"
        last = self.tail.strip().rpartition("\n")[2]
        how = f"the engine process exited with status {status}"
        return f"{how}: {last}" if last else how

    def _printed(self) -> None:
        while True:
            try:
                data = os.read(self._output.fileno(), _READ)
            except BlockingIOError:
                return
            text = self._decoder.decode(data, final=not data)
            if text:
                self.tail = (self.tail + text)[-TAIL:]
                with suppress(OSError, ValueError):  # nobody may be left to read it
                    self._relay(text)
            if not data:
                self._loop.remove_reader(self._output)
                return
