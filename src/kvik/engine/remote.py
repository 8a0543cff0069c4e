"""The link from the HTTP process to one engine in another process, or in a thread.

Nothing here blocks. Writes go into a buffer that the socket drains; everything readable is read at
once, and all its deltas reach the client in one call, so that a busy loop gets fewer, larger calls.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec

from kvik.config.config import ResolvedConfig
from kvik.core.routing import ReplicaReport
from kvik.core.types import EngineRequest, FinishReason, Handover, RequestDelta, RequestReport
from kvik.engine.stats import EngineStats, counters_of, sum_stats
from kvik.engine.wire import (
    Add,
    ClientSocket,
    EngineStart,
    FromEngine,
    Lost,
    Query,
    Ready,
    Reply,
    Report,
    StepLimit,
    Stepped,
    ToEngine,
    encode,
    frame,
)
from kvik.errors import KvikError, ParamError, UnavailableError
from kvik.spec.adapters import Adapter

MAX_SENDS = 2  # per request: one that crashes its engine can crash one more, but no others
MAX_UNSENT = 64 << 20  # bytes that the engine has not read; beyond, requests are refused
ANSWER_SECONDS = 1.0
LOAD_SECONDS = 600.0  # for an answer after loading adapters

T = TypeVar("T")


class EngineState(StrEnum):
    """Whether the engine can take requests, and if not, why."""

    STARTING = "starting"  # the model is being loaded
    READY = "ready"
    STALLED = "stalled"  # it has work but makes no progress
    RESTARTING = "restarting"  # it crashed, and is being loaded again
    ASLEEP = "asleep"  # it was ended to free its memory; a request starts it again
    FAILED = "failed"  # it cannot be started, or crashes repeatedly
    CLOSED = "closed"


class EngineSource(Protocol):
    """Connects an engine to a link, and the next engine when one is lost."""

    def start(self, link: EngineLink) -> None:
        """Connect an engine soon, by `link.connect`; after `close`, a new one."""
        ...

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Give the next engine these adapters."""
        ...

    def lost(self, reason: str, *, for_good: bool) -> None:
        """Note that the engine is lost, which the link already knows.

        Args:
            for_good: the engine reported that it cannot be loaded.
        """
        ...

    async def close(self) -> None:
        """End the engine; returns when its process has ended."""
        ...


class SentRequest:
    """A request whose last delta has not come."""

    def __init__(
        self, request: EngineRequest, hashes: list[bytes], arrival: float, adapter: str
    ) -> None:
        self.request = request
        self.adapter = adapter  # digest of the one it chose; another may have that name by now
        self.request_id = request.request_id
        self.n = request.params.n
        self.deadline = request.deadline
        # Siblings whose last delta has not come.
        self.indexes = {handover.index for handover in request.resumed} or set(range(self.n))
        self.hashes = hashes  # of the blocks of its prompt; empty if there is one engine
        self.arrival = arrival
        self.sends = 1
        self.begun = False  # some of its output was delivered
        # How the caller ended siblings; the engine was told.
        self.endings: dict[int, tuple[FinishReason, str | None]] = {}
        self.leaves = False  # another server continues it, not another engine
        # States of siblings that a draining engine handed over, until it did so for all.
        self.handed: list[Handover] = []

    @property
    def may_be_sent_again(self) -> bool:
        """Whether it may be sent to the next engine without delivering any output twice."""
        return not self.begun and not self.endings and self.sends < MAX_SENDS

    @property
    def unfinished(self) -> bool:
        """Whether a sibling has not ended, and the caller did not end it."""
        return not self.endings.keys() >= self.indexes

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


class LinkOwner(Protocol):
    """Gets what comes over a link. No method may raise."""

    def take(self, link: EngineLink, deltas: list[RequestDelta]) -> None:
        """Process deltas that were read together."""
        ...

    def reported(self, link: EngineLink, report: ReplicaReport) -> None:
        """Process a report of an engine that makes reports."""
        ...

    def state_changed(self, link: EngineLink) -> None:
        """Note that the link has another state."""
        ...

    def lost(self, link: EngineLink, reason: str, waiting: Collection[str]) -> None:
        """End the requests of the engine that was lost, or send them again.

        Args:
            waiting: ids of those that it had not started.
        """
        ...


