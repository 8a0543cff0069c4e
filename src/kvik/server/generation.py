"""Generations: from what a caller wants to text as it comes, whatever happens on the way."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvik.config.errors import KvikError, OverloadError, ParamError, UnavailableError
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, Pin, PromptUse, RequestDelta
from kvik.engine.async_client import AsyncEngineClient, EngineState
from kvik.engine.output import OutputProcessor, RequestOutput, TextDelta, merged
from kvik.server.admission import Admission, Degradation, KVUsage, Reservation, pressure
from kvik.server.errors import (
    aborted,
    deadline_exceeded,
    escaped,
    failed,
    lost,
    not_ready,
    rename_fields,
)
from kvik.server.observer import GenerationRecord, Observer
from kvik.server.texts import Texts
from kvik.text.bad_words import bad_word_ids


class Bell:
    """Wakes one reader, who may be away when it rings."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rung = False


MAX_PRIORITY = 1000
MAX_DEADLINE_MS = 86_400_000
MAX_BAD_WORD_CHARS = 1 << 16
_SALT = re.compile(r"[A-Za-z0-9_.:=+/-]{0,128}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a caller wants, whatever the API it was said in.

    Attributes:
        prompt: text, or token ids.
        add_special_tokens: to a text; a rendered chat template has its own.
        priority: smaller is more urgent. Only the policy "priority" looks at it.
        cache_salt: prefix blocks are shared only under the same salt (and tenant).
        deadline_ms: after which the result is worthless, from now.
        pins: prefixes to keep in the prefix cache.
        pooling: "mean" or "last": an embedding is wanted, and no text.
        field: what the caller's request calls `prompt`, for errors.
    """

    prompt: str | Sequence[int]
    params: SamplingParams
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: int | None = None
    pins: tuple[Pin, ...] = ()
    pooling: str | None = None
    field: str = "prompt"


@dataclass(slots=True)
class PreparedRequest:
    """A request on its way to the engine.

    Attributes:
        wanted_by: by the engine's clock, if its caller said so; its deadline may be sooner.
    """

    request: EngineRequest
    text: str | None
    degraded: str = ""
    wanted_by: float | None = None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Attributes:
    request_timeout: seconds after which any request ends; None: no limit.
    share_prefix_cache: between tenants.
    """

    request_timeout: float | None = None
    share_prefix_cache: bool = False
    degradation: Degradation = field(default_factory=Degradation)


class Intake:
    """Makes engine requests.

    Args:
        clock: the engine's.
    """

    def __init__(
        self,
        engine: AsyncEngineClient,
        texts: Texts,
        admission: Admission,
        limits: RequestLimits,
        clock: Callable[[], float],
    ) -> None:
        self._policy = engine.config.scheduler.policy
        self._texts = texts
        self._admission = admission
        self._limits = limits
        self._kv_usage = KVUsage(engine, clock)

    async def draft(self, wish: GenerationRequest, tenant: str, arrived: float) -> PreparedRequest:
        """Args:
            arrived: when, by the engine's clock.

        Raises:
            ParamError: something is impossible, whatever the engine says.
        """
        if not _SALT.fullmatch(wish.cache_salt):
            raise ParamError("cache_salt", "must be at most 128 letters, digits and _ . : = + / -")
        if not -MAX_PRIORITY <= wish.priority <= MAX_PRIORITY:
            raise ParamError("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        if wish.priority and self._policy != "priority":
            raise ParamError(
                "priority",
                "Priority scheduling is not enabled: give 0, or start the server with --policy "
                f"priority instead of {self._policy}",
            )
        if wish.deadline_ms is not None and not 1 <= wish.deadline_ms <= MAX_DEADLINE_MS:
            raise ParamError("deadline_ms", f"must be in [1, {MAX_DEADLINE_MS}]")
        params, text = wish.params, None
        if params.stop and self._texts.tokenizer is None:
            raise ParamError("stop", "needs a tokenizer, and this model has none")
        if params.bad_words:
            params = params.with_changes(bad_words=await self._bad_words(params))
        if isinstance(wish.prompt, str):
            text = wish.prompt
            texts = self._texts.of(tenant)
            ids: Sequence[int] = await texts.encode(text, wish.add_special_tokens)
            if not text or not ids:  # some tokenizers put a token before nothing at all
                raise ParamError("prompt", "must not be empty")
        else:
            ids = wish.prompt
        params, degraded = self._degrade(params)
        salt = wish.cache_salt
        if not self._limits.share_prefix_cache:
            salt = f"{tenant}\0{salt}"
        request = EngineRequest(
            f"gen-{secrets.token_hex(12)}",
            ids,
            params,
            priority=wish.priority,
            cache_salt=salt,
            deadline=self._deadline(wish, arrived),
            tenant=tenant,
            pins=wish.pins,
            pooling=wish.pooling,
        )
        wanted_by = None if wish.deadline_ms is None else arrived + wish.deadline_ms / 1000
        return PreparedRequest(request, text, degraded, wanted_by)

    async def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if sum(len(word) for word in params.bad_words) > MAX_BAD_WORD_CHARS:
            raise ParamError("bad_words", f"at most {MAX_BAD_WORD_CHARS} characters in all")
        return await asyncio.to_thread(bad_word_ids, params.bad_words, self._texts.tokenizer)

    def _degrade(self, params: SamplingParams) -> tuple[SamplingParams, str]:
        policy = self._limits.degradation
        if policy.max_tokens is None:
            return params, ""
        fill, waiting = self._admission.fill, self._admission.num_waiting > 0
        changed = policy.apply(params, pressure(fill, self._kv_usage.read(), waiting=waiting))
        return changed, "" if changed is params else f"max_tokens={changed.max_tokens}"

    def _deadline(self, wish: GenerationRequest, arrived: float) -> float | None:
        limits = [] if wish.deadline_ms is None else [wish.deadline_ms / 1000]
        if self._limits.request_timeout is not None:
            limits.append(self._limits.request_timeout)
        return arrived + min(limits) if limits else None


_log = logging.getLogger(__name__)
MAX_LOGGED = 500  # characters of what an engine says of an error
MAX_PENDING_TOKENS = 1 << 16  # that wait for a reader; each logprob counts as one
_FAILED = {
    FinishReason.ABORT: "abort",
    FinishReason.DEADLINE: "deadline",
    FinishReason.ERROR: "error",
}


class Generation:
    """One request being served. It has one reader, which either iterates or awaits `output`.

    Iterating gives lists of what came since the last time, one `TextDelta` for each completion
    that grew. It ends after the last one, and raises `failure` if it failed.

    Attributes:
        request_id: random; what the engine knows it by.
        bell: rings when there is something to `take`, or it ended. Those started together share it.
        degraded: what the server gave up for want of room ("max_tokens=64"), or "".
        prompt_use: what of the prompt was cached, and what was pinned; known with the first tokens.
        result: once it ended well.
        failure: once it did not.
    """

    def __init__(
        self,
        owner: Generations,
        request: EngineRequest,
        life: GenerationRecord,
        ticket: Reservation,
        bell: Bell,
        degraded: str,
    ) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.life = life
        self.bell = bell
        self.degraded = degraded
        self.prompt_use: PromptUse | None = None
        self.result: RequestOutput | None = None
        self.failure: KvikError | None = None
        self._owner = owner
        self._ticket = ticket
        self._unstarted = set(range(request.params.n))
        self._pending: list[TextDelta] = []
        self._weight = 1 + (request.params.logprobs or 0)
        self._pending_weight = 0
        self._delivered = 0.0  # when its last piece came

    @property
    def ended(self) -> bool:
        return self.result is not None or self.failure is not None

    def take(self) -> list[TextDelta]:
        """What came since the last call, without waiting: at most one delta for each completion."""
        pending, self._pending, self._pending_weight = self._pending, [], 0
        return merged(pending)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[TextDelta]:
        while not self._pending and not self.ended:
            await self.bell.wait()
        if self._pending:
            return self.take()
        if self.failure is not None:
            raise self.failure
        raise StopAsyncIteration

    async def output(self) -> RequestOutput:
        """The whole result.

        Raises:
            KvikError: `failure`.
        """
        while not self.ended:
            await self.bell.wait()
        if self.failure is not None:
            raise self.failure
        assert self.result is not None
        return self.result

    def _start(self, index: int) -> None:
        """A completion has its first token, or is done without any: only its prompt was read."""
        if index in self._unstarted:
            self._unstarted.discard(index)
            self._ticket.started()

    def abort(self, reason: str = "the request was aborted", *, again: bool = False) -> None:
        """End it now, whatever its phase; nothing happens if it has ended. `again`: its caller is
        told to send it again."""
        self._owner._fail(self, aborted(reason, again=again), FinishReason.ABORT)


class Generations:
    """All generations of a server. `take` is the engine client's sink.

    Args:
        clock: the engine's clock, which all processes of a machine share.
    """

    def __init__(
        self,
        engine: AsyncEngineClient,
        texts: Texts,
        admission: Admission,
        observer: Observer,
        limits: RequestLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._intake = Intake(engine, texts, admission, limits, clock)
        self._admission = admission
        self._observer = observer
        self._clock = clock
        self._processor = OutputProcessor(texts.tokenizer)
        self._live: dict[str, Generation] = {}

    @property
    def live(self) -> Mapping[str, Generation]:
        """By request id, those that have not ended."""
        return self._live

    async def start(
        self,
        request: GenerationRequest,
        tenant: str,
        *,
        streaming: bool,
        trace_parent: str | None = None,
    ) -> Generation:
        """Admit a request and send it to the engine.

        Args:
            trace_parent: the caller's trace, as its header `traceparent` names it.

        Raises:
            ParamError, CapacityError: it can never be served.
            OverloadError: there is no room for it now, or its deadline cannot be met.
            UnavailableError: the engine is not ready.
        """
        (generation,) = await self.start_all(
            [request], tenant, streaming=streaming, trace_parent=trace_parent
        )
        return generation

    def check_room(self, tenant: str, num_requests: int) -> None:
        """Whether so many may come now, asked before any work is put into them. To start them
        asks again.

        Raises:
            OverloadError, UnavailableError: see `start`.
        """
        try:
            self._check_room(tenant, num_requests)
        except KvikError as error:
            self._observer.refused(tenant, _why(error))
            raise

    async def start_all(
        self,
        requests: Sequence[GenerationRequest],
        tenant: str,
        *,
        streaming: bool,
        trace_parent: str | None = None,
    ) -> list[Generation]:
        """All of them or none. They share a bell."""
        try:
            return await self._start_all(requests, tenant, streaming, trace_parent)
        except KvikError as error:
            self._observer.refused(tenant, _why(error))
            raise

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """End a generation, of this tenant if one is named; whether there was one."""
        generation = self._live.get(request_id)
        if generation is None or tenant not in (None, generation.life.tenant):
            return False
        generation.abort()
        return True

    def abort_all(self, reason: str) -> None:
        """End everything, with the server."""
        for generation in list(self._live.values()):
            generation.abort(reason, again=True)

    # The way in

    async def _start_all(
        self,
        requests: Sequence[GenerationRequest],
        tenant: str,
        streaming: bool,
        trace_parent: str | None,
    ) -> list[Generation]:
        arrived = self._clock()
        self._check_room(tenant, sum(r.params.n for r in requests))
        drafts = []
        for request in requests:
            with rename_fields(prompt=request.field):
                drafts.append(await self._intake.draft(request, tenant, arrived))
        self._check_ready()
        for request, draft in zip(requests, drafts, strict=True):
            with rename_fields(prompt=request.field):
                self._engine.check(draft.request)
            await asyncio.sleep(0)  # prompts may be long, and many
        generations: list[Generation] = []
        bell = Bell()
        try:
            for draft in drafts:
                self._check_ready()
                generations.append(self._add(draft, arrived, streaming, bell, trace_parent))
                await asyncio.sleep(0)
        except BaseException:
            for generation in generations:
                generation.abort()
            raise
        return generations

    def _check_room(self, tenant: str, num_requests: int) -> None:
        self._check_ready()
        self._admission.check(tenant, num_requests)

    def _check_ready(self) -> None:
        if self._engine.state is not EngineState.READY:
            raise not_ready(self._engine.state)

    def _add(
        self,
        draft: PreparedRequest,
        arrived: float,
        streaming: bool,
        bell: Bell,
        trace_parent: str | None,
    ) -> Generation:
        request = draft.request
        if draft.wanted_by is not None and request.priority >= 0:  # what is urgent waits less
            self._admission.check_deadline(request.tenant, draft.wanted_by)
        n, num_tokens = request.params.n, len(request.prompt_token_ids)
        ticket = self._admission.admit(request.tenant, n, num_tokens)
        life = GenerationRecord(
            request.request_id,
            request.tenant,
            request.params,
            num_tokens,
            streaming,
            arrived,
            trace_parent=trace_parent,
        )
        generation = Generation(self, request, life, ticket, bell, draft.degraded)
        try:
            self._processor.add(request, draft.text, streaming=streaming)
            self._engine.add(request)
        except BaseException:
            self._processor.discard(request.request_id)
            ticket.release()
            raise
        self._live[request.request_id] = generation
        self._observer.arrived(life)
        return generation

    # The way out

    def take(self, deltas: list[RequestDelta]) -> None:
        """Deltas of any number of requests, to their readers."""
        now = self._clock()
        processed = self._processor.process(deltas)
        for request_id, index, reason, error in processed.to_end:
            self._engine.end(request_id, index, reason, error)
        for delta in deltas:
            generation = self._live.get(delta.request_id)
            if generation is None:
                continue
            if delta.token_ids or delta.finish_reason not in (None, *_FAILED):
                generation._start(delta.index)
            if delta.token_ids:
                self._count(generation, delta, now)
        for piece in processed.deltas:
            generation = self._live.get(piece.request_id)
            if generation is not None:
                self._deliver(generation, piece, now)
        for delta in deltas:
            generation = self._live.get(delta.request_id)
            if generation is not None and delta.finish_reason in _FAILED:
                self._fail(generation, _failure(delta, generation.life), delta.finish_reason)
        for output in processed.finished:
            generation = self._live.get(output.request_id)
            if generation is not None:
                self._finish(generation, output)

    def _count(self, generation: Generation, delta: RequestDelta, now: float) -> None:
        life, count = generation.life, len(delta.token_ids)
        if delta.index == 0 and delta.prompt is not None:
            generation.prompt_use = delta.prompt
        self._observer.delivered(life, delta.index, count, now)
        if life.first_token is None:
            life.first_token = now
        life.last_tokens[delta.index] = now
        life.num_output_tokens += count

    def _deliver(self, generation: Generation, piece: TextDelta, now: float) -> None:
        # What comes at once may be any number: the reader had its turn only before and after.
        if generation._pending_weight > MAX_PENDING_TOKENS and generation._delivered < now:
            generation.abort("its reader is too slow")
            return
        if piece.finish_reason in _FAILED:
            piece.finish_reason = None  # the generation will say so
        generation._pending.append(piece)
        generation._pending_weight += generation._weight * len(piece.token_ids)
        generation._delivered = now
        generation.bell.ring()

    def _finish(self, generation: Generation, output: RequestOutput) -> None:
        error = next((c.error for c in output.completions if c.error is not None), None)
        if error is not None:  # its text could not be made, though its tokens were
            self._fail(generation, _failed(output.request_id, error), FinishReason.ERROR)
            return
        generation.result = output
        self._forget(generation)
        self._observer.finished(generation.life, output, output.completions[0].finish_reason)
        generation.bell.ring()

    def _fail(self, generation: Generation, failure: KvikError, why: FinishReason) -> None:
        """End it without output. Its siblings in the engine end too."""
        if generation.ended:
            return
        generation.failure = failure
        self._processor.discard(generation.request_id)
        self._forget(generation)
        self._engine.end(generation.request_id, None, FinishReason.ABORT)
        self._observer.finished(generation.life, None, _FAILED[why])
        generation.bell.ring()

    def _forget(self, generation: Generation) -> None:
        generation._ticket.release()
        del self._live[generation.request_id]


def _failure(delta: RequestDelta, life: GenerationRecord) -> KvikError:
    if delta.refused is not None:
        return OverloadError(delta.refused, delta.error or "the queue is full", 1.0, own=False)
    if delta.finish_reason is FinishReason.DEADLINE:
        return deadline_exceeded()
    if delta.finish_reason is FinishReason.ABORT:
        return aborted("the request was aborted", again=True)
    failure = _failed(delta.request_id, delta.error or "the engine did not say why")
    sent = life.streaming and life.first_token is not None
    return lost() if delta.again and not sent else failure


def _failed(request_id: str, error: str) -> KvikError:
    """What an exception says may tell of the machine: it is for the log."""
    _log.error("request %s failed: %s", request_id, escaped(error, MAX_LOGGED))
    return failed(request_id)


def _why(error: KvikError) -> str:
    if isinstance(error, OverloadError):
        return "deadline" if error.field == "deadline_ms" else "share" if error.own else "queue"
    return "unavailable" if isinstance(error, UnavailableError) else "invalid"
