"""Generations: from an admitted request to its text or failure."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import NOTHING_ALLOWED, PARAMETERS, SamplingParams
from kvik.core.types import (
    EngineRequest,
    FinishReason,
    Handover,
    PageSource,
    Pin,
    PromptUse,
    RequestDelta,
)
from kvik.engine.client import EngineClient
from kvik.engine.output import OutputProcessor, OutputSoFar, RequestOutput, TextDelta, merged
from kvik.errors import (
    MODEL_NOT_FOUND,
    GroupLost,
    KvikError,
    OverloadError,
    ParamError,
    UnavailableError,
)
from kvik.server.admission import PRESSURE, Admission, KVUsage, Reservation, pressure, shortened
from kvik.server.errors import (
    aborted,
    deadline_exceeded,
    escaped,
    escaped_traceback,
    failed,
    lost,
    not_ready,
    rename_fields,
)
from kvik.server.texts import NO_TOKENIZER, Texts
from kvik.server.transfer import (
    ALONE,
    MAX_MOVED_TOKENS,
    MovedOutput,
    Resumption,
    Transfer,
    cannot_resume,
    moved_size,
    prompt_digest,
    signed,
    transfer_of,
)
from kvik.spec.visible_keys import NEVER
from kvik.text.detokenizer import NO_MARKS
from kvik.text.tokenizer import spelled

# Observers of generations, such as metrics and traces.


@dataclass(slots=True)
class GenerationRecord:
    """Facts about one generation for observers; times are in seconds of `time.monotonic`."""

    request_id: str
    tenant: str
    params: SamplingParams
    num_prompt_tokens: int
    streaming: bool
    arrived: float  # before tokenisation
    first_token: float | None = None  # arrival of its first tokens in the server's process
    last_tokens: dict[int, float] = field(default_factory=dict)  # by completion
    num_output_tokens: int = 0  # sum over all n completions
    operation: str = "text_completion"  # or "chat" or "embeddings"
    trace_parent: str | None = None  # the caller's trace, from the header `traceparent`
    adapter_field: str = "model"  # the field of the request that chose the adapter


class Observer:
    """Observes generations. Its methods are called in the event loop and must be fast; here they do
    nothing."""

    def arrived(self, record: GenerationRecord) -> None:
        """A request was admitted and sent to the engine."""

    def delivered(self, record: GenerationRecord, index: int, num_tokens: int, now: float) -> None:
        """Tokens of one completion arrived; `record` does not count them yet."""

    def finished(self, record: GenerationRecord, output: RequestOutput | None, reason: str) -> None:
        """A request ended; without output, it failed or was aborted.

        Args:
            reason: "stop" or "length" of its first completion; "moved": another server continues
                with it; "refused": by the engine, whose queue is full, after `refused`; else
                "abort", "deadline" or "error".
        """

    def refused(self, tenant: str, reason: str) -> None:
        """A request was not admitted.

        Args:
            reason: "queue" or "share" (full), "deadline" (too near), "unavailable" or "invalid".
        """


_log = logging.getLogger(__name__)

MAX_WORD_CHARS = 1 << 16
NO_HEADERS: Mapping[str, str] = {}
MAX_TRACE_PARENT = 128  # characters; known versions have 55
MAX_LOGGED = 500  # characters of an engine's error message
MAX_PENDING_TOKENS = 1 << 16  # tokens waiting for a reader; each logprob counts as one
_FAILED = {
    FinishReason.ABORT: "abort",
    FinishReason.DEADLINE: "deadline",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to generate from, in the same form for every API. The body was checked at
    decoding."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0  # smaller is more urgent; used only by the policy "priority"
    cache_salt: str = ""  # prefix blocks are shared only with the same salt (and tenant)
    deadline_ms: int | None = None  # milliseconds from now after which the result is worthless
    pins: tuple[Pin, ...] = ()  # prefixes to keep in the prefix cache
    pooling: str | None = None  # as in `EngineRequest`, for a vector instead of text
    second_text: int = 0  # likewise
    chat: bool = False  # the prompt is a rendered conversation
    # Texts to write for certain tokens.
    marks: Mapping[int, str] = field(default_factory=lambda: NO_MARKS)
    unenforced: tuple[str, ...] = ()  # parts of schemas that are not enforced
    movable: bool = True  # another server could continue it
    field: str = "prompt"  # the name of the prompt in the caller's request, for errors
    adapter_field: str = "model"  # the name of the adapter there

    @property
    def operation(self) -> str:
        """The name of what it asks for in OpenTelemetry's conventions."""
        return "embeddings" if self.pooling else "chat" if self.chat else "text_completion"