class EngineLink:
    """Sends requests to an engine, and what comes back to its owner. No method blocks.

    A link outlives its engines: when one is lost, the source connects the next.

    Args:
        config: of the engine.
        source: connects engines.
        name: of one of several engines; "": it is the only one.
    """

    state = EngineState.STARTING
    reason = "the engine has not been started"
    num_starts = 0  # how often an engine became ready; more than once: it was restarted

    def __init__(
        self,
        config: ResolvedConfig,
        source: EngineSource,
        owner: LinkOwner,
        number: int,
        name: str,
    ) -> None:
        self.source = source
        self.number = number  # of the engine among several
        self.name = name
        # Those sent to the engine, by id, until their last delta; the owner removes them.
        self.requests: dict[str, SentRequest] = {}
        self._owner = owner
        self._queries: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._num_asked = 0
        self._new = EngineStats(num_blocks=config.cache.num_blocks)
        self._stats = self._new
        self._ended: list[EngineStats] = []  # counters of all engines that have ended, as one
        self._socket: ClientSocket | None = None
        self._plans = 0
        # Counter that is 0 until an engine was ready, and grows while the engine makes progress or
        # has a reason to wait.
        self.signs_of_life = 0
        # Seconds that the steps in flight may take; None: unknown.
        self.step_limit: float | None = None
        self.changing = False  # the engine loads adapters, and computes no step meanwhile

    # -- for the owner ---------------------------------------------------------------------------

    def start(self) -> None:
        self.set_state(EngineState.STARTING, "the engine is being started")
        self.source.start(self)

    def add(self, sent: SentRequest, *, again: bool = False) -> None:
        """Send a request.

        Args:
            again: it waited for this engine, which may have to read any number of them.

        Raises:
            ParamError: it cannot be encoded.
            UnavailableError: the engine is not ready, or does not keep up.
        """
        sock, request = self._socket, sent.request
        if sock is None or self.state is not EngineState.READY:
            raise UnavailableError("engine", self.reason)
        try:
            data = frame(Add(request.request_id, sent.n, msgspec.Raw(encode(request))))
        except Exception as error:
            raise ParamError("request", f"cannot be sent to the engine: {error}") from None
        if sock.num_unsent > MAX_UNSENT and not again:
            raise UnavailableError("engine", "it does not keep up with the requests")
        self.requests[request.request_id] = sent
        sock.send(data)

    def send(self, message: EngineStart | ToEngine) -> None:
        """Send a message, if there is an engine."""
        if self._socket is not None:
            self._socket.send(frame(message))

    async def query(self, question: str, kind: type[T]) -> T:
        """Return the answer to a question of `EngineHost`, which has this type.

        Raises:
            UnavailableError: the engine is not ready, or does not answer within a second.
        """
        return msgspec.msgpack.decode(await self._ask(question, ANSWER_SECONDS), type=kind)

    async def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Let the engine have these adapters, and no others.

        Raises:
            ParamError: the engine refuses one.
            UnavailableError: the engine is not ready, or does not answer in time.
        """
        self.changing = True
        try:
            await self._ask("set_adapters", LOAD_SECONDS, adapters)
        finally:
            self.changing = False

    async def _ask(
        self, question: str, seconds: float, adapters: tuple[Adapter, ...] = ()
    ) -> msgspec.Raw:
        if self._socket is None or self.state is not EngineState.READY:
            raise UnavailableError("engine", self.reason)
        ticket = self._num_asked
        self._num_asked += 1
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._queries[ticket] = answer
        try:
            self.send(Query(ticket, question, adapters))
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise UnavailableError("engine", "it does not answer in time") from None
        finally:
            self._queries.pop(ticket, None)

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        ended_engines = self._ended
        with suppress(UnavailableError):
            stats = await self.query("stats", EngineStats)
            if ended_engines is self._ended:  # else the engine ended right after its answer
                self._stats = stats
        return sum_stats([self._stats, *self._ended])

    async def close(self) -> None:
        """End the engine, and its requests with an error."""
        self.disconnect(EngineState.CLOSED, "the engine was closed")
        await self.source.close()

    # -- for the source --------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine works on."""
        return len(self.requests)

    def connect(self, sock: socket.socket, start: EngineStart | None) -> None:
        """Use the engine at the other end of the socket, which the link owns from now on.

        Args:
            start: first message, for an engine that does not know what to load.
        """
        self._plans = 0
        self.step_limit = None
        self._socket = ClientSocket(sock, self._take, self._lost)
        if start is not None:
            self.send(start)

    def disconnect(self, state: EngineState, reason: str, waiting: Collection[str] = ()) -> None:
        """Drop a lost engine; `waiting` is for `LinkOwner.lost`."""
        self.set_state(state, reason)
        self._ended = [sum_stats([counters_of(self._stats), *self._ended])]
        self._stats = self._new
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(UnavailableError("engine", reason))
        self._owner.lost(self, self.named(reason), waiting)

    def named(self, reason: str) -> str:
        """Return a reason with the name of the engine, if there are several."""
        return f"{self.name}: {reason}" if self.name else reason

    def set_state(self, state: EngineState, reason: str) -> None:
        if self.state is not EngineState.CLOSED:
            self.state, self.reason = state, reason
            self._owner.state_changed(self)

    # -- inside ----------------------------------------------------------------------------------

    def _lost(self, reason: str, *, for_good: bool = False, waiting: Collection[str] = ()) -> None:
        # A model that was loaded before is loaded again.
        last = for_good and not self.signs_of_life
        state = EngineState.FAILED if last else EngineState.RESTARTING
        self.disconnect(state, reason, waiting)
        self.source.lost(reason, for_good=for_good)

    def _take(self, messages: list[FromEngine]) -> None:
        """Process messages that were read together."""
        deltas: list[RequestDelta] = []
        lost: Lost | None = None
        for message in messages:
            if isinstance(message, Stepped):
                if message.plans != self._plans or message.waits:
                    self._plans = message.plans
                    self.signs_of_life += 1
                deltas += message.deltas()
            elif isinstance(message, Report):
                self._owner.reported(self, message.report)
            elif isinstance(message, StepLimit):
                self.step_limit = message.seconds
            elif isinstance(message, Reply):
                self._answered(message)
            elif isinstance(message, Ready):
                self.signs_of_life += 1
                self.num_starts += 1
                self.set_state(EngineState.READY, "")
            elif isinstance(message, Lost):
                lost = message
            else:
                self._lost(str(KvikError(message.field, message.message)), for_good=True)
                return
        self._owner.take(self, deltas)
        if lost is not None:
            self._lost(lost.error, waiting=lost.waiting)

    def _answered(self, message: Reply) -> None:
        answer = self._queries.pop(message.ticket, None)
        if answer is None or answer.done():
            return
        if message.field:
            answer.set_exception(ParamError(message.field, message.error or ""))
        elif message.error is not None:
            answer.set_exception(UnavailableError("engine", message.error))
        else:
            answer.set_result(message.body)
