"""Keeps an engine process running: starts it, notices when it dies or stands still, starts another.

A crash ends the requests that the engine had begun; the client keeps the others for the next. The
next engine is started from the very same decisions.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvik.config.config import ResolvedConfig
from kvik.engine.client import EngineState, SourceClient
from kvik.engine.wire import Start

# The engine process as its parent sees it: a socket, what it prints, and its end.

TAIL = 2000  # characters of what it printed last that are kept
_POLL_SECONDS = 0.01  # seconds
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
            await asyncio.sleep(_POLL_SECONDS)

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


log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25  # seconds between looks
_SLOWEST_CORE = 5e9  # operations a second: a fraction of what any core does


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds, and how often.

    Attributes:
        stall: with work and no step, until the engine counts as stalled. Less where it knows
            better, from the steps that it has measured.
        kill: from then until it is killed.
        exit: for the process to end after its socket was closed.
        pause: before the first restart; doubles with each crash in `window`, up to `longest_pause`.
        crashes: within `window` after which no other engine is started.
    """

    stall: float = 60.0
    kill: float = 30.0
    exit: float = 3.0
    pause: float = 0.5
    longest_pause: float = 30.0
    crashes: int = 5
    window: float = 600.0


def patience_for(config: ResolvedConfig) -> Patience:
    """As much as the largest step may take, while none was measured. On a GPU that is little; a
    CPU may compute for minutes on a full budget of a large model, and is still not hung."""
    if config.runner.device != "cpu":
        return Patience()
    model, scheduler = config.model, config.scheduler
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * scheduler.max_model_len
    operations = 2.0 * scheduler.max_num_batched_tokens * (model.num_parameters + attention)
    return Patience(stall=60.0 + operations / (_SLOWEST_CORE * config.runner.threads))


class Supervisor:
    """An `EngineSource` of processes.

    Args:
        command: of an engine process, but for the number of its socket.
        start: what each is told.
        relay: takes what they print.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: Start,
        patience: Patience,
        relay: Callable[[str], object],
    ) -> None:
        self._command = command
        self._start = start
        self._patience = patience
        self._relay = relay
        self._lost = asyncio.Event()
        self._lost_for_good = False
        self._task: asyncio.Task[None] | None = None
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return self._child.pid if self._child is not None else None

    def start(self, client: SourceClient) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep(client))

    def lost(self, why: str, *, for_good: bool) -> None:
        self._lost_for_good = for_good
        self._lost.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._child is not None:
            await self._child.end(self._patience.exit)
            self._child = None

    # -- inside ----------------------------------------------------------------------------------

    async def _keep(self, client: SourceClient) -> None:
        try:
            await self._serve(client)
        except Exception as error:
            log.exception("the engine is not watched any more")
            client.disconnect(EngineState.FAILED, f"{type(error).__name__}: {error}")

    async def _serve(self, client: SourceClient) -> None:
        """One engine after the other, until no other one would help."""
        patience = self._patience
        crashes: deque[float] = deque(maxlen=patience.crashes)
        clock = asyncio.get_running_loop().time
        while True:
            why = await self._serve_one(client)
            if self._lost_for_good and not client.signs_of_life:
                log.error("%s", client.reason)
                return
            crashes.append(clock())
            recent = sum(at > clock() - patience.window for at in crashes)
            log.error("%s (crash %d of %d)", why, recent, patience.crashes)
            if recent >= patience.crashes:
                client.disconnect(EngineState.FAILED, f"it crashed {recent} times; at last: {why}")
                return
            client.disconnect(EngineState.RESTARTING, why)
            await asyncio.sleep(min(patience.pause * 2 ** (recent - 1), patience.longest_pause))

    async def _serve_one(self, client: SourceClient) -> str:
        """Start an engine and watch it until it has ended. Returns why it did."""
        self._lost.clear()
        self._lost_for_good = False
        try:
            child = self._child = Child(self._command, self._relay)
        except OSError as error:  # out of memory or processes, which may pass
            return f"the engine process cannot be started: {error}"
        client.connect(child.socket, self._start)
        stalled = await self._watch(client)
        if stalled:
            client.disconnect(EngineState.RESTARTING, stalled)
        ended = await child.end(0.0 if stalled else self._patience.exit)
        self._child = None
        return stalled or ended

    async def _watch(self, client: SourceClient) -> str:
        """Until the engine is lost, or the engine has stood still for too long. Returns what to say
        of the latter.

        Time counts by the looks that were taken at it: a process that slept, or an event loop that
        was held up, must not take the engine for hung.
        """
        patience, clock = self._patience, asyncio.get_running_loop().time
        stood, signs, last = 0.0, client.signs_of_life, clock()
        while not self._lost.is_set():
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._lost.wait()
            except TimeoutError:
                pass
            now = clock()
            if client.signs_of_life != signs or not client.num_unfinished:
                stood, signs = 0.0, client.signs_of_life
                if client.state is EngineState.STALLED:
                    client.set_state(EngineState.READY, "")
            else:
                stood += min(now - last, 2 * _LOOK_SECONDS)
            last = now
            limit = client.step_limit
            stall = patience.stall if limit is None else min(limit, patience.stall)
            told = f"the engine has had work for {stood:.0f} s and no step was computed"
            if stood >= stall + patience.kill:
                return told
            if stood >= stall:
                client.set_state(EngineState.STALLED, told)
        return ""
