"""The engine's side of the wire: the step loop behind a socket.

Between two steps whatever has arrived is taken in, without waiting; after a step its deltas leave
in one frame, or are held for a moment. An idle engine waits on the socket. Nothing that a frame
says can end the loop: what fails for one request ends that request alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvik.config.errors import CapacityError, KvikError
from kvik.core.types import FinishReason, RequestDelta, RequestReport
from kvik.engine.held import Held
from kvik.engine.lines import HostLine
from kvik.engine.live import LiveCollector
from kvik.engine.loop import EngineLoop
from kvik.engine.step_limits import StepWatch
from kvik.engine.wire import (
    Add,
    Answer,
    Ask,
    End,
    Ready,
    StepLimit,
    WireError,
    cut,
    encode,
    engine_request,
    frame,
    stepped,
    to_engine,
)

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5  # between signs of life while there is work and nothing to tell
MAX_FAILED_STEPS = 3
_NOTHING = msgspec.Raw(encode(None))


class EngineHost:
    """Serves the one client at the other end of a line."""

    def __init__(self, loop: EngineLoop, line: HostLine) -> None:
        self._loop = loop
        self._line = line
        self._live = LiveCollector(loop.core)
        loop.watch(StepWatch(lambda seconds: line.send(frame(StepLimit(seconds)))))
        self._held = Held(lambda deltas: self._send(deltas, False))
        loop.watch(self._held)
        self._failed: list[RequestDelta] = []  # last deltas of requests that the core does not know
        self._patience: float | None = None  # how long there is nothing to do
        self._last_sent = loop.clock()
        self._questions: Mapping[str, Callable[[], object]] = {
            "stats": loop.stats,
            "live": lambda: self._live.view(loop.clock(), loop.stats()),
            "reset_prefix_cache": loop.reset_prefix_cache,
        }

    def run(self) -> None:
        """Until the client hangs up. Raises what goes wrong with the engine as a whole."""
        try:
            self._line.send(frame(Ready()))
            while True:
                patience = 0.0 if self._loop.rest() else self._patience
                for body in self._line.receive(patience):
                    self._take(body)
                self._step()
        except EOFError:
            log.info("the client has hung up")
        except WireError:
            log.exception("the client cannot be understood any more")

    def _step(self) -> None:
        loop = self._loop
        began = loop.clock()
        deltas = loop.step()
        now = loop.clock()
        self._live.step(began, now, deltas)
        if self._failed:
            deltas, self._failed = self._failed + deltas, []
        idle = loop.idle_seconds()
        waits = bool(idle)
        self._patience = min(idle, BEAT_SECONDS) if idle else idle
        ready = self._held.take(deltas, now)
        if idle != 0.0:
            ready += self._held.release(now)
        if ready or (loop.has_work and now - self._last_sent >= BEAT_SECONDS):
            self._send(ready, waits)
        if loop.failed_in_a_row >= MAX_FAILED_STEPS:  # a device that is lost does not come back
            raise RuntimeError(f"{loop.failed_in_a_row} steps in a row could not be computed")

    # -- frames in -------------------------------------------------------------------------------

    def _take(self, body: bytes) -> None:
        try:
            message = to_engine.decode(body)
        except Exception as error:
            log.warning("a frame that says nothing: %s", error)
            return
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, End):
            self._end(message.request_id, message.index, message.reason, message.error)
        elif isinstance(message, Ask):
            self._answer(message)

    def _add(self, message: Add) -> None:
        try:
            request = engine_request.decode(message.request)
            if (request.request_id, request.params.n) != (message.request_id, message.n):
                raise WireError("a request that is not the one announced")
            self._loop.add(request)
        except KvikError as error:  # nothing was taken in
            refused = error.field if isinstance(error, CapacityError) else None
            self._fail(message, error.message, refused)
        except Exception as error:
            self._end(message.request_id, None, FinishReason.ERROR, _told(error))
            self._fail(message, _told(error), None)

    def _fail(self, message: Add, error: str, refused: str | None) -> None:
        self._failed += [
            self._last_delta(message.request_id, index, error, refused)
            for index in range(message.n)
        ]

    def _end(
        self, request_id: str, index: int | None, reason: FinishReason, error: str | None
    ) -> None:
        try:
            self._loop.end(request_id, index, reason, error)
        except Exception:
            log.exception("a request could not be ended")

    def _answer(self, message: Ask) -> None:
        try:
            answer = Answer(
                message.ticket, msgspec.Raw(encode(self._questions[message.question]()))
            )
        except Exception as error:
            answer = Answer(message.ticket, _NOTHING, _told(error))
        self._line.send(frame(answer))

    # -- frames out ------------------------------------------------------------------------------

    def _send(self, deltas: Sequence[RequestDelta], waits: bool) -> None:
        self._last_sent = self._loop.clock()
        steps = self._loop.core.scheduler.counters.steps
        if any(delta.prompt_logprobs for delta in deltas):
            for delta in deltas:
                for piece in cut(delta):
                    self._line.send(self._encoded_alone(steps, waits, piece))
            return
        try:
            data = frame(stepped(steps, waits, deltas))
        except Exception:
            data = b"".join(self._encoded_alone(steps, waits, delta) for delta in deltas)
        self._line.send(data)

    def _encoded_alone(self, steps: int, waits: bool, delta: RequestDelta) -> bytes:
        try:
            return frame(stepped(steps, waits, [delta]))
        except Exception as error:
            if delta.finish_reason is None:
                self._end(delta.request_id, delta.index, FinishReason.ERROR, _told(error))
            last = self._last_delta(delta.request_id, delta.index, _told(error))
            return frame(stepped(steps, waits, [last]))

    def _last_delta(
        self, request_id: str, index: int, error: str, refused: str | None = None
    ) -> RequestDelta:
        """Of a request that failed where the core does not see it."""
        now = self._loop.clock()
        return RequestDelta(
            request_id,
            index,
            [],
            finish_reason=FinishReason.ERROR,
            error=error,
            report=RequestReport(now, None, None, now, 0, 0),
            refused=refused,
        )


def _told(error: Exception) -> str:
    """In words that can be encoded, whatever text the error is about."""
    return f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
