"""The HTTP process's side of the link: the client of an engine in another process.

Nothing here blocks. Writes go into a buffer that the socket drains; everything readable is read at
once, and all its deltas reach the sink in one call, so that a busy loop gets fewer, larger calls.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec

from kvik.config.config import ResolvedConfig
from kvik.core.routing import ReplicaReport
from kvik.core.types import EngineRequest, FinishReason, RequestDelta, RequestReport
from kvik.engine.core import check_request
from kvik.engine.live import LiveView, ReplicaView
from kvik.engine.stats import EngineStats, counters_of, sum_stats
from kvik.engine.wire import (
    Add,
    ClientSocket,
    Credit,
    End,
    EngineStart,
    FromEngine,
    HandOver,
    Lost,
    Query,
    Ready,
    Reply,
    Report,
    StepLimit,
    Stepped,
    encode,
    frame,
)
from kvik.errors import KvikError, ParamError, UnavailableError

MAX_SENDS = 2  # per request: one that crashes its engine can crash one more, but no others
MAX_UNSENT = 64 << 20  # bytes that the engine has not read; beyond, requests are refused
ANSWER_SECONDS = 1.0

log = logging.getLogger(__name__)

T = TypeVar("T")


Sink = Callable[[list[RequestDelta]], None]  # called in the event loop, once for many deltas


def _ignore(report: ReplicaReport) -> None:
    """Ignore a report: there is no router."""


def _nothing() -> None:
    """Do nothing: there is no router."""


class EngineState(StrEnum):
    """Whether the engine can take requests, and if not, why."""

    STARTING = "starting"  # the model is being loaded
    READY = "ready"
    STALLED = "stalled"  # it has work but makes no progress
    RESTARTING = "restarting"  # it crashed, and is being loaded again
    FAILED = "failed"  # it cannot be started, or crashes repeatedly
    CLOSED = "closed"


class EngineSource(Protocol):
    """Connects an engine to a client, and the next engine when one is lost."""

    def start(self, client: RemoteClient) -> None:
        """Connect an engine soon, by `client.connect`."""
        ...

    def lost(self, reason: str, *, for_good: bool) -> None:
        """Note that the engine is lost, which the client already knows.

        Args:
            for_good: the engine reported that it cannot be loaded.
        """
        ...

    async def close(self) -> None:
        """End the engine; returns when its process has ended."""
        ...


class SentRequest:
    """A request whose last delta has not come.

    Args:
        frame: the message to the engine.

    Attributes:
        indexes: siblings whose last delta has not come.
        begun: some of its output was delivered.
        ended: the caller ended it, or one of its siblings.
    """

    def __init__(self, request: EngineRequest, frame: bytes, arrival: float) -> None:
        self.request_id = request.request_id
        self.n = request.params.n
        self.deadline = request.deadline
        self.indexes = {handover.index for handover in request.resumed} or set(range(self.n))
        self.frame = frame
        self.arrival = arrival
        self.sends = 1
        self.begun = False
        self.ended = False

    @property
    def may_be_sent_again(self) -> bool:
        """Whether it may be sent to the next engine without delivering any output twice."""
        return not self.begun and not self.ended and self.sends < MAX_SENDS

    def last_deltas(
        self, indexes: Iterable[int], now: float, reason: FinishReason, error: str | None
    ) -> list[RequestDelta]:
        """Return the last delta of each of these siblings."""
        report = RequestReport(self.arrival, None, None, now, 0, 0)
        again = reason is FinishReason.ERROR and self.sends < MAX_SENDS
        return [
            RequestDelta(
                self.request_id, index, [], reason, error=error, report=report, resendable=again
            )
            for index in sorted(indexes)
        ]


class ResendQueue:
    """Requests that wait for the next engine, each until its deadline.

    Args:
        clock: of the deadlines.
        give: takes last deltas; called from the event loop, never from within a method.
    """

    def __init__(
        self, clock: Callable[[], float], give: Callable[[list[RequestDelta]], None]
    ) -> None:
        self._clock = clock
        self._give = give
        self._requests: dict[str, SentRequest] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: SentRequest) -> None:
        """Keep a request for the next engine."""
        self._requests[request.request_id] = request
        if request.deadline is not None:
            seconds = max(0.0, request.deadline - self._clock())
            arguments = (request.request_id, None, FinishReason.DEADLINE, None)
            self._timers[request.request_id] = asyncio.get_running_loop().call_later(
                seconds, self.end, *arguments
            )

    def end(
        self, request_id: str, index: int | None, reason: FinishReason, error: str | None
    ) -> None:
        """End a request that waits, or one of its siblings; its last delta comes soon."""
        request = self._requests[request_id]
        ended = request.indexes & ({index} if index is not None else request.indexes)
        request.indexes -= ended
        if not request.indexes:
            del self._requests[request_id]
            self._stop_timer(request_id)
        deltas = request.last_deltas(ended, self._clock(), reason, error)
        asyncio.get_running_loop().call_soon(self._give, deltas)

    def take(self) -> list[SentRequest]:
        """Remove and return all requests."""
        requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            self._stop_timer(request.request_id)
        return requests

    def _stop_timer(self, request_id: str) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()


class EngineClient(ABC):
    """The interface of a server to its engine, or to several engines for one model: requests go in,
    and deltas come out at the sinks.

    Args:
        config: of every engine.
        clock: of the engines.
    """

    def __init__(self, config: ResolvedConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self._clock = clock
        self._sinks: list[Sink] = []
        self._changed = asyncio.Event()  # the state
        self._unfinished: Mapping[str, SentRequest] = {}  # in an engine
        self._waiting = ResendQueue(clock, self._give)

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """Whether an engine can take requests."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why no engine is ready, as a message for users; "" if one is."""

    @property
    @abstractmethod
    def num_starts(self) -> int:
        """How often an engine became ready; more than once for each: it was restarted."""

    @abstractmethod
    def start(self, sink: Sink) -> None:
        """Begin to start all engines; call this once, in the event loop."""

    def add_sink(self, sink: Sink) -> None:
        """Hand all deltas to this sink too; it must ignore requests that it does not know."""
        self._sinks.append(sink)

    async def ready(self) -> None:
        """Wait until an engine takes requests.

        Raises:
            UnavailableError: none ever will.
        """
        while (state := self.state) is not EngineState.READY:
            if state in (EngineState.FAILED, EngineState.CLOSED):
                raise UnavailableError("engine", self.reason)
            self._changed.clear()
            await self._changed.wait()

    def check(self, request: EngineRequest) -> None:
        """Raise `ParamError` or `CapacityError` if the request can never be served."""
        self._check_id(request)
        check_request(self.config, request)

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Send a request that passed `check`.

        Raises:
            ParamError: its id is in use, or it cannot be encoded.
            UnavailableError: no engine takes it.
        """

    @abstractmethod
    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        """End a request, or one of its siblings; its last delta comes soon. Unknown ids are already
        gone."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Return current statistics, or the last known ones of an engine that does not answer
        within a second. Counters include those of lost engines, as last known."""

    @abstractmethod
    async def live(self) -> LiveView:
        """Return the current state of requests, blocks and steps.

        Raises:
            UnavailableError: no engine answers within a second.
        """

    @abstractmethod
    async def replicas(self) -> tuple[ReplicaView, ...]:
        """Return the state of each of several engines; (): there is only one."""

    @abstractmethod
    def drain_replica(self, replica: int, *, drain: bool) -> int:
        """Stop (or resume) sending requests to a replica. Returns how many it still has.

        Raises:
            ParamError: there is no such replica.
        """

    @property
    def drained(self) -> bool:
        """Whether requests are refused because all engines are drained."""
        return False

    @abstractmethod
    def hand_over(self, request_id: str) -> None:
        """Let the engine of another server continue a request, if it can be moved: its last delta
        holds the `Handover`."""

    @abstractmethod
    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, pinned ones included; requests continue. Returns the number
        of block contents that were forgotten. Raises as `live`."""

    @abstractmethod
    async def close(self) -> None:
        """End all engines, and their requests with an error."""

    def _check_id(self, request: EngineRequest) -> None:
        if request.request_id in self._unfinished or request.request_id in self._waiting:
            raise ParamError("request_id", f"{request.request_id!r} is already being served")

    def _give(self, deltas: list[RequestDelta]) -> None:
        """Hand deltas to all sinks."""
        for sink in self._sinks if deltas else ():
            try:
                sink(deltas)
            except Exception:  # requests of other sinks continue
                log.exception("deltas could not be delivered")


