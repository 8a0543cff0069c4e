"""An engine in a separate thread, for callers in any number of threads.

Only that thread uses the engine, the model and the text. Callers post work and wait: the thread
processes it between two steps, so all calls share one batch. A caller that is interrupted stops
waiting at once, without interrupting a step.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from kvik.config.config import ResolvedConfig
from kvik.core.types import EngineRequest, FinishReason
from kvik.engine.loop import Engine, EngineLoop
from kvik.engine.output import OutputProcessor, RequestOutput, TextDelta
from kvik.errors import GroupLost
from kvik.interrupts import deferred_interrupt

LOOKAHEAD = 512  # requests queued ahead of the running ones in a long batch
_POLL_SECONDS = 0.1  # longest wait for a policy that waits for more requests

T = TypeVar("T")


def interrupt(thread: threading.Thread) -> None:
    """Raise KeyboardInterrupt in a thread as soon as it runs Python again; it may be loading a
    model for minutes. Does nothing if it has ended. Waits while a thread imports torch, which could
    not be imported again."""
    if "torch" in sys.modules:
        with suppress(ImportError):
            importlib.import_module("torch")  # returns when the other import has ended
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
        )


@dataclass(frozen=True, slots=True)
class CallUpdate:
    """The results of one step for one call."""

    deltas: tuple[TextDelta, ...] = ()  # of calls that stream
    output: RequestOutput | None = None  # of the request that finished
    error: BaseException | None = None  # why the call cannot be answered; nothing follows


class Call:
    """The requests of one caller, which reads `updates` until each has its output.

    Args:
        requests: each with the text of its prompt, if it was given as text.
    """

    def __init__(
        self, requests: Iterable[tuple[EngineRequest, str | None]], *, streaming: bool
    ) -> None:
        self.updates: SimpleQueue[CallUpdate] = SimpleQueue()
        self.streaming = streaming
        # Only the engine's thread uses the rest.
        self.unsent = deque(requests)
        self.sent: set[str] = set()  # not finished yet


class EngineThread:
    """Runs the steps of an engine whenever it has work.

    Args:
        load: makes the engine, in the thread, since some of what it sets is per thread (torch's
            number of threads, the current GPU); again, after `sleep`, with its last settings.

    Raises:
        BaseException: what `load` raises.
    """

    def __init__(self, load: Callable[[ResolvedConfig], Engine], resolved: ResolvedConfig) -> None:
        self._load = load
        self._resolved = resolved
        self._loading = False
        self._process = os.getpid()
        self._lock = threading.RLock()  # a signal handler may post while its thread does
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = threading.Event()
        self._stopping = False
        self._calls: list[Call] = []
        self._unsent: deque[Call] = deque()  # round robin; empty ones are removed late
        self._owner: dict[str, Call] = {}  # by id of sent requests
        self._engine: Engine | None = None  # while it sleeps
        loaded: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(loaded,), name="kvik-engine", daemon=True
        )
        try:
            with deferred_interrupt():  # a thread that is half started cannot be ended
                self._thread.start()
            result = loaded.get()
        except BaseException:  # Ctrl-C, which does not reach the loading thread
            self._interrupt()
            raise
        if isinstance(result, BaseException):
            raise result

    # -- for any thread --------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Give the engine a call; its results come in `call.updates`.

        Raises:
            RuntimeError: the engine is closed, or this process is a fork of the engine's.
        """
        self._post(lambda: self._begin(call))

    def next_update(self, call: Call) -> CallUpdate:
        """Wait for the next update of a call.

        Raises:
            RuntimeError: the engine failed or was closed, or this process is a fork.
            KvikError: the engine refused a request.
        """
        self._check_process()
        update = call.updates.get()
        if update.error is not None:
            raise update.error
        return update

    def abandon(self, call: Call) -> None:
        """End the unfinished requests of a call, without waiting. Does nothing if there are none,
        or the engine is closed."""
        with suppress(RuntimeError):
            self._post(lambda: self._end(call))

    def ask(self, question: Callable[[EngineLoop], T]) -> T:
        """Call `question` in the engine's thread and return its result."""

        def answer() -> T:
            self._wake()
            return question(self._loop)

        return self._answer(answer)

    def sleep(self) -> None:
        """Free the engine until the next call, which loads it again.

        Raises:
            RuntimeError: a call has not ended.
        """
        self._answer(self._sleep)

    @property
    def engine(self) -> Engine:
        """The engine, in its thread or until it sleeps."""
        assert self._engine is not None
        return self._engine

    @property
    def is_sleeping(self) -> bool:
        return self._engine is None

    def _answer(self, question: Callable[[], T]) -> T:
        answer: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                answer.put((question(), None))
            except BaseException as error:
                answer.put((None, error))

        self._post(run)
        result, error = answer.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def check_usable(self) -> None:
        """Raise `RuntimeError` if the engine is closed, or this process is a fork."""
        self._check_process()
        if self._stopping:
            raise RuntimeError("this LLM is closed")

    def close(self) -> None:
        """Fail the calls that wait, free the engine, and end the thread; safe to call twice."""
        if os.getpid() != self._process:
            return  # the engine belongs to the parent
        self._stop()
        with self._lock:
            if self._loading:  # again, which may take minutes
                interrupt(self._thread)
        if threading.current_thread() is not self._thread:  # the garbage collector may run there
            self._thread.join()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this LLM was loaded in process {self._process}; process {os.getpid()} is a fork "
                "of it, in which the engine's threads do not exist. Load the LLM after the fork, "
                'or start processes with the "spawn" method.'
            )

    def _post(self, work: Callable[[], None]) -> None:
        self._check_process()  # before the lock, which a thread of the parent may have held
        with self._lock:
            self.check_usable()
            self._posted.append(work)
        self._woken.set()

    def _stop(self) -> None:
        """Let the thread end after it has processed what was posted."""
        with self._lock:
            self._stopping = True
        self._woken.set()

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in the thread, which may be loading a model, and wait for it."""
        self._stop()
        interrupt(self._thread)
        self._thread.join()

    # -- in the engine's thread ------------------------------------------------------------------

    def _main(self, loaded: SimpleQueue[BaseException | None]) -> None:
        try:
            self._wake()
        except BaseException as error:
            loaded.put(error)
            return
        self._processor = OutputProcessor(self.engine.tokenizer)
        self._limits = self.engine.resolved.scheduler
        loaded.put(None)
        try:
            self._run()
        except KeyboardInterrupt:
            pass  # sent by `_interrupt` when loading had just ended
        finally:
            self._stopping = True
            for call in self._calls:
                call.updates.put(CallUpdate(error=RuntimeError("this LLM was closed")))
            if self._engine is not None:
                self._loop.close()

    def _wake(self) -> None:
        """Load the engine, unless it is loaded."""
        if self._engine is not None:
            return
        with self._lock:
            self.check_usable()
            self._loading = True
        try:
            self._engine = self._load(self._resolved)
        finally:
            with self._lock:
                self._loading = False

    def _sleep(self) -> None:
        if self._calls:
            raise RuntimeError(f"an LLM cannot sleep while it has calls ({len(self._calls)})")
        if self._engine is not None:
            self._resolved = self._engine.resolved  # with the adapters of now
            self._loop.close()
            self._engine = None
            gc.collect()

    @property
    def _loop(self) -> EngineLoop:
        return self.engine.loop

    def _run(self) -> None:
        while True:
            self._woken.clear()
            while self._posted:
                self._posted.popleft()()
            if self._stopping and not self._posted:
                return
            try:
                busy = self._engine is not None and self._advance()
            except Exception as error:  # of the engine itself, not of one request
                self._fail(error)
                busy = False  # until the next call, as it may fail every time
            if not busy:
                asleep = self._engine is None
                self._woken.wait(None if asleep else self._loop.look_at_memory())

    def _advance(self) -> bool:
        """Run one step. Returns whether there may be more to do."""
        self._send()
        if not self._loop.has_work:
            return False
        self._loop.core.scheduler.more_expected = any(call.unsent for call in self._calls)
        deltas = self._loop.poll(_POLL_SECONDS, self._woken.wait)  # posted work ends the sleep
        processed = self._processor.process(deltas)
        for request_id, index, reason, error in processed.to_end:
            self._loop.end(request_id, index, reason, error)
        texts: dict[str, list[TextDelta]] = {}
        for delta in processed.deltas:
            texts.setdefault(delta.request_id, []).append(delta)
        for output in processed.finished:
            call = self._owner.pop(output.request_id)
            call.sent.discard(output.request_id)
            if not call.sent and not call.unsent:
                self._calls.remove(call)
            call.updates.put(CallUpdate(tuple(texts.pop(output.request_id, ())), output))
        for request_id, some in texts.items():
            self._owner[request_id].updates.put(CallUpdate(tuple(some)))
        return True

    def _send(self) -> None:
        """Add requests while the queue has room, one of each call in turn."""
        while self._unsent:
            call = self._unsent[0]
            if not call.unsent:
                self._unsent.popleft()
                continue
            request, prompt = call.unsent[0]
            if not self._has_room(request):
                return
            self._unsent.rotate(-1)
            call.unsent.popleft()
            call.sent.add(request.request_id)
            self._owner[request.request_id] = call
            try:
                self._processor.add(request, prompt, streaming=call.streaming)
                self._loop.add(request)
            except Exception as error:
                self._end(call)
                call.updates.put(CallUpdate(error=error))

    def _has_room(self, request: EngineRequest) -> bool:
        """Return whether the queue has room now: long batches must stay within its limits."""
        waiting, n = self._loop.core.scheduler.waiting, request.params.n
        count, tokens = self._loop.num_building()
        count += len(waiting)
        if not count:
            return True  # it is refused later if it can never fit
        if count + n > min(LOOKAHEAD, self._limits.max_queued_requests):
            return False
        tokens += waiting.num_tokens + n * len(request.prompt_token_ids)
        return tokens <= self._limits.max_queued_tokens

    def _begin(self, call: Call) -> None:
        self._calls.append(call)  # so that it gets an error if this is closed during the load
        try:
            self._wake()
        except Exception as error:
            self._calls.remove(call)
            call.updates.put(CallUpdate(error=error))
            return
        if self._loop.lost:
            reason = f"{self._loop.lost}: close this LLM and make a new one"
            self._calls.remove(call)
            call.updates.put(CallUpdate(error=GroupLost("engine", reason)))
            return
        self._unsent.append(call)

    def _end(self, call: Call) -> None:
        call.unsent.clear()
        while call.sent:
            request_id = call.sent.pop()
            del self._owner[request_id]
            self._processor.discard(request_id)
            self._loop.end(request_id, None, FinishReason.ABORT)
        if call in self._calls:
            self._calls.remove(call)

    def _fail(self, error: Exception) -> None:
        """End all calls."""
        for call in self._calls[:]:
            failure = RuntimeError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            try:
                self._end(call)
            finally:
                call.updates.put(CallUpdate(error=failure))
