"""The server's interface to its engine, or to several engines for one model.

With several, each request goes where the caches make it cheapest; prompts are tokenised and hashed
here, so hits are exact. If an engine is lost, its requests end with an error that names it; those
of which nothing was delivered are sent again: to another engine, or to the next one that is ready.
Engines that sleep hold no memory; the next request starts them again, and waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace

from kvik.config.config import ResolvedConfig
from kvik.config.model_source import read_adapter
from kvik.core.block_pool import extend_hashes
from kvik.core.routing import ReplicaReport, ReplicaRouter
from kvik.core.types import EngineRequest, FinishReason, RequestDelta
from kvik.engine.core import check_new_adapter, check_request, salt_of, without_adapter
from kvik.engine.live import LiveView, ReplicaView, merge_views
from kvik.engine.remote import EngineLink, EngineSource, EngineState, SentRequest
from kvik.engine.stats import EngineStats, sum_stats
from kvik.engine.wire import Credit, End, HandOver
from kvik.errors import ParamError, UnavailableError
from kvik.spec.adapters import Adapter

CREDIT_SECONDS = 0.5  # between messages on the service that tenants got from other replicas
MAX_HASHED = 1024  # blocks of a prompt: about a millisecond, and enough to distinguish replicas
# The overall state is the first of these that an engine has.
ORDER = (
    EngineState.READY,
    EngineState.STALLED,
    EngineState.RESTARTING,
    EngineState.STARTING,
    EngineState.ASLEEP,
    EngineState.FAILED,
    EngineState.CLOSED,
)
LAST_STATES = (EngineState.FAILED, EngineState.CLOSED)  # no engine follows
CLOSED = "the engine was closed"
ASLEEP = "the engine sleeps until a request arrives"
UNLOADED = "its adapter was unloaded before another replica continued it"

log = logging.getLogger(__name__)

Sink = Callable[[list[RequestDelta]], None]  # called in the event loop, once for many deltas


class EngineClient:
    """Takes requests and hands their deltas to its sinks. No method blocks.

    Every request added ends with exactly one last delta for each sibling, whatever happens to the
    engines. The client outlives them: when one is lost, its source connects the next. Requests of
    which nothing was delivered are sent again, once (more often if the lost engine reported that it
    had not started them); all others end with `FinishReason.ERROR`. A full queue also refuses a
    request with such a delta; its `RequestDelta.refused` names the limit.

    With several engines, the client is ready if at least one is. The server enforces limits of
    queues and rates, so they apply to all engines together. Each engine counts the service that
    tenants got from the others, so shares are fair across them. Times are comparable with those of
    the engines, as `time.monotonic` counts from the start of the machine in every process.

    Args:
        config: of every engine.
        sources: one for each engine.
    """

    def __init__(self, config: ResolvedConfig, sources: Sequence[EngineSource]) -> None:
        self.config = config
        self._sinks: list[Sink] = []
        self._changed = asyncio.Event()  # the state
        self._several = len(sources) > 1
        names = [f"replica {i}" if self._several else "" for i in range(len(sources))]
        self.links = tuple(
            EngineLink(config, source, self, i, name)
            for i, (source, name) in enumerate(zip(sources, names, strict=True))
        )
        self._waiting: dict[str, SentRequest] = {}  # for the next engine, each to its deadline
        self._block_size = config.cache.block_size
        self._router = ReplicaRouter(names, self._block_size, config.scheduler.max_num_seqs)
        self._draining: set[int] = set()
        self._served = [Counter[str]() for _ in sources]  # since the last credit
        self._crediting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._changing = asyncio.Lock()  # the adapters, or whether the engines sleep
        self._wakes = False  # the engines sleep, or have been started again and are not yet ready
        self._last_used = time.monotonic()

    # -- for the server --------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The best state that an engine has, by `ORDER`: READY if one can take requests."""
        return min((link.state for link in self.links), key=ORDER.index)

    @property
    def reason(self) -> str:
        """Why no engine is ready, as a message for users; "" if one is."""
        if self.state is EngineState.READY:
            return ""
        if not self._several:
            return self.links[0].reason
        return "; ".join(f"{link.name}: {link.reason}" for link in self.links)

    @property
    def num_starts(self) -> int:
        """How often an engine became ready; more than once for each: it was restarted."""
        return sum(link.num_starts for link in self.links)

    @property
    def num_unfinished(self) -> int:
        return sum(link.num_unfinished for link in self.links) + len(self._waiting)

    @property
    def accepts(self) -> bool:
        """Whether requests may be added: an engine is ready, or they wait until it has woken."""
        return self._wakes or self.state is EngineState.READY

    @property
    def idle_seconds(self) -> float:
        """How long the engines have had no requests."""
        return 0.0 if self.num_unfinished else time.monotonic() - self._last_used

    def start(self, sink: Sink) -> None:
        """Begin to start all engines; call this once, in the event loop."""
        self.add_sink(sink)
        if self._several:
            self._crediting = asyncio.get_running_loop().create_task(self._credit())
        for link in self.links:
            link.start()

    def add_sink(self, sink: Sink) -> None:
        """Hand all deltas to this sink too; it must ignore requests that it does not know."""
        self._sinks.append(sink)

    async def ready(self) -> None:
        """Wait until an engine takes requests, and wake those that sleep; raise UnavailableError if
        none ever will."""
        self.wake()
        while (state := self.state) is not EngineState.READY:
            if state in LAST_STATES:
                raise UnavailableError("engine", self.reason)
            self._changed.clear()
            await self._changed.wait()

    def check(self, request: EngineRequest) -> None:
        """Raise `ParamError` or `CapacityError` if the request can never be served."""
        self._check_id(request)
        check_request(self.config, request)

    def add(self, request: EngineRequest) -> None:
        """Send a request that passed `check`, with several engines to the one with the lowest cost.
        It waits if the engines sleep, and wakes them.

        Raises:
            ParamError: its id is in use, or it cannot be encoded.
            UnavailableError: no engine takes it.
        """
        self._check_id(request)
        adapter, now = self._adapter_of(request), time.monotonic()
        sent = SentRequest(request, self._hashes(request), now, adapter)
        self._last_used = now
        if self._wakes:
            sent.sends = 0
            self._keep(sent)
            self.wake()
        else:
            self._send(sent)

    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        """End a request, or one of its siblings; its last delta comes soon. Unknown ids are already
        gone."""
        if error is not None:
            error = error.encode("utf-8", "replace").decode()
        if (waits := self._waiting.get(request_id)) is not None:
            self._end_waiting(waits, index, reason, error)
        elif (link := self._link_of(request_id)) is not None:
            sent = link.requests[request_id]
            for sibling in sent.indexes if index is None else (index,):
                sent.endings[sibling] = reason, error
            link.send(End(request_id, index, reason, error))

    async def stats(self) -> EngineStats:
        """Return current statistics, summed over all engines, with the last known ones of an engine
        that does not answer within a second. Counters include those of lost engines, as last
        known."""
        return sum_stats(await asyncio.gather(*(link.stats() for link in self.links)))

    async def live(self) -> LiveView:
        """Return the current state of requests, blocks and steps, of all engines that answer.

        Raises:
            UnavailableError: no engine answers within a second.
        """
        if not self._several:
            return await self.links[0].query("live", LiveView)
        views = [view for view in await self._views() if view is not None]
        if not views:
            raise UnavailableError("engine", self.reason or "no replica answers in time")
        return merge_views(views)

    async def replicas(self) -> tuple[ReplicaView, ...]:
        """Return the state of each of several engines; (): there is only one."""
        if not self._several:
            return ()
        views = await self._views()
        return tuple(
            ReplicaView(
                i,
                link.state.value,
                link.reason,
                i in self._draining,
                link.num_starts,
                link.num_unfinished,
                None if view is None else view.stats,
                None if view is None else view.rates,
            )
            for i, (link, view) in enumerate(zip(self.links, views, strict=True))
        )

    @property
    def refusal(self) -> str:
        """Why requests are refused although an engine is ready: it is drained; "" if none is."""
        ready = {link.number for link in self.links if link.state is EngineState.READY}
        if not ready or ready - self._draining:
            return ""
        if len(self._draining) == len(self.links):
            return "all replicas are drained"
        return "; ".join(
            link.named("is drained" if link.number in self._draining else link.reason)
            for link in self.links
        )

    def drain_replica(self, replica: int, *, drain: bool) -> int:
        """Stop (or resume) sending requests to a replica. Returns how many it still has.

        Raises:
            ParamError: there is no such replica.
        """
        if not self._several:
            raise ParamError("replica", "cannot be drained alone: this server has one engine")
        if not 0 <= replica < len(self.links):
            last = len(self.links) - 1
            raise ParamError("replica", f"must be 0 to {last}, not {replica}")
        link = self.links[replica]
        (self._draining.add if drain else self._draining.discard)(replica)
        self.state_changed(link)
        if (
            drain and self._router.choose((), 0, time.monotonic()) is not None
        ):  # there is another one
            for request_id, sent in link.requests.items():
                if sent.unfinished and sent.adapter == self._adapter_of(sent.request):
                    link.send(HandOver(request_id))
        return link.num_unfinished

    def hand_over(self, request_id: str) -> None:
        """Let the engine of another server continue a request, if it can be moved: its last delta
        holds the `Handover`."""
        link = self._link_of(request_id)
        if link is not None and (sent := link.requests[request_id]).unfinished:
            sent.leaves = True
            link.send(HandOver(request_id))

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, pinned ones included; requests continue. Returns the number
        of block contents that were forgotten. Raises as `live`."""
        if self._wakes:  # a disk may have some
            await self.ready()
        ready = [link for link in self.links if link.state is EngineState.READY]
        if not ready:
            raise UnavailableError("engine", self.reason)
        counts = (link.query("reset_prefix_cache", int) for link in ready)
        return sum(await asyncio.gather(*counts))

    async def load_adapter(self, name: str, path: str) -> None:
        """Let requests choose an adapter, a folder or hub id, once all engines have it.

        Raises:
            KvikError: one cannot load it, or is not ready all the time.
        """
        if self._wakes:
            await self.ready()
        async with self._changing:
            check_new_adapter(self.config, name)
            adapter = await asyncio.to_thread(read_adapter, name, path)
            adapters, starts = (*self.config.runner.adapters, adapter), self.num_starts
            self._check_ready(starts)
            await asyncio.gather(*(link.set_adapters(adapters) for link in self.links))
            self._check_ready(starts)
            self._choose_from(adapters)

    async def unload_adapter(self, name: str) -> None:
        """Refuse requests for an adapter from now on; those that engines have are finished.

        Raises:
            ParamError: there is no such adapter.
        """
        async with self._changing:
            adapters = without_adapter(self.config, name)
            self._choose_from(adapters)
            # An engine that does not answer does so at the next change.
            changes = (link.set_adapters(adapters) for link in self.links)
            await asyncio.gather(*changes, return_exceptions=True)

    async def sleep(self) -> None:
        """End all engines, which frees their memory, until `wake` or the next request. Prefixes
        cached in memory are forgotten. Does nothing if they sleep.

        Raises:
            UnavailableError: one has requests, or is not ready.
        """
        async with self._changing:
            if self.state is EngineState.ASLEEP:
                return
            await self.stats()  # the last known ones are kept
            self._check_ready(self.num_starts)
            if count := self.num_unfinished:
                raise UnavailableError("engine", f"cannot sleep while it has requests ({count})")
            for link in self.links:
                link.disconnect(EngineState.ASLEEP, ASLEEP)
            self._wakes = True
            log.info("the engine sleeps: its memory is freed until a request arrives")
            await asyncio.gather(*(link.source.close() for link in self.links))

    def wake(self) -> None:
        """Begin to start engines that sleep; `ready` waits for that."""
        if self.state is EngineState.ASLEEP:
            for link in self.links:
                link.set_state(EngineState.STARTING, "the engine is being woken")
            log.info("the engine is started again after its sleep")
            self._do(self._start_again())

    def _check_ready(self, starts: int) -> None:
        """Raise UnavailableError unless all engines are ready, and none has started since."""
        all_ready = all(link.state is EngineState.READY for link in self.links)
        if starts != self.num_starts or not all_ready:
            raise UnavailableError("engine", self.reason or "a replica is not ready")

    def _choose_from(self, adapters: tuple[Adapter, ...]) -> None:
        self.config = self.config.with_adapters(adapters)
        for link in self.links:
            link.source.set_adapters(adapters)

    async def close(self) -> None:
        """End all engines, and their requests with an error."""
        self._closing = True
        if self._crediting is not None:
            self._crediting.cancel()
        for sent in self._take_waiting():
            self._fail(sent, CLOSED)
        await asyncio.gather(*(link.close() for link in self.links))

    # -- for the links ---------------------------------------------------------------------------

    def take(self, link: EngineLink, deltas: list[RequestDelta]) -> None:
        """Process the deltas of an engine."""
        now = time.monotonic()
        passed_on: list[RequestDelta] = []
        leaving: dict[str, SentRequest] = {}
        for delta in deltas:
            sent = link.requests.get(delta.request_id)
            if sent is None or delta.index not in sent.indexes:
                continue
            if delta.handed is not None and not sent.leaves:
                sent.handed.append(delta.handed)
                leaving[delta.request_id] = sent
                if delta.token_ids or delta.prompt_logprobs:
                    sent.begun = True
                    passed_on.append(_without_end(delta))
                continue
            if not sent.begun and delta.finish_reason is not FinishReason.ERROR:
                self._router.began(delta.request_id, now)
            sent.begun = True
            passed_on.append(delta)
            if delta.finish_reason is not None:
                sent.indexes.discard(delta.index)
                if not sent.indexes:
                    del link.requests[delta.request_id]
                    self._router.ended(delta.request_id, now)
                    self._last_used = now
                elif sent.handed:
                    leaving[delta.request_id] = sent
        self._give(passed_on)
        for sent in leaving.values():
            if link.requests.get(sent.request_id) is sent and len(sent.handed) == len(sent.indexes):
                self._continue(sent, link)

    def lost(self, link: EngineLink, reason: str, waiting: Collection[str]) -> None:
        """See `LinkOwner.lost`."""
        requests, link.requests = list(link.requests.values()), {}
        last: list[RequestDelta] = []
        for sent in requests:
            if sent.request_id in waiting:  # it cannot have caused the loss
                sent.sends -= 1
            self._router.ended(sent.request_id, time.monotonic())
            if sent.may_be_sent_again and not self._closing:
                self._send_again(sent, link)
            else:
                last += sent.last_deltas(sent.indexes, time.monotonic(), FinishReason.ERROR, reason)
        self._give(last)

    def state_changed(self, link: EngineLink) -> None:
        """Note that an engine has another state, or is drained."""
        if self.state not in (EngineState.ASLEEP, EngineState.STARTING):
            self._wakes = False
            self._last_used = time.monotonic()
        ready = link.state is EngineState.READY
        self._router.set_available(link.number, ready and link.number not in self._draining)
        if not ready and link.state is not EngineState.STALLED:
            self._router.forget(link.number)
        self._changed.set()
        if not self._closing and (ready or self.state in LAST_STATES):
            for sent in self._take_waiting():
                self._send_again(sent)

    def reported(self, link: EngineLink, report: ReplicaReport) -> None:
        """Process a report of an engine."""
        self._served[link.number].update(report.served)
        if not self._router.report(link.number, report):
            self._do(_ask_all(link))

    # -- inside ----------------------------------------------------------------------------------

    def _do(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_again(self) -> None:
        """Start the engines once those before them have ended."""
        async with self._changing:
            for link in self.links if not self._closing else ():
                link.start()

    def _check_id(self, request: EngineRequest) -> None:
        name = request.request_id
        if name in self._waiting or self._link_of(name) is not None:
            raise ParamError("request_id", f"{name!r} is already being served")

    def _adapter_of(self, request: EngineRequest) -> str:
        return self.config.adapter_digest(request.params.adapter)

    def _link_of(self, request_id: str) -> EngineLink | None:
        """Return the link of the engine that works on a request; None: none does."""
        return next((link for link in self.links if request_id in link.requests), None)

    def _give(self, deltas: list[RequestDelta]) -> None:
        """Hand deltas to all sinks."""
        for sink in self._sinks if deltas else ():
            try:
                sink(deltas)
            except Exception:  # requests of other sinks continue
                log.exception("deltas could not be delivered")

    def _hashes(self, request: EngineRequest) -> list[bytes]:
        """Return the hashes of a prompt's blocks, as engines compute them, to choose one."""
        cache, tokens = self.config.cache, request.prompt_token_ids
        hashes: list[bytes] = []
        if cache.enable_prefix_caching and self._several:
            blocks = min(len(tokens) // self._block_size, MAX_HASHED)
            salt = salt_of(self.config, request)
            extend_hashes(hashes, tokens, self._block_size, salt, blocks)
        return hashes

    def _send(
        self, sent: SentRequest, avoid: Collection[int] = (), *, again: bool = False
    ) -> EngineLink:
        """Send a request to the best engine; see `EngineLink.add`. Raises as `add`."""
        if not self._several:  # there is nothing to choose, and no need to know its backlog
            self.links[0].add(sent, again=again)
            return self.links[0]
        now, size = time.monotonic(), len(sent.request.prompt_token_ids)
        while True:
            choice = self._router.choose(sent.hashes, size, now, avoid=avoid)
            if choice is None:
                reason = self.reason or self.refusal or "no other replica is ready"
                raise UnavailableError("engine", reason)
            link = self.links[choice.replica]
            try:
                link.add(sent, again=again)
            except UnavailableError:
                avoid = {*avoid, choice.replica}
                continue
            self._router.sent(sent.request_id, choice, sent.hashes, size, now)
            return link

    def _send_again(self, sent: SentRequest, lost_with: EngineLink | None = None) -> None:
        """Send a request of which nothing was delivered again, or let it wait for an engine."""
        if sent.request.resumed and sent.adapter != self._adapter_of(sent.request):
            self._fail(sent, UNLOADED)
            return
        try:
            link = self._send(sent, () if lost_with is None else {lost_with.number}, again=True)
        except UnavailableError:
            if self.state in LAST_STATES or self._closing:
                self._fail(sent, self.reason)
            else:
                self._keep(sent)
            return
        except ParamError as error:  # a request that waited from the start was not encoded before
            self._fail(sent, str(error))
            return
        sent.sends += 1
        for index in set(range(sent.n)) - sent.indexes:  # ended while it waited
            link.send(End(sent.request_id, index, FinishReason.ABORT, None))

    def _keep(self, sent: SentRequest) -> None:
        """Let a request wait for the next engine, until its deadline."""
        self._waiting[sent.request_id] = sent
        if sent.deadline is not None:
            seconds = max(0.0, sent.deadline - time.monotonic())
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, self._expire, sent.request_id, sent.deadline)

    def _expire(self, request_id: str, deadline: float) -> None:
        """End a request if it still waits; later ones of the same id have other deadlines."""
        sent = self._waiting.get(request_id)
        if sent is not None and sent.deadline == deadline:
            self._end_waiting(sent, None, FinishReason.DEADLINE, None)

    def _end_waiting(
        self, sent: SentRequest, index: int | None, reason: FinishReason, error: str | None
    ) -> None:
        """End a request that waits, or one of its siblings; its last delta comes soon."""
        ended = sent.indexes & ({index} if index is not None else sent.indexes)
        sent.indexes -= ended
        if not sent.indexes:
            del self._waiting[sent.request_id]
        deltas = sent.last_deltas(ended, time.monotonic(), reason, error)
        asyncio.get_running_loop().call_soon(self._give, deltas)

    def _take_waiting(self) -> list[SentRequest]:
        requests, self._waiting = list(self._waiting.values()), {}
        return requests

    def _continue(self, sent: SentRequest, previous: EngineLink) -> None:
        """Let another engine continue a request whose unfinished outputs were all handed over."""
        now, handed = time.monotonic(), [h for h in sent.handed if h.index not in sent.endings]
        del previous.requests[sent.request_id]
        self._router.ended(sent.request_id, now)
        if self._closing:
            handed = []
            sent.endings = dict.fromkeys(sent.indexes, (FinishReason.ERROR, CLOSED))
        sent.handed = []
        sent.sends -= 1  # nothing was lost
        last: list[RequestDelta] = []
        for index in sent.indexes & sent.endings.keys():
            sent.indexes.discard(index)
            last += sent.last_deltas({index}, now, *sent.endings[index])
        if sent.indexes:
            sent.request = replace(sent.request, source=None, resumed=tuple(handed))
            self._send_again(sent, previous)
        self._give(last)

    def _fail(self, sent: SentRequest, reason: str) -> None:
        self._give(sent.last_deltas(sent.indexes, time.monotonic(), FinishReason.ERROR, reason))

    async def _views(self) -> list[LiveView | None]:
        async def view(link: EngineLink) -> LiveView | None:
            with suppress(UnavailableError):
                return await link.query("live", LiveView)
            return None

        return await asyncio.gather(*map(view, self.links))

    async def _credit(self) -> None:
        """Send each engine the service that tenants got from the others, periodically."""
        while True:
            await asyncio.sleep(CREDIT_SECONDS)
            served, self._served = self._served, [Counter[str]() for _ in self.links]
            total = sum(served, Counter[str]())
            for link, service in zip(self.links, served, strict=True):
                elsewhere = total - service
                if elsewhere and link.state is EngineState.READY:
                    link.send(Credit(dict(elsewhere)))


async def _ask_all(link: EngineLink) -> None:
    with suppress(UnavailableError):  # after a restart it sends a full report anyway
        await link.query("report_all", type(None))


def _without_end(delta: RequestDelta) -> RequestDelta:
    return replace(delta, finish_reason=None, report=None, page_source=None, handed=None)
