"""The engine's side of the link: the step loop behind a socket.

Between two steps the host processes the frames received, without waiting; after a step it sends the
deltas in one frame, or buffers them briefly. An idle engine waits on the socket. No frame can end
the loop: an error of one request ends only that request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvik.core.block_pool import ContentLog
from kvik.core.plan import SchedulerOutput
from kvik.core.routing import ReplicaReport
from kvik.core.scheduler import Scheduler
from kvik.core.types import FinishReason, RequestDelta, last_deltas
from kvik.engine.live import LiveCollector
from kvik.engine.loop import EngineLoop, LoopObserver
from kvik.engine.memory_watch import LOOK_SECONDS
from kvik.engine.wire import (
    Add,
    Credit,
    End,
    HandOver,
    HostSocket,
    Lost,
    Query,
    Ready,
    Reply,
    Report,
    StepLimit,
    Unusable,
    WireError,
    encode,
    engine_request,
    frame,
    split_logprobs,
    stepped,
    to_engine,
)
from kvik.errors import CapacityError, GroupLost, KvikError, ParamError, UnavailableError

# A buffer for tokens, so that frames are fewer and larger.
#
# A server spends more time on an event of a stream than on a token, and if it has no separate core,
# it delays the engine's step. The first and last event of a stream are sent at once; tokens in
# between are merged, for longer the more streams there are.

EVENTS_PER_SECOND = 640  # total of all streams; with 32 streams or more, at least 20 per stream
MAX_DELAY = 0.05  # seconds
LONG_STEP = 2  # the buffer is sent before a step with this many times the previous step's tokens


class DeltaBuffer(LoopObserver):
    """Merges the deltas of each completion until they are sent.

    It observes the loop because it must send before a long step.

    Args:
        send: takes merged deltas, one for each completion.
    """

    def __init__(self, send: Callable[[list[RequestDelta]], None]) -> None:
        self._send = send
        self._deltas: dict[tuple[str, int], RequestDelta] = {}
        self._released = float("-inf")
        self._step_tokens = 0

    def take(self, deltas: Iterable[RequestDelta], now: float) -> list[RequestDelta]:
        """Add the deltas of a step.

        Returns:
            Deltas to send now: of completions that begin or end, or all if the last release was
            long enough ago.
        """
        urgent: dict[tuple[str, int], None] = {}
        for delta in deltas:
            key = (delta.request_id, delta.index)
            earlier = self._deltas.get(key)
            if earlier is None:
                self._deltas[key] = delta
            else:
                _join(earlier, delta)
            if delta.finish_reason is not None or delta.prompt is not None:
                urgent[key] = None
        delay = min(MAX_DELAY, len(self._deltas) / EVENTS_PER_SECOND)
        if self._deltas and now - self._released >= delay:
            return self.release(now)
        return [self._deltas.pop(key) for key in urgent]

    def release(self, now: float) -> list[RequestDelta]:
        """Remove and return all deltas."""
        deltas, self._deltas = self._deltas, {}
        self._released = now
        return list(deltas.values())

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        tokens = 0 if plan is None else plan.num_tokens
        if self._deltas and tokens > LONG_STEP * self._step_tokens:
            self._send(self.release(now))
        self._step_tokens = tokens


def _join(delta: RequestDelta, later: RequestDelta) -> None:
    """Add a later delta to `delta`. Its lists are shared, so they are replaced, not extended.
    Before a first token only deltas with log probabilities of the prompt come."""
    delta.token_ids = delta.token_ids + later.token_ids
    if later.prompt_logprobs is not None:
        delta.prompt_logprobs = (delta.prompt_logprobs or []) + later.prompt_logprobs
    delta.prompt = delta.prompt or later.prompt
    if later.logprobs is not None:
        delta.logprobs = (
            later.logprobs if delta.logprobs is None else delta.logprobs + later.logprobs
        )
    if later.finish_reason is not None:
        delta.finish_reason, delta.stop_reason = later.finish_reason, later.stop_reason
        delta.error, delta.report, delta.embedding = later.error, later.report, later.embedding
        delta.refused, delta.complete, delta.page_source = (
            later.refused,
            later.complete,
            later.page_source,
        )
        delta.handed = later.handed


# How long a step may take before the engine counts as hung, based on previous steps of its size.

MIN_LIMIT = 30.0  # seconds: other programs on the machine may delay any step
LIMIT_TIMES = 20.0  # times the slowest recent step of about the same size


def step_limit(slowest: float) -> float:
    """Return the seconds that a step may take, given the slowest of its size: 30 times a power of
    two, so that the limit changes rarely."""
    limit = MIN_LIMIT
    while limit < LIMIT_TIMES * slowest:
        limit *= 2
    return limit


class StepWatch(LoopObserver):
    """Announces how long the steps in flight may take, whenever that changes.

    Args:
        announce: takes seconds.
    """

    def __init__(self, scheduler: Scheduler, announce: Callable[[float], None]) -> None:
        self._scheduler = scheduler
        self._announce = announce
        self._announced: float | None = None

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        if plan is None:
            return
        largest = max(step.num_tokens for step in self._scheduler.in_flight)
        slowest = self._scheduler.clock.at_most(largest)
        if slowest is None:
            return
        limit = step_limit(slowest)
        if limit != self._announced:
            self._announced = limit
            self._announce(limit)


# Reports to a router of several engines.

REPORT_SECONDS = 0.02  # between reports while steps are computed
SERVED_SECONDS = 0.5  # between reports that include the service of tenants


class Reporter:
    """Makes reports on a scheduler: the contents of its prefix cache and memory tier, and how busy
    it is."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        groups = scheduler.kv.groups
        # Layers without a window keep all blocks of a prefix.
        unwindowed = (g for g, group in enumerate(groups) if group.spec.window is None)
        self._log = ContentLog(next(unwindowed, 0))
        self._reported_at = self._served_at = float("-inf")
        self.restart()

    def restart(self) -> None:
        """Report everything again."""
        self._scheduler.log_contents(self._log)
        self._reported_at = float("-inf")

    def next_report(self, now: float, *, idle: bool) -> ReplicaReport | None:
        """Return the next report; None: it is too early, or there is nothing to report.

        Args:
            idle: no step follows soon.
        """
        if now - self._reported_at < REPORT_SECONDS and not idle:
            return None
        scheduler, served = self._scheduler, dict[str, int]()
        if now - self._served_at >= SERVED_SECONDS:
            self._served_at = now
            served = scheduler.shares.take_service(scheduler.running)
        changes = self._log.take()
        if changes is None and not served and not idle:
            return None
        self._reported_at = now
        return ReplicaReport(
            changes, scheduler.kv.usage, scheduler.clock.prefill_tokens_per_second, served
        )


