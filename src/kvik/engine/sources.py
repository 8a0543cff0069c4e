"""Sources of a link's engine: a separate process, or a thread of this one.

A process is watched, and when it ends or hangs another one is started with the same configuration.
A crash ends the requests that the engine had started; the client keeps the others for the next
engine.
"""

from __future__ import annotations

import asyncio
import atexit
import codecs
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mmap import mmap

import msgspec

from kvik.child_process import LOOK_SECONDS, HeartbeatWatch, StallTimer
from kvik.config.config import ResolvedConfig
from kvik.engine.host import host_engine
from kvik.engine.loop import EngineLoop
from kvik.engine.remote import EngineLink, EngineState
from kvik.engine.thread import interrupt
from kvik.engine.wire import EngineStart, HostSocket
from kvik.files import shared_memory
from kvik.spec.adapters import Adapter

TAIL = 2000  # characters of the last output of the process that are kept
_POLL_SECONDS = 0.01  # between checks whether the process has ended
_REAP = 10.0  # seconds; the memory of a large model is not freed at once
_READ = 1 << 16
_BEATS_BYTES = 4096
LAST_STEP_SECONDS = 30.0  # for the step in flight when a thread's engine is closed


class EngineProcess:
    """The engine process as its parent sees it: socket, heartbeat, output, and exit.

    The last two arguments of the command are file descriptors: its end of the socket, and memory
    whose first 32-bit number is its heartbeat counter. The process has a separate process group, so
    that Ctrl-C in a terminal does not reach it; it ends when the socket is closed. It stays in this
    session, because Linux shares processors between sessions: otherwise all threads of the engine
    would run on one core whenever another program is busy.

    Args:
        command: starts it.
        relay: takes its output as it comes.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], relay: Callable[[str], object]) -> None:
        file = shared_memory(_BEATS_BYTES)
        self._beats = mmap(file, _BEATS_BYTES)
        self.socket, theirs = socket.socketpair()
        numbers = theirs.fileno(), file
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=numbers,
                process_group=0,
            )
        except OSError:
            self.socket.close()
            self._beats.close()
            raise
        finally:
            theirs.close()
            os.close(file)
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

    @property
    def beats(self) -> int:
        """Its heartbeat counter."""
        return int.from_bytes(self._beats[:4], sys.byteorder)

    async def end(self, timeout: float) -> str:
        """Wait for the process to end, kill it if it does not, and free its resources here. If
        cancelled, this must be called again.

        Args:
            timeout: seconds to wait before it is killed.

        Returns:
            How it ended.
        """
        await self._wait(timeout)
        self._kill()
        await self._wait(_REAP)
        self._printed()
        self._loop.remove_reader(self._output)
        self._output.close()
        self.socket.close()
        self._beats.close()
        return self._ending()

    def _kill(self) -> None:
        """Kill the whole process group, which may contain compilers that it started."""
        if self.running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _wait(self, timeout: float) -> None:
        until = self._loop.time() + timeout
        while self.running and self._loop.time() < until:
            await asyncio.sleep(_POLL_SECONDS)

    def _ending(self) -> str:
        status = self._process.returncode
        if status is None:
            return "the engine process cannot be killed"
        if status < 0:
            signal_names = {number.value: number.name for number in signal.Signals}
            return (
                f"the engine process was killed by {signal_names.get(-status, f'signal {-status}')}"
            )
        last = self.tail.strip().rpartition("\n")[2]
        message = f"the engine process exited with status {status}"
        return f"{message}: {last}" if last else message

    def _printed(self) -> None:
        while True:
            try:
                data = os.read(self._output.fileno(), _READ)
            except BlockingIOError:
                return
            text = self._decoder.decode(data, final=not data)
            if text:
                self.tail = (self.tail + text)[-TAIL:]
                with suppress(OSError, ValueError):  # the relay may be closed
                    self._relay(text)
            if not data:
                self._loop.remove_reader(self._output)
                return


log = logging.getLogger(__name__)

_SLOWEST_CORE = 5e9  # operations per second: less than any core achieves


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When an engine process is killed, and when another one is started; times in seconds."""

    # Time with work but without a step after which the engine counts as stalled; less if the engine
    # announces a lower `StepLimit`. (An engine without heartbeat is killed: see `HeartbeatWatch`.)
    stall: float = 60.0
    kill: float = 30.0  # time from then until it is killed
    exit: float = 3.0  # time for the process to end after its socket was closed
    # Before the first restart; doubles with each crash in `window`, up to `longest_pause`.
    pause: float = 0.5
    longest_pause: float = 30.0
    crashes: int = 5  # number of crashes within `window` after which no further engine is started
    window: float = 600.0