class GivenAway(Exception):
    """Another server is to continue a generation.

    Args:
        states: state of each output from the engine: it continues, or has ended.
        outputs: tokens and text of each output.
    """

    def __init__(
        self,
        states: Mapping[int, Handover | RequestDelta],
        outputs: Sequence[OutputSoFar],
        now: float,
    ) -> None:
        super().__init__("another server continues")
        self.states = states
        self.outputs = outputs
        self.now = now


class Generation:
    """One request being served. It has one reader, which waits for changes and takes the output."""

    def __init__(
        self,
        owner: Generations,
        request: EngineRequest,
        record: GenerationRecord,
        reservation: Reservation,
        changed: asyncio.Event,
        degraded: str,
        adapter: str,
    ) -> None:
        self.request_id = request.request_id  # random id, also used by the engine
        self.prompt_token_ids = request.prompt_token_ids
        self.record = record
        # Set when there is new output to `take`, or the generation ended. Shared by generations
        # that were started together.
        self.changed = changed
        # A parameter that the server changed under pressure ("max_tokens=64"), or "".
        self.degraded = degraded
        self.adapter = adapter  # digest of the one it chose; another may have that name by now
        self.unenforced: tuple[str, ...] = ()  # parts of a JSON Schema that are not enforced
        self.transfer = ALONE  # where its prompt is computed, and for whom
        # Where its prompt is kept for another server; set with the result.
        self.page_source: PageSource | None = None
        # Tokens of the prompt that were cached and pinned; set with the first tokens.
        self.prompt_use: PromptUse | None = None
        self.result: RequestOutput | None = None  # set when it ended well
        # Set when it did not, unless another server continues: `moved`.
        self.failure: KvikError | None = None
        self.moved: GivenAway | None = None
        # Time at which its answer began, in whole seconds since 1970.
        self.created = int(time.time())
        self.movable = False  # another server can continue it
        self.streams = False  # its client reads a stream, and gets all output so far
        self.replayed: list[TextDelta] = []  # output that another server has sent to the client
        self._n, self._logprobs = request.params.n, request.params.logprobs
        self._states: dict[int, Handover | RequestDelta] = {}  # see `GivenAway`
        self._max_tokens = request.params.max_tokens
        self._owner = owner
        self._reservation = reservation
        self._pending: list[TextDelta] = []
        self._weight = 1 + (request.params.logprobs or 0)
        self._pending_weight = 0
        self._delivered = 0.0  # arrival of its last delta

    @property
    def ended(self) -> bool:
        return (self.result or self.failure or self.moved) is not None

    def resumption(self, *, streams: bool) -> str:
        """Return the state with which another server continues. `streams`: the client reads a
        stream, and has all output so far."""
        moved, before = self.moved, self.transfer.resumed
        assert moved is not None
        outputs = []
        for index, made in enumerate(moved.outputs):
            sent = 0 if before is None else before.num_sent(index)
            sent = NEVER if streams else sent
            outputs.append(MovedOutput.of(index, made, moved.states[index], moved.now, sent))
        resumption = Resumption(
            self.request_id,
            self.created,
            prompt_digest(self.prompt_token_ids, self.adapter),
            self._max_tokens,
            streams or (before is not None and before.begun),
            outputs,
        )
        return signed(resumption, self.transfer.token)

    @property
    def moves_now(self) -> bool:
        """Whether another server can continue it from its current state."""
        logprobs = None if self.streams else self._logprobs  # the client has them
        size = moved_size(self._n, self.record.num_output_tokens, logprobs)
        return self.movable and self.transfer.moves and size <= MAX_MOVED_TOKENS

    def take(self) -> list[TextDelta]:
        """Return the output since the last call, without waiting: one delta for each completion."""
        pending, self._pending, self._pending_weight = self._pending, [], 0
        return merged(pending)

    def abort(self, reason: str = "the request was aborted", *, retry: bool = False) -> None:
        """Abort it; does nothing if it has ended. `retry`: ask the caller to retry."""
        self._owner._fail(self, aborted(reason, retry=retry), FinishReason.ABORT)


