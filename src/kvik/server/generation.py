"""Generations: from what a caller wants to text as it comes, whatever happens on the way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kvik.config.errors import KvikError, OverloadError, UnavailableError
from kvik.core.types import EngineRequest, FinishReason, PromptUse, RequestDelta
from kvik.engine.async_client import AsyncEngineClient, EngineState
from kvik.engine.output import OutputProcessor, RequestOutput, TextDelta, merged
from kvik.server.admission import Admission, Ticket
from kvik.server.bell import Bell
from kvik.server.errors import called
from kvik.server.escape import escaped
from kvik.server.failures import aborted, deadline_exceeded, failed, lost, not_ready
from kvik.server.intake import Draft, GenerationRequest, Intake, Limits
from kvik.server.observer import Life, Observer
from kvik.server.texts import Texts

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
        life: Life,
        ticket: Ticket,
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
        limits: Limits,
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
            with called(prompt=request.field):
                drafts.append(await self._intake.draft(request, tenant, arrived))
        self._check_ready()
        for request, draft in zip(requests, drafts, strict=True):
            with called(prompt=request.field):
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
        draft: Draft,
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
        life = Life(
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


def _failure(delta: RequestDelta, life: Life) -> KvikError:
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