def restart_policy(config: ResolvedConfig) -> RestartPolicy:
    """Choose `stall` to exceed the largest step, before any was measured. On a GPU steps are short;
    a CPU may compute a full budget of a large model for minutes without being hung."""
    if config.runner.device != "cpu":
        return RestartPolicy()
    model, scheduler = config.model, config.scheduler
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * scheduler.max_model_len
    operations = 2.0 * scheduler.max_num_batched_tokens * (model.num_parameters + attention)
    return RestartPolicy(stall=60.0 + operations / (_SLOWEST_CORE * config.runner.threads))


class Supervisor:
    """An `EngineSource` that starts processes.

    Args:
        command: of an engine process, without the file descriptor of its socket.
        start: first message to each.
        relay: takes their output.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: EngineStart,
        policy: RestartPolicy,
        relay: Callable[[str], object],
    ) -> None:
        self._command = command
        self._start = start
        self._policy = policy
        self._relay = relay
        self._lost = asyncio.Event()
        self._failure = ""  # why the engine reported that it cannot be loaded
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Lock()
        self._child: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the engine, while there is one."""
        return self._child.pid if self._child is not None else None

    def start(self, link: EngineLink) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep(link))

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        config = self._start.config.with_adapters(adapters)
        self._start = msgspec.structs.replace(self._start, config=config)

    def lost(self, reason: str, *, for_good: bool) -> None:
        self._failure = reason if for_good else ""
        self._lost.set()

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        async with self._closing:
            if self._child is not None:
                await self._child.end(self._policy.exit)
                self._child = None

    # -- inside ----------------------------------------------------------------------------------

    async def _keep(self, link: EngineLink) -> None:
        try:
            await self._serve(link)
        except Exception as error:
            log.exception("the engine is no longer watched")
            link.disconnect(EngineState.FAILED, f"{type(error).__name__}: {error}")

    async def _serve(self, link: EngineLink) -> None:
        """Start one engine after the other, until another one would not help."""
        policy = self._policy
        crashes: deque[float] = deque(maxlen=policy.crashes)
        clock = asyncio.get_running_loop().time
        while True:
            reason = await self._serve_one(link)
            if self._failure and not link.signs_of_life:
                log.error("%s", link.named(link.reason))
                return
            crashes.append(clock())
            recent = sum(at > clock() - policy.window for at in crashes)
            log.error("%s (crash %d of %d)", link.named(reason), recent, policy.crashes)
            if recent >= policy.crashes:
                link.disconnect(EngineState.FAILED, f"it crashed {recent} times; at last: {reason}")
                return
            link.disconnect(EngineState.RESTARTING, reason)
            await asyncio.sleep(min(policy.pause * 2 ** (recent - 1), policy.longest_pause))

    async def _serve_one(self, link: EngineLink) -> str:
        """Start an engine and watch it until it has ended. Returns why it ended."""
        self._lost.clear()
        self._failure = ""
        try:
            child = self._child = EngineProcess(self._command, self._relay)
        except OSError as error:  # out of memory or processes, which may pass
            return f"the engine process cannot be started: {error}"
        link.connect(child.socket, self._start)
        hung = await self._watch(link)
        if hung:
            link.disconnect(EngineState.RESTARTING, hung)
        status = await child.end(0.0 if hung else self._policy.exit)
        self._child = None
        return hung or self._failure or status

    async def _watch(self, link: EngineLink) -> str:
        """Wait until the engine is lost, its heartbeat stops, or it has made no progress for too
        long. Returns the message for the latter cases, or ""."""
        policy, clock = self._policy, asyncio.get_running_loop().time
        # Only native kernels are sure to beat: without them there may be no heartbeat at all.
        heartbeats = HeartbeatWatch(begins=self._start.config.runner.kernels == "native")
        progress = StallTimer()
        progress.look(link.signs_of_life, clock())
        while not self._lost.is_set():
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._lost.wait()
            except TimeoutError:
                pass
            now = clock()
            silent = "" if self._child is None else heartbeats.look(self._child.beats, now)
            if silent and not self._lost.is_set():
                return f"the engine process {silent}"
            expected = link.num_unfinished > 0 and not link.changing
            stood = progress.look(link.signs_of_life, now, expected=expected)
            if not stood and link.state is EngineState.STALLED:
                link.set_state(EngineState.READY, "")
            limit = link.step_limit
            stall = policy.stall if limit is None else min(limit, policy.stall)
            reason = f"the engine has had work for {stood:.0f} s and no step was computed"
            if stood >= stall + policy.kill:
                return reason
            if stood >= stall:
                link.set_state(EngineState.STALLED, reason)
        return ""


