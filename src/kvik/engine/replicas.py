"""Several engines behind the interface of one: requests are routed by what caches hold.

Each replica is a `RemoteClient` with a supervised process. If one crashes, its running requests end
with an error that names it; requests of which nothing was delivered are sent to another one, once.
Prompts are tokenised and hashed here, so hits are exact.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvik.config.config import ResolvedConfig
from kvik.core.block_pool import extend_hashes
from kvik.core.routing import ReplicaReport, ReplicaRouter
from kvik.core.types import EngineRequest, FinishReason, Handover, RequestDelta
from kvik.engine.live import LiveView, ReplicaView, merge_views
from kvik.engine.remote import EngineClient, EngineState, RemoteClient, SentRequest, Sink
from kvik.engine.stats import EngineStats, sum_stats
from kvik.errors import ParamError, UnavailableError

CREDIT_SECONDS = 0.5  # between messages on the service that tenants got from other replicas
MAX_HASHED = 1024  # blocks of a prompt: about a millisecond, and enough to distinguish replicas
# The overall state is the first of these that a replica has.
ORDER = (
    EngineState.READY,
    EngineState.STALLED,
    EngineState.RESTARTING,
    EngineState.STARTING,
    EngineState.FAILED,
    EngineState.CLOSED,
)


class RoutedRequest(SentRequest):
    """A request whose last delta has not come, and the replica that has it.

    Attributes:
        hashes: of the blocks of its prompt.
        replica: number; None: it waits for one that is ready.
        endings: how the caller ended siblings; the replica was told.
        leaves: another server continues it, not another replica.
        handed: states of siblings that a draining replica handed over, until it did so for all.
    """

    def __init__(self, request: EngineRequest, hashes: list[bytes], arrival: float) -> None:
        super().__init__(request, b"", arrival)
        self.request = request
        self.hashes = hashes
        self.replica: int | None = None
        self.endings: dict[int, tuple[FinishReason, str | None]] = {}
        self.leaves = False
        self.handed: list[Handover] = []

    @property
    def unfinished(self) -> bool:
        """Whether a sibling has not ended, and the caller did not end it."""
        return not self.endings.keys() >= self.indexes


class Replicas(EngineClient):
    """Takes requests and hands their deltas to its sinks, as a `RemoteClient` does.

    It is ready if at least one replica is. The server enforces limits of queues and rates, so they
    apply to all replicas together. Each engine counts the service that tenants got from the others,
    so shares are fair across them.

    Args:
        config: common to all replicas.
        clients: of the replicas, not started.
        clock: of the engines.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        clients: Sequence[RemoteClient],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, clock)
        self._unfinished: dict[str, RoutedRequest] = {}
        self.clients = tuple(clients)
        self._block_size = config.cache.block_size
        self._router = ReplicaRouter(
            [client.name for client in clients], self._block_size, config.scheduler.max_num_seqs
        )
        self._draining: set[int] = set()
        self._served = [Counter[str]() for _ in clients]  # since the last credit
        self._crediting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        for i, client in enumerate(clients):
            client.watch(partial(self._reported, i), partial(self._state_changed, i))

    # -- for the server --------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The best state that a replica has, by `ORDER`: READY if one is."""
        return min((client.state for client in self.clients), key=ORDER.index)

    @property
    def reason(self) -> str:
        if self.state is EngineState.READY:
            return ""
        return "; ".join(f"{client.name}: {client.reason}" for client in self.clients)

    @property
    def num_starts(self) -> int:
        return sum(client.num_starts for client in self.clients)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished) + len(self._waiting)

    def start(self, sink: Sink) -> None:
        self.add_sink(sink)
        self._crediting = asyncio.get_running_loop().create_task(self._credit())
        for i, client in enumerate(self.clients):
            client.start(partial(self._take, i))

    def add(self, request: EngineRequest) -> None:
        """Send a request to the replica with the lowest cost. See `EngineClient.add`."""
        self._check_id(request)
        self._send(RoutedRequest(request, self._hashes(request), self._clock()), set())

    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        if request_id in self._waiting:
            self._waiting.end(request_id, index, reason, error)
            return
        sent = self._unfinished.get(request_id)
        if sent is not None and sent.replica is not None:
            sent.ended = True
            for sibling in sent.indexes if index is None else (index,):
                sent.endings[sibling] = reason, error
            self.clients[sent.replica].end(request_id, index, reason, error)

    async def stats(self) -> EngineStats:
        """Return the statistics of all replicas, summed. See `EngineClient.stats`."""
        return sum_stats(await asyncio.gather(*(client.stats() for client in self.clients)))

    async def live(self) -> LiveView:
        """Return one view of all replicas that answer. See `EngineClient.live`."""
        views = [view for view in await self._views() if view is not None]
        if not views:
            raise UnavailableError("engine", self.reason or "no replica answers in time")
        return merge_views(views)

    async def replicas(self) -> tuple[ReplicaView, ...]:
        views = await self._views()
        return tuple(
            ReplicaView(
                i,
                client.state.value,
                client.reason,
                i in self._draining,
                client.num_starts,
                client.num_unfinished,
                None if view is None else view.stats,
                None if view is None else view.rates,
            )
            for i, (client, view) in enumerate(zip(self.clients, views, strict=True))
        )

    @property
    def drained(self) -> bool:
        return len(self._draining) == len(self.clients)

    def drain_replica(self, replica: int, *, drain: bool) -> int:
        if not 0 <= replica < len(self.clients):
            last = len(self.clients) - 1
            raise ParamError("replica", f"must be 0 to {last}, not {replica}")
        (self._draining.add if drain else self._draining.discard)(replica)
        self._state_changed(replica)
        if drain and self._router.choose((), 0, self._clock()) is not None:  # there is another one
            for request_id, sent in self._unfinished.items():
                if sent.replica == replica and sent.unfinished:
                    self.clients[replica].hand_over(request_id)
        return self.clients[replica].num_unfinished

    def hand_over(self, request_id: str) -> None:
        sent = self._unfinished.get(request_id)
        if sent is not None and sent.replica is not None and sent.unfinished:
            sent.leaves = True
            self.clients[sent.replica].hand_over(request_id)

    async def reset_prefix_cache(self) -> int:
        ready = [client for client in self.clients if client.state is EngineState.READY]
        if not ready:
            raise UnavailableError("engine", self.reason)
        return sum(await asyncio.gather(*(client.reset_prefix_cache() for client in ready)))

    async def close(self) -> None:
        self._closing = True
        if self._crediting is not None:
            self._crediting.cancel()
        for sent in self._waiting.take():
            self._fail(sent, "the engine was closed")
        await asyncio.gather(*(client.close() for client in self.clients))

    # -- inside ----------------------------------------------------------------------------------

    def _hashes(self, request: EngineRequest) -> list[bytes]:
        """Return the hashes of a prompt's blocks, as engines compute them."""
        cache, tokens = self.config.cache, request.prompt_token_ids
        hashes: list[bytes] = []
        if cache.enable_prefix_caching:
            blocks = min(len(tokens) // self._block_size, MAX_HASHED)
            salt = cache.salt + request.cache_salt
            extend_hashes(hashes, tokens, self._block_size, salt, blocks)
        return hashes

    def _send(self, sent: RoutedRequest, avoid: set[int]) -> None:
        """Send a request to the best replica that accepts it. Raises as `add`."""
        request, now = sent.request, self._clock()
        size = len(request.prompt_token_ids)
        while True:
            choice = self._router.choose(sent.hashes, size, now, avoid=avoid)
            if choice is None:
                raise UnavailableError("engine", self.reason or "no other replica is ready")
            try:
                self.clients[choice.replica].add(request)
            except UnavailableError:
                avoid = {*avoid, choice.replica}
                continue
            sent.replica = choice.replica
            self._unfinished[request.request_id] = sent
            self._router.sent(request.request_id, choice, sent.hashes, size, now)
            return

    def _take(self, replica: int, deltas: list[RequestDelta]) -> None:
        """Process the deltas of a replica."""
        now = self._clock()
        passed_on: list[RequestDelta] = []
        lost: dict[str, RoutedRequest] = {}
        for delta in deltas:
            sent = self._unfinished.get(delta.request_id)
            if sent is None or sent.replica != replica or delta.index not in sent.indexes:
                continue
            if delta.resendable and sent.may_be_sent_again and not self._closing:
                lost[delta.request_id] = sent
                continue
            if delta.handed is not None and not sent.leaves:
                sent.handed.append(delta.handed)
                if delta.token_ids or delta.prompt_logprobs:
                    sent.begun = True
                    rest = replace(
                        delta, finish_reason=None, report=None, page_source=None, handed=None
                    )
                    passed_on.append(rest)
                continue
            if not sent.begun and delta.finish_reason is not FinishReason.ERROR:
                self._router.began(delta.request_id, now)
            sent.begun = True
            if delta.finish_reason is not None:
                sent.indexes.discard(delta.index)
                if not sent.indexes:
                    del self._unfinished[delta.request_id]
                    self._router.ended(delta.request_id, now)
            passed_on.append(delta)
        self._give(passed_on)
        for sent in lost.values():
            self._send_again(sent, replica)
        for request_id in {delta.request_id: None for delta in deltas}:
            routed = self._unfinished.get(request_id)
            if routed is not None and routed.handed and len(routed.handed) == len(routed.indexes):
                self._continue(routed, replica)

    def _continue(self, sent: RoutedRequest, previous: int) -> None:
        """Let another replica continue a request whose unfinished outputs were all handed over."""
        now, handed = (
            self._clock(),
            [handover for handover in sent.handed if handover.index not in sent.endings],
        )
        if self._closing:
            handed = []
            sent.endings = dict.fromkeys(
                sent.indexes, (FinishReason.ERROR, "the engine was closed")
            )
        sent.handed = []
        for index in sent.indexes & sent.endings.keys():
            sent.indexes.discard(index)
            self._give(sent.last_deltas({index}, now, *sent.endings[index]))
        if not sent.indexes:
            self._unfinished.pop(sent.request_id, None)
            self._router.ended(sent.request_id, now)
            return
        sent.request = replace(sent.request, source=None, resumed=tuple(handed))
        sent.sends -= 1  # nothing was lost
        self._send_again(sent, previous)

    def _send_again(self, sent: RoutedRequest, lost_with: int | None = None) -> None:
        """Send a request of which nothing was delivered again, or let it wait for a replica."""
        request_id = sent.request_id
        self._unfinished.pop(request_id, None)
        self._router.ended(request_id, self._clock())
        sent.replica = None
        try:
            self._send(sent, set() if lost_with is None else {lost_with})
            sent.sends += 1
            assert sent.replica is not None
            for index in set(range(sent.n)) - sent.indexes:  # ended while it waited
                self.clients[sent.replica].end(request_id, index)
        except UnavailableError as error:
            if self.state in (EngineState.FAILED, EngineState.CLOSED) or self._closing:
                self._fail(sent, str(error))
            else:
                self._waiting.add(sent)

    def _fail(self, sent: SentRequest, reason: str) -> None:
        self._give(sent.last_deltas(sent.indexes, self._clock(), FinishReason.ERROR, reason))

    def _state_changed(self, replica: int) -> None:
        client = self.clients[replica]
        ready = client.state is EngineState.READY
        self._router.set_available(replica, ready and replica not in self._draining)
        if not ready and client.state is not EngineState.STALLED:
            self._router.forget(replica)
        self._changed.set()
        if not self._closing and (ready or self.state is EngineState.FAILED):
            for sent in self._waiting.take():
                assert isinstance(sent, RoutedRequest)
                self._send_again(sent)

    def _reported(self, replica: int, report: ReplicaReport) -> None:
        self._served[replica].update(report.served)
        if not self._router.report(replica, report):
            task = asyncio.get_running_loop().create_task(self._ask_all(replica))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask_all(self, replica: int) -> None:
        with suppress(UnavailableError):  # after a restart it sends a full report anyway
            await self.clients[replica].report_all()

    async def _views(self) -> list[LiveView | None]:
        async def view(client: RemoteClient) -> LiveView | None:
            with suppress(UnavailableError):
                return await client.live()
            return None

        return await asyncio.gather(*map(view, self.clients))

    async def _credit(self) -> None:
        """Send each engine the service that tenants got from the others, periodically."""
        while True:
            await asyncio.sleep(CREDIT_SECONDS)
            served, self._served = self._served, [Counter[str]() for _ in self.clients]
            total = sum(served, Counter[str]())
            for client, service in zip(self.clients, served, strict=True):
                elsewhere = total - service
                if elsewhere:
                    client.credit(dict(elsewhere))