class RemoteClient(EngineClient):
    """Takes requests and hands their deltas to its sinks. No method blocks.

    Every request added ends with exactly one last delta for each sibling, whatever happens to the
    engine. The client outlives its engines: when one is lost, the source connects the next.
    Requests of which nothing was delivered are sent again, once (more often if the lost engine
    reported that it had not started them); all others end with `FinishReason.ERROR`. A full queue
    also refuses a request with such a delta; its `RequestDelta.refused` names the limit.

    Args:
        config: of every engine.
        source: connects engines.
        name: of one of several engines; errors begin with it. "": it is the only one. With several,
            lost requests may go to another engine, so they do not wait for the next one here.

    Attributes:
        signs_of_life: counter that is 0 until an engine was ready, and grows while the engine makes
            progress or has a reason to wait.
        step_limit: seconds that the steps in flight may take; None: unknown.
    """

    state = EngineState.STARTING
    reason = "the engine has not been started"
    num_starts = 0

    def __init__(self, config: ResolvedConfig, source: EngineSource, name: str = "") -> None:
        # The engine's clock is equal, as both count from the start of the machine.
        super().__init__(config, time.monotonic)
        self.source = source
        self.name = name
        self._unfinished: dict[str, SentRequest] = {}
        self._reported: Callable[[ReplicaReport], None] = _ignore
        self._state_changed: Callable[[], None] = _nothing
        self._queries: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._num_asked = 0
        self._new = EngineStats(0, 0, 0, 0.0, config.cache.num_blocks, 0, 0, 0, 0, 0, 0, 0)
        self._stats = self._new
        self._ended: list[EngineStats] = []  # counters of all engines that have ended, as one
        self._socket: ClientSocket | None = None
        self._steps = 0
        self.signs_of_life = 0
        self.step_limit: float | None = None

    # -- for the server --------------------------------------------------------------------------

    def start(self, sink: Sink) -> None:
        self.add_sink(sink)
        self.reason = "the engine is being started"
        self.source.start(self)

    def watch(
        self, reported: Callable[[ReplicaReport], None], state_changed: Callable[[], None]
    ) -> None:
        """Set callbacks for reports and for changes of the state. Neither may raise."""
        self._reported, self._state_changed = reported, state_changed

    def add(self, request: EngineRequest) -> None:
        sock = self._socket
        if sock is None or self.state is not EngineState.READY:
            raise UnavailableError("engine", self.reason)
        self._check_id(request)
        n = request.params.n
        try:
            data = frame(Add(request.request_id, n, msgspec.Raw(encode(request))))
        except Exception as error:
            raise ParamError("request", f"cannot be sent to the engine: {error}") from None
        if sock.num_unsent > MAX_UNSENT:
            raise UnavailableError("engine", "it does not keep up with the requests")
        self._unfinished[request.request_id] = SentRequest(request, data, self._clock())
        sock.send(data)

    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        if error is not None:
            error = error.encode("utf-8", "replace").decode()
        if request_id in self._waiting:
            self._waiting.end(request_id, index, reason, error)
        if self._socket is None or request_id not in self._unfinished:
            return
        self._unfinished[request_id].ended = True
        self._socket.send(frame(End(request_id, index, reason, error)))

    async def stats(self) -> EngineStats:
        ended_engines = self._ended
        with suppress(UnavailableError):
            stats = await self._query("stats", EngineStats)
            if ended_engines is self._ended:  # else the engine ended right after its answer
                self._stats = stats
        return sum_stats([self._stats, *self._ended])

    async def live(self) -> LiveView:
        return await self._query("live", LiveView)

    async def replicas(self) -> tuple[ReplicaView, ...]:
        return ()

    def drain_replica(self, replica: int, *, drain: bool) -> int:
        raise ParamError("replica", "cannot be drained alone: this server has one engine")

    def hand_over(self, request_id: str) -> None:
        if self._socket is not None and request_id in self._unfinished:
            self._socket.send(frame(HandOver(request_id)))

    def credit(self, served: dict[str, int]) -> None:
        """Send the engine the service that its tenants got from other engines."""
        if self._socket is not None and self.state is EngineState.READY:
            self._socket.send(frame(Credit(served)))

    async def report_all(self) -> None:
        """Request a full report. Raises as `live`."""
        await self._query("report_all", type(None))

    async def reset_prefix_cache(self) -> int:
        return await self._query("reset_prefix_cache", int)

    async def close(self) -> None:
        self.disconnect(EngineState.CLOSED, "the engine was closed")
        await self.source.close()

    # -- for the source --------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine works on."""
        return len(self._unfinished)

    def connect(self, sock: socket.socket, start: EngineStart | None) -> None:
        """Use the engine at the other end of the socket, which the client owns from now on.

        Args:
            start: first message, for an engine that does not know what to load.
        """
        self._steps = 0
        self.step_limit = None
        self._socket = ClientSocket(sock, self._take, self._lost)
        if start is not None:
            self._socket.send(frame(start))

    def disconnect(self, state: EngineState, reason: str) -> None:
        """Drop a lost engine, and end the requests that may not be sent to another one."""
        self.set_state(state, reason)
        self._ended = [sum_stats([counters_of(self._stats), *self._ended])]
        self._stats = self._new
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(UnavailableError("engine", reason))
        self._give(self._last_deltas(state, reason))

    def set_state(self, state: EngineState, reason: str) -> None:
        if self.state is not EngineState.CLOSED:
            self.state, self.reason = state, reason
            self._changed.set()
            self._state_changed()

    # -- inside ----------------------------------------------------------------------------------

    async def _query(self, question: str, kind: type[T]) -> T:
        if self._socket is None or self.state is not EngineState.READY:
            raise UnavailableError("engine", self.reason)
        ticket = self._num_asked
        self._num_asked += 1
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._queries[ticket] = answer
        try:
            self._socket.send(frame(Query(ticket, question)))
            async with asyncio.timeout(ANSWER_SECONDS):
                body = await answer
        except TimeoutError:
            raise UnavailableError("engine", "it does not answer in time") from None
        finally:
            self._queries.pop(ticket, None)
        return msgspec.msgpack.decode(body, type=kind)

    def _lost(self, reason: str, *, for_good: bool = False) -> None:
        # A model that was loaded before is loaded again.
        last = for_good and not self.signs_of_life
        self.disconnect(EngineState.FAILED if last else EngineState.RESTARTING, reason)
        self.source.lost(reason, for_good=for_good)

    def _take(self, messages: list[FromEngine]) -> None:
        """Process messages that were read together."""
        deltas: list[RequestDelta] = []
        lost: Lost | None = None
        for message in messages:
            if isinstance(message, Stepped):
                if message.steps != self._steps or message.waits:
                    self._steps = message.steps
                    self.signs_of_life += 1
                deltas += message.deltas()
            elif isinstance(message, Report):
                self._reported(message.report)
            elif isinstance(message, StepLimit):
                self.step_limit = message.seconds
            elif isinstance(message, Reply):
                self._answered(message)
            elif isinstance(message, Ready):
                self.set_state(EngineState.READY, "")
                self.signs_of_life += 1
                self.num_starts += 1
                self._send_again()
            elif isinstance(message, Lost):
                lost = message
            else:
                self._lost(str(KvikError(message.field, message.message)), for_good=True)
                return
        self._give([delta for delta in deltas if self._expected(delta)])
        if lost is not None:
            for request_id in lost.waiting:  # these cannot have caused it
                if request_id in self._unfinished:
                    self._unfinished[request_id].sends -= 1
            self._lost(lost.error)

    def _expected(self, delta: RequestDelta) -> bool:
        """Return whether the delta belongs to an unfinished request; a last delta finishes it."""
        unfinished = self._unfinished.get(delta.request_id)
        if unfinished is None or delta.index not in unfinished.indexes:
            return False
        unfinished.begun = True
        if delta.finish_reason is not None:
            unfinished.indexes.discard(delta.index)
            if not unfinished.indexes:
                del self._unfinished[delta.request_id]
        return True

    def _answered(self, message: Reply) -> None:
        answer = self._queries.pop(message.ticket, None)
        if answer is None or answer.done():
            return
        if message.error is not None:
            answer.set_exception(UnavailableError("engine", message.error))
        else:
            answer.set_result(message.body)

    def _send_again(self) -> None:
        """Send the requests that waited for this engine."""
        assert self._socket is not None
        for request in self._waiting.take():
            request.sends += 1
            self._unfinished[request.request_id] = request
            self._socket.send(request.frame)
            for index in set(range(request.n)) - request.indexes:
                self._socket.send(frame(End(request.request_id, index, FinishReason.ABORT, None)))

    def _last_deltas(self, state: EngineState, error: str) -> list[RequestDelta]:
        """Forget the requests that end with the engine, and return their last deltas.

        Args:
            state: the new state.
        """
        lost, self._unfinished = list(self._unfinished.values()), {}
        if self.name:
            error = f"{self.name}: {error}"
        elif state in (EngineState.FAILED, EngineState.CLOSED):  # there will be no other
            lost += self._waiting.take()
        else:
            for request in lost:
                if request.may_be_sent_again:
                    self._waiting.add(request)
            lost = [request for request in lost if not request.may_be_sent_again]
        now = self._clock()
        return [
            delta
            for request in lost
            for delta in request.last_deltas(request.indexes, now, FinishReason.ERROR, error)
        ]