class ThreadSource:
    """An `EngineSource` that runs one engine in a thread of this process. It starts no other if
    that fails.

    Args:
        load: makes the engine, in the thread, since some of what it sets is per thread.
        reports: see `EngineStart`.
    """

    def __init__(self, load: Callable[[], EngineLoop], *, reports: bool = False) -> None:
        self._load = load
        self._reports = reports
        self._loading = False
        self._lock = threading.Lock()  # of `_loading`: a loaded engine must not be interrupted
        self._failure = ""
        self._link: EngineLink | None = None
        self._stop: Callable[[], None] | None = None  # ends the thread

    def start(self, link: EngineLink) -> None:
        self._link = link
        self._loading = True
        ours, theirs = socket.socketpair()
        link.connect(ours, None)
        thread = threading.Thread(target=self._run, args=(theirs,), name="kvik-engine", daemon=True)
        thread.start()
        self._stop = partial(self._end, thread, theirs)
        atexit.register(self._stop)

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """There is no other engine."""

    def lost(self, reason: str, *, for_good: bool) -> None:
        assert self._link is not None
        self._link.disconnect(EngineState.FAILED, self._failure or reason)

    async def close(self) -> None:
        if self._stop is not None:
            await asyncio.to_thread(self._stop)
            atexit.unregister(self._stop)

    def _end(self, thread: threading.Thread, sock: socket.socket) -> None:
        """End the thread; a program that ends while a thread computes is aborted."""
        if not thread.is_alive():  # it has ended, or this process is a fork
            return
        with suppress(OSError):  # it ends just now
            sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._loading:  # which may take minutes
                interrupt(thread)
                self._loading = False  # another `close` must not interrupt its cleaning up
        thread.join(LAST_STEP_SECONDS)
        if thread.is_alive():
            log.warning("the engine's thread is still computing; it is abandoned")

    def _run(self, sock: socket.socket) -> None:
        line = HostSocket(sock)
        try:
            host_engine(self._begin, line, reports=self._reports)
        except (EOFError, KeyboardInterrupt):
            pass
        except BaseException as error:
            log.exception("the engine failed")
            self._failure = f"the engine failed: {type(error).__name__}: {error}"
        finally:
            line.close()

    def _begin(self) -> EngineLoop:
        try:
            return self._load()
        finally:
            with self._lock:
                self._loading = False