log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5  # between messages while there is work and no delta
MAX_FAILED_STEPS = 3
_NOTHING = msgspec.Raw(encode(None))


class EngineHost:
    """Serves the one client at the other end of a socket."""

    def __init__(self, loop: EngineLoop, socket: HostSocket, *, reports: bool = False) -> None:
        """For `reports` see `EngineStart`."""
        self._loop = loop
        self._socket = socket
        self._live = LiveCollector(loop.core)
        scheduler = loop.core.scheduler
        loop.watch(StepWatch(scheduler, lambda seconds: socket.send(frame(StepLimit(seconds)))))
        self._buffer = DeltaBuffer(lambda deltas: self._send(deltas, False))
        loop.watch(self._buffer)
        self._failed: list[RequestDelta] = []  # last deltas of requests that the core does not know
        self._idle: float | None = None  # seconds until there is something to do; None: unlimited
        self._last_sent = loop.clock()
        self._questions: Mapping[str, Callable[[Query], object]] = {
            "stats": lambda query: loop.stats(),
            "live": lambda query: self._live.view(loop.clock(), loop.stats()),
            "reset_prefix_cache": lambda query: loop.reset_prefix_cache(),
            "report_all": lambda query: self._report_all(),
            "set_adapters": lambda query: loop.set_adapters(query.adapters),
        }
        self._reporter = Reporter(scheduler) if reports else None

    def run(self) -> None:
        """Serve until the client closes the connection, or no further step can be computed.

        Raises:
            Exception: the engine as a whole failed.
        """
        try:
            self._loop.executor.prepare_grammars()  # later it would delay more requests
            self._socket.send(frame(Ready()))
            while not self._loop.lost:
                timeout = 0.0 if self._loop.idle_step() else self._idle
                if timeout is None:
                    self._loop.look_at_memory()
                bodies = self._socket.receive(LOOK_SECONDS if timeout is None else timeout)
                if timeout is None and not bodies:
                    continue  # nothing arrived: there is no step to compute
                for body in bodies:
                    self._take(body)
                self._step()
            log.error("%s", self._loop.lost)
            error = f"{GroupLost.__name__}: {self._loop.lost}"
            self._socket.send(frame(Lost(error, self._loop.waiting_ids)))
        except EOFError:
            log.info("the client has closed the connection")
        except WireError:
            log.exception("the client sent an invalid message")

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
        self._idle = min(idle, BEAT_SECONDS) if idle else idle
        # The client decides which of the requests lost with the engine are sent again.
        ready = self._buffer.take((delta for delta in deltas if not delta.resendable), now)
        if idle != 0.0 or loop.lost:
            ready += self._buffer.release(now)
        if ready or (loop.has_work and now - self._last_sent >= BEAT_SECONDS):
            self._send(ready, waits)
        if self._reporter is not None:
            self._report(now, idle=idle is None)
        if loop.failed_in_a_row >= MAX_FAILED_STEPS:  # a lost device does not recover
            raise RuntimeError(f"{loop.failed_in_a_row} steps in a row could not be computed")

    def _report(self, now: float, *, idle: bool) -> None:
        assert self._reporter is not None
        report = self._reporter.next_report(now, idle=idle)
        if report is not None:
            self._socket.send(frame(Report(report)))

    def _report_all(self) -> None:
        if self._reporter is not None:
            self._reporter.restart()
            self._report(self._loop.clock(), idle=False)

    # -- frames in -------------------------------------------------------------------------------

    def _take(self, body: bytes) -> None:
        try:
            message = to_engine.decode(body)
        except Exception as error:
            log.warning("an invalid frame: %s", error)
            return
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, End):
            self._end(message.request_id, message.index, message.reason, message.error)
        elif isinstance(message, HandOver):
            self._loop.hand_over(message.request_id)
        elif isinstance(message, Query):
            self._answer(message)
        elif isinstance(message, Credit):
            for tenant, service in message.served.items():
                self._loop.core.scheduler.shares.credit(tenant, service)

    def _add(self, message: Add) -> None:
        try:
            request = engine_request.decode(message.request)
            if (request.request_id, request.params.n) != (message.request_id, message.n):
                raise WireError("a request that is not the one announced")
            self._loop.add(request)
        except KvikError as error:  # nothing was added
            refused = error.field if isinstance(error, CapacityError) else None
            self._fail(message, error.message, refused)
        except Exception as error:
            self._end(message.request_id, None, FinishReason.ERROR, _message(error))
            self._fail(message, _message(error), None)

    def _fail(self, message: Add, error: str, refused: str | None) -> None:
        now = self._loop.clock()
        self._failed += last_deltas(
            message.request_id, range(message.n), now, error, refused=refused
        )

    def _end(
        self, request_id: str, index: int | None, reason: FinishReason, error: str | None
    ) -> None:
        try:
            self._loop.end(request_id, index, reason, error)
        except Exception:
            log.exception("a request could not be ended")

    def _answer(self, message: Query) -> None:
        try:
            body = msgspec.Raw(encode(self._questions[message.question](message)))
            answer = Reply(message.ticket, body)
        except ParamError as error:
            answer = Reply(message.ticket, _NOTHING, error.message, error.field)
        except UnavailableError as error:
            answer = Reply(message.ticket, _NOTHING, error.message)
        except Exception as error:
            answer = Reply(message.ticket, _NOTHING, _message(error))
        self._socket.send(frame(answer))

    # -- frames out ------------------------------------------------------------------------------

    def _send(self, deltas: Sequence[RequestDelta], waits: bool) -> None:
        self._last_sent = self._loop.clock()
        plans = self._loop.core.scheduler.num_plans
        if any(delta.prompt_logprobs for delta in deltas):
            for delta in deltas:
                for part in split_logprobs(delta):
                    self._socket.send(self._encoded_alone(plans, waits, part))
            return
        try:
            data = frame(stepped(plans, waits, deltas))
        except Exception:
            data = b"".join(self._encoded_alone(plans, waits, delta) for delta in deltas)
        self._socket.send(data)

    def _encoded_alone(self, plans: int, waits: bool, delta: RequestDelta) -> bytes:
        try:
            return frame(stepped(plans, waits, [delta]))
        except Exception as error:
            if delta.finish_reason is None:
                self._end(delta.request_id, delta.index, FinishReason.ERROR, _message(error))
            now = self._loop.clock()
            last = last_deltas(delta.request_id, [delta.index], now, _message(error))
            return frame(stepped(plans, waits, last))


def host_engine(load: Callable[[], EngineLoop], line: HostSocket, *, reports: bool) -> bool:
    """Load an engine and serve the client at the other end of a socket until the client closes it.

    Args:
        reports: see `EngineStart`.

    Returns:
        Whether the client closed it. If not, the engine could not be loaded or was lost, and the
        client knows why.

    Raises:
        EOFError: the client closed the connection while the engine was being loaded.
        Exception: the engine as a whole failed.
    """
    try:
        loop = load()
    except KvikError as error:
        line.send(frame(Unusable(error.field, error.message)))
        return False
    try:
        EngineHost(loop, line, reports=reports).run()
        return not loop.lost
    finally:
        loop.close()


def _message(error: Exception) -> str:
    """Return the error as text that can be encoded, even if it quotes invalid Unicode."""
    return f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