async def wait_for_change(generation: Generation) -> None:
    """Wait until this generation, or one that was started with it, has something new."""
    await generation.changed.wait()
    generation.changed.clear()


class Generations:
    """All generations of a server. `take` receives the engine client's output. Times are of
    `time.monotonic`, the engine's clock, which all processes of a machine share."""

    def __init__(
        self,
        engine: EngineClient,
        texts: Texts,
        admission: Admission,
        observers: Sequence[Observer],
        config: ServerConfig,
    ) -> None:
        self._engine = engine
        self._texts = texts
        self._admission = admission
        self._observers = tuple(observers)
        self._config = config
        self._kv_token = (config.kv_token or "").encode()
        self._kv_usage = KVUsage(engine)
        self._processor = OutputProcessor(texts.tokenizer)
        self.live: dict[str, Generation] = {}  # running generations, by request id

    def check_capacity(self, tenant: str, num_requests: int, field: str = "n") -> None:
        """Refuse requests that do not fit into the queue, before their prompts are processed.
        Raises errors as `start_all`; `field` of the caller's request makes several of it."""
        with self._counted_refusals(tenant), rename_fields(n=field):
            self._check_ready()
            self._admission.check(tenant, num_requests)

    async def start_all(
        self,
        requests: Sequence[GenerationRequest],
        tenant: str,
        *,
        streaming: bool,
        arrived: float | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> list[Generation]:
        """Admit requests and send them to the engine, all or none.

        Args:
            arrived: time of arrival by the engine's clock; None: now.
            headers: headers of the caller's request: its trace, and where prompts are computed.

        Raises:
            HttpError: a header requests something unsupported.
            ParamError, CapacityError: a request can never be served.
            OverloadError: the queue is full, or a deadline cannot be met.
            UnavailableError: the engine is not ready.
        """
        arrived = time.monotonic() if arrived is None else arrived
        changed = asyncio.Event()
        generations: list[Generation] = []
        with self._counted_refusals(tenant):
            role = self._engine.config.runner.role
            transfer = ALONE
            if not any(request.pooling for request in requests):
                transfer = transfer_of(headers, role, self._kv_token)
            if transfer.resumed is not None:
                self._check_resumed(transfer.resumed, requests)
            checked: list[tuple[EngineRequest, tuple[str, ...]]] = []
            for request in requests:
                with rename_fields(prompt=request.field, adapter=request.adapter_field):
                    engine_request, left_out = await self._engine_request(
                        request, tenant, arrived, transfer
                    )
                    self._engine.check(engine_request)
                checked.append((engine_request, left_out))
                await asyncio.sleep(0)  # prompts may be long, and many
            try:
                for request, (engine_request, left_out) in zip(requests, checked, strict=True):
                    record = GenerationRecord(
                        engine_request.request_id,
                        tenant,
                        engine_request.params,
                        len(engine_request.prompt_token_ids),
                        streaming,
                        arrived,
                        operation=request.operation,
                        trace_parent=_trace_parent(headers),
                        adapter_field=request.adapter_field,
                    )
                    generation = self._add(request, engine_request, record, changed)
                    generation.unenforced = (*request.unenforced, *left_out)
                    generation.transfer = transfer
                    alone = len(requests) == 1
                    generation.movable = alone and request.movable and _movable(engine_request)
                    if transfer.resumed is not None:
                        self._replay(generation, transfer.resumed)
                    generations.append(generation)
                    await asyncio.sleep(0)
            except BaseException:
                for generation in generations:
                    generation.abort()
                raise
        return generations

    def abort(self, request_id: str) -> bool:
        """Abort a generation. Return whether it existed."""
        generation = self.live.get(request_id)
        if generation is not None:
            generation.abort()
        return generation is not None

    def hand_over(self) -> None:
        """Hand over all movable generations whose callers support it to other servers."""
        for generation in self.live.values():
            adapter = self._engine.config.adapter_digest(generation.record.params.adapter)
            if generation.moves_now and generation.adapter == adapter:
                self._engine.hand_over(generation.request_id)

    def abort_all(self, reason: str) -> None:
        """Abort all generations at shutdown."""
        for generation in list(self.live.values()):
            generation.abort(reason, retry=True)

    def _check_resumed(self, resumed: Resumption, requests: Sequence[GenerationRequest]) -> None:
        """Raise `HttpError` unless the resumed state belongs to this very request."""
        request, *others = requests
        adapter = self._engine.config.adapter_digest(request.params.adapter)
        if others or resumed.prompt != prompt_digest(request.prompt_token_ids, adapter):
            reason = "belongs to another prompt: do all servers have the same model and adapters?"
            raise cannot_resume(reason)
        if len(resumed.outputs) != request.params.n or not resumed.unfinished:
            raise cannot_resume("belongs to a request with another n, or to one that has ended")

    # Input

    @contextmanager
    def _counted_refusals(self, tenant: str) -> Iterator[None]:
        try:
            yield
        except KvikError as error:
            reason = _why(error)
            self._notify(lambda observer: observer.refused(tenant, reason))
            raise

    def _check_ready(self) -> None:
        if not self._engine.accepts:
            raise not_ready(self._engine.state)

    async def _engine_request(
        self, request: GenerationRequest, tenant: str, arrived: float, transfer: Transfer
    ) -> tuple[EngineRequest, tuple[str, ...]]:
        """Return the engine's form of the request (words as token ids, limits as a deadline), and
        the constraints that are not enforced."""
        policy = self._engine.config.scheduler.policy
        if request.priority and policy != "priority":
            raise ParamError(
                "priority",
                "Priority scheduling is not enabled: give 0, or start the server with --policy "
                f"priority instead of {policy}",
            )
        params = request.params
        if params.stop and self._texts.tokenizer is None:
            raise ParamError("stop", NO_TOKENIZER)
        if params.words:
            params = await self._spelled(params)
        params, left_out = await self._texts.of(tenant).checked(params)
        salt = request.cache_salt
        if tenant and not self._config.share_prefix_cache:  # without keys there is only one tenant
            salt = f"{tenant}\0{salt}"
        name, handovers = f"gen-{secrets.token_hex(12)}", tuple[Handover, ...]()
        if (resumed := transfer.resumed) is not None:
            name, handovers = resumed.name, resumed.handovers(time.monotonic())
            arrived = min(arrived, *(handover.report.arrival for handover in handovers))
        made = EngineRequest(
            name,
            request.prompt_token_ids,
            transfer.params(params if request.pooling else self._degraded(params)),
            priority=request.priority,
            cache_salt=salt,
            deadline=self._deadline(request, arrived),
            tenant=tenant,
            pins=request.pins,
            pooling=request.pooling,
            second_text=request.second_text,
            lends=transfer.lends,
            source=transfer.source,
            resumed=handovers,
        )
        return made, left_out

    async def _spelled(self, params: SamplingParams) -> SamplingParams:
        for name, words in params.words.items():
            if sum(map(len, words)) > MAX_WORD_CHARS:
                raise ParamError(name, f"at most {MAX_WORD_CHARS} characters in all")
        return await asyncio.to_thread(spelled, params, self._texts.tokenizer)

    def _degraded(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters, with fewer output tokens under pressure."""
        limit = self._config.pressure_max_tokens
        if limit is None:
            return params
        fill, waiting = self._admission.fill, self._admission.num_waiting > 0
        load = pressure(fill, self._kv_usage.read(), waiting=waiting)
        return params if load < PRESSURE else shortened(params, limit)

    def _deadline(self, request: GenerationRequest, arrived: float) -> float:
        seconds = self._config.request_timeout
        if request.deadline_ms is not None:
            seconds = min(seconds, request.deadline_ms / 1000)
        return arrived + seconds

    def _add(
        self,
        request: GenerationRequest,
        engine_request: EngineRequest,
        record: GenerationRecord,
        changed: asyncio.Event,
    ) -> Generation:
        """Admit a request and send it to the engine."""
        self._check_ready()
        if request.deadline_ms is not None and request.priority >= 0:
            # For urgent requests the queue is shorter than the estimate assumes.
            deadline = record.arrived + request.deadline_ms / 1000
            self._admission.check_deadline(record.tenant, deadline)
        params = engine_request.params
        reservation = self._admission.admit(record.tenant, params.n, record.num_prompt_tokens)
        is_degraded = params.max_tokens != request.params.max_tokens
        degraded = f"max_tokens={params.max_tokens}" if is_degraded else ""
        adapter = self._engine.config.adapter_digest(params.adapter)
        generation = Generation(
            self, engine_request, record, reservation, changed, degraded, adapter
        )
        try:
            self._processor.add(
                engine_request, None, streaming=record.streaming, marks=request.marks
            )
            self._engine.add(engine_request)
        except BaseException:
            self._processor.discard(engine_request.request_id)
            reservation.release()
            raise
        self.live[engine_request.request_id] = generation
        self._notify(lambda observer: observer.arrived(record))
        return generation

    def _replay(self, generation: Generation, resumed: Resumption) -> None:
        """Recreate the text that another server has generated, without sending it twice."""
        generation.created = resumed.created
        now, report = time.monotonic(), resumed.outputs[0].state.report
        generation.prompt_use = PromptUse(report.num_cached_tokens, report.num_pinned_tokens)
        for output in resumed.outputs:
            for deltas, target in zip(
                output.deltas(generation.request_id, now),
                (generation.replayed, generation._pending),
                strict=True,
            ):
                made = self._processor.process(deltas)
                target.extend(made.deltas)
                generation.record.num_output_tokens += sum(len(d.token_ids) for d in deltas)
                if output.last is not None:
                    generation._states.update({d.index: d for d in deltas if d.finish_reason})
                    generation._reservation.started(output.state.index)
                    continue
                for ending in made.to_end:
                    self._engine.end(*ending)
        generation.changed.set()

    # Output

    def take(self, deltas: list[RequestDelta]) -> None:
        """Deliver deltas of any number of requests to their readers."""
        now = time.monotonic()
        last = [delta for delta in deltas if delta.finish_reason is not None]
        if any(delta.handed is not None for delta in last):
            # Their text must not be finished, as another server continues it.
            deltas = [
                replace(delta, finish_reason=None, report=None, handed=None)
                if delta.handed is not None
                else delta
                for delta in deltas
            ]
        processed = self._processor.process(deltas)
        for request_id, index, reason, error in processed.to_end:
            self._engine.end(request_id, index, reason, error)
        for delta, count in zip(deltas, processed.counts, strict=True):
            self._note(delta, count, now)
        for piece in processed.deltas:
            generation = self.live.get(piece.request_id)
            if generation is not None:
                self._deliver(generation, piece, now)
        for delta in deltas:
            generation = self.live.get(delta.request_id)
            if generation is not None and delta.finish_reason in _FAILED:
                self._fail(generation, _failure(delta, generation.record), delta.finish_reason)
        for output in processed.finished:
            generation = self.live.get(output.request_id)
            if generation is not None:
                self._finish(generation, output)
        for delta in last:
            generation = self.live.get(delta.request_id)
            if generation is not None:
                generation._states[delta.index] = delta.handed or delta
                if len(generation._states) == generation._n:  # all have ended or were handed over
                    self._move(generation, now)

    def _note(self, delta: RequestDelta, count: int, now: float) -> None:
        generation = self.live.get(delta.request_id)
        if generation is None:
            return
        if delta.token_ids or delta.finish_reason not in (None, *_FAILED):
            generation._reservation.started(delta.index)
        if delta.index == 0 and delta.prompt is not None:
            generation.prompt_use = delta.prompt
        if count:
            self._count(generation, delta.index, count, now)
        if delta.page_source is not None:
            generation.page_source = delta.page_source

    def _count(self, generation: Generation, index: int, count: int, now: float) -> None:
        record = generation.record
        self._notify(lambda observer: observer.delivered(record, index, count, now))
        if record.first_token is None:
            record.first_token = now
        record.last_tokens[index] = now
        record.num_output_tokens += count

    def _deliver(self, generation: Generation, piece: TextDelta, now: float) -> None:
        # Deltas of one call may be any number: the reader cannot run in between.
        if generation._pending_weight > MAX_PENDING_TOKENS and generation._delivered < now:
            generation.abort("its reader is too slow")
            return
        if piece.finish_reason in _FAILED:
            piece.finish_reason = None  # `failure` reports it
        generation._pending.append(piece)
        generation._pending_weight += generation._weight * len(piece.token_ids)
        generation._delivered = now
        generation.changed.set()

    def _finish(self, generation: Generation, output: RequestOutput) -> None:
        error = next((c.error for c in output.outputs if c.error is not None), None)
        if error is not None:  # detokenising failed
            self._fail(generation, _failed(output.request_id, error), FinishReason.ERROR)
            return
        generation.result = output
        self._forget(generation)
        reason = output.outputs[0].finish_reason
        self._notify(lambda observer: observer.finished(generation.record, output, reason))
        generation.changed.set()

    def _move(self, generation: Generation, now: float) -> None:
        outputs = self._processor.so_far(generation.request_id)
        generation.moved = GivenAway(generation._states, outputs, now)
        self._processor.discard(generation.request_id)
        self._forget(generation)
        tokens = generation.record.num_output_tokens
        name = generation.request_id
        _log.info("request %s continues on another server after %d tokens", name, tokens)
        moved = FinishReason.MOVED.value
        self._notify(lambda observer: observer.finished(generation.record, None, moved))
        generation.changed.set()

    def _fail(self, generation: Generation, failure: KvikError, reason: FinishReason) -> None:
        """End a generation without output, with all its siblings in the engine."""
        if generation.ended:
            return
        generation.failure = failure
        self._processor.discard(generation.request_id)
        self._engine.end(generation.request_id, None, FinishReason.ABORT)
        self._forget(generation)
        record, outcome = generation.record, _FAILED[reason]
        if isinstance(failure, OverloadError):
            outcome, why = "refused", _why(failure)
            self._notify(lambda observer: observer.refused(record.tenant, why))
        self._notify(lambda observer: observer.finished(record, None, outcome))
        generation.changed.set()

    def _forget(self, generation: Generation) -> None:
        generation._reservation.release()
        del self.live[generation.request_id]

    def _notify(self, call: Callable[[Observer], None]) -> None:
        """Call a method of each observer. Their exceptions are logged and suppressed."""
        for observer in self._observers:
            try:
                call(observer)
            except Exception as error:
                _log.error("an observer failed:\n%s", escaped_traceback(error))


def _movable(request: EngineRequest) -> bool:
    """Return whether another server can continue a request with these parameters."""
    return request.params.prompt_logprobs is None and not (request.pooling or request.lends)


def _failure(delta: RequestDelta, record: GenerationRecord) -> KvikError:
    if delta.refused is not None:
        return OverloadError(
            delta.refused, delta.error or "the queue is full", 1.0, of_caller=False
        )
    if delta.finish_reason is FinishReason.DEADLINE:
        return deadline_exceeded()
    if delta.finish_reason is FinishReason.ABORT:
        return aborted("the request was aborted", retry=True)
    name, _, reason = (delta.error or "").partition(": ")
    if name in PARAMETERS:  # a constraint of the caller cannot be satisfied
        if name == "adapter":  # it was unloaded meanwhile
            return ParamError(record.adapter_field, reason, code=MODEL_NOT_FOUND)
        return ParamError(record.params.restriction if name == "structured" else name, reason)
    if delta.error == NOTHING_ALLOWED:
        return ParamError(record.params.restriction, "leaves no token, with the other parameters")
    if name != GroupLost.__name__:
        reason = ""
    failure = _failed(delta.request_id, delta.error or "the engine did not say why", reason)
    sent = record.streaming and record.first_token is not None
    return lost(reason) if delta.resendable and not sent else failure


def _failed(request_id: str, error: str, reason: str = "") -> KvikError:
    """Return the error of a failed request. The message of an exception is only logged; callers see
    `reason`."""
    _log.error("request %s failed: %s", request_id, escaped(error, MAX_LOGGED))
    return failed(request_id, reason)


def _why(error: KvikError) -> str:
    if isinstance(error, OverloadError):
        return (
            "deadline" if error.field == "deadline_ms" else "share" if error.of_caller else "queue"
        )
    return "unavailable" if isinstance(error, UnavailableError) else "invalid"


def _trace_parent(headers: Mapping[str, str]) -> str | None:
    """Return the caller's trace (W3C Trace Context), if it names one; only its length is
    checked."""
    header = headers.get("traceparent")
    return header if header and len(header) <= MAX_TRACE_PARENT else None
