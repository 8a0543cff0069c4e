"""The Python API for `asyncio`: an engine in a separate process or thread, for any number of
tasks."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from weakref import finalize

from kvik.config.config import ResolvedConfig
from kvik.core.config import SchedulerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import SCORE, EngineRequest, FinishReason, RequestDelta, last_deltas
from kvik.engine.client import EngineClient
from kvik.engine.output import (
    ClassificationOutput,
    EmbeddingOutput,
    OutputProcessor,
    RequestOutput,
    ScoreOutput,
    TextDelta,
    classification_output,
    embedding_output,
    merged,
    score_output,
)
from kvik.engine.remote import EngineState
from kvik.engine.sources import ThreadSource
from kvik.engine.stats import EngineStats
from kvik.engine.thread import LOOKAHEAD
from kvik.engine_process import engine_in_process
from kvik.errors import ConfigError, OverloadError, ParamError, UnavailableError, shown
from kvik.files import check_current_folder
from kvik.launch import check_no_role, check_one_engine, load_loop, load_tokenizer, resolve_config
from kvik.llm import Message, check_priority, either, engine_config, engine_request, tell_unenforced
from kvik.model_files import model_files
from kvik.prompts import Infill, Prompt, no_infill, one_prompt
from kvik.server.admission import Admission, Reservation
from kvik.server.texts import Texts
from kvik.text.chat_template import check_messages
from kvik.text.pooled_inputs import (
    PooledInput,
    check_dimensions,
    check_text,
    classifying,
    default_pooling,
    ids_input,
    pair_input,
    prompt_before,
    scoring,
    text_input,
    truncation,
)

PLACES = ("process", "thread")
NUM_TEXTS = 4  # texts tokenised or rendered at once, to stay within the limits of `Texts`


class AsyncLLM:
    """A loaded model for the tasks of one event loop: `async with AsyncLLM(model) as engine`.

    Any number of tasks may use it at once: their requests share one batch. Requests that do not fit
    into the engine's queue yet wait here, ordered by priority. A request whose task is cancelled,
    or whose stream is closed or garbage-collected, ends at once and frees its memory.

    Args:
        model: folder in Hugging Face format, GGUF file, hub id, or "" for the bundled story model.
        engine: "process": in a separate process, as for `kvik serve`, which is restarted after a
            crash; "thread": in a thread of this process.
        config: as for `LLM`.

    Raises:
        KvikError: the model or an option cannot be used; nothing was loaded.
    """

    def __init__(
        self, model: str | PathLike[str] = "", *, engine: str = "process", **config: Any
    ) -> None:
        if engine not in PLACES:
            raise ConfigError("engine", f"must be one of {', '.join(PLACES)}, not {shown(engine)}")
        self.resolved: ResolvedConfig = resolve_config(engine_config(model, config))
        check_no_role(self.resolved)
        self.model = fspath(model)
        self.default_params = model_files(Path(self.resolved.runner.model_path)).default_params()
        tokenizer = load_tokenizer(self.resolved)
        limit = self.resolved.scheduler.max_model_len
        self.texts = Texts(tokenizer, limit, model=self.resolved.model)
        if engine == "process":
            self.client = engine_in_process(self.resolved, sys.stderr.write)
        else:
            check_one_engine(self.resolved)
            check_current_folder()
            source = ThreadSource(partial(load_loop, self.resolved))
            self.client = EngineClient(self.resolved, [source])
        self._processor = OutputProcessor(tokenizer)
        self._admission = AdmissionQueue(self.resolved.scheduler, time.monotonic)
        self._text_places = asyncio.Semaphore(NUM_TEXTS)
        self._requests: dict[str, AsyncRequest] = {}  # by id, until they end or lose their reader
        self._serial = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- the engine ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to load the engine, unless already begun. Requests wait until it is loaded.

        Raises:
            RuntimeError: loading was begun in another event loop.
            UnavailableError: the engine was closed.
        """
        self._check_loop()
        if self._loop is None:
            if self.client.state is EngineState.CLOSED:
                raise UnavailableError("engine", self.client.reason)
            self._loop = asyncio.get_running_loop()
            self.client.start(self._take)

    async def start(self) -> None:
        """Load the engine, unless already loaded, and wait until it accepts requests.

        Raises:
            UnavailableError: the engine cannot be loaded, or was closed.
        """
        self.begin()
        await self.client.ready()

    async def close(self) -> None:
        """Free the model and its cache. Requests that have not ended raise `RuntimeError`; a closed
        engine cannot be used again."""
        if self._loop is None or not self._loop.is_closed():
            self._check_loop()
        await self.client.close()
        self._admission.close()
        await self.texts.close()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def stats(self) -> EngineStats:
        """Return statistics: the last known ones if the engine does not answer in a second."""
        self._check_loop()
        return await self.client.stats()

    async def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes; running requests continue. Returns the number of blocks that
        held one.

        Raises:
            UnavailableError: the engine does not answer within a second.
        """
        self._check_loop()
        return await self.client.reset_prefix_cache()

    async def sleep(self) -> None:
        """Free the model and its cache until `wake_up` or the next request, which loads them again.

        Raises:
            UnavailableError: the engine has requests, or is not ready.
        """
        self._check_loop()
        await self.client.sleep()

    async def wake_up(self) -> None:
        """Load the model again if it sleeps, and wait until it accepts requests. See `start`."""
        await self.start()

    async def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load a LoRA adapter in all engines, or in none; see `LLM.load_adapter`."""
        await self.start()
        await self.client.load_adapter(name, fspath(path))
        self.resolved = self.client.config

    async def unload_adapter(self, name: str) -> None:
        """See `LLM.unload_adapter`."""
        await self.start()
        await self.client.unload_adapter(name)
        self.resolved = self.client.config

    # -- requests --------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        sampling_params: SamplingParams | None = None,
    ) -> AsyncStream:
        """Complete one prompt, a text or token ids, and iterate over the text as it is generated.

        The request begins when its first delta, or its result, is awaited; errors are raised then.

        Args:
            params: None takes the model's own defaults.
            request_id: for `abort`, and in the deltas; None: generated.
            priority: with `policy="priority"` the smallest is served first.
            sampling_params: what vLLM calls `params`.
        """
        params = either("sampling_params", sampling_params, "params", params)
        request = self._request(request_id, params, priority)
        return AsyncStream(self, request, partial(self._encode, request, prompt))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        sampling_params: SamplingParams | None = None,
    ) -> AsyncStream:
        """Answer one conversation, a list of {"role", "content"}, and iterate over the text as it
        is generated. For the other arguments see `generate`."""
        params = either("sampling_params", sampling_params, "params", params)
        request = self._request(request_id, params, priority)
        return AsyncStream(self, request, partial(self._render, request, messages))

    async def embed(
        self,
        prompt: Prompt,
        pooling: str | None = None,
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        adapter: str = "",
    ) -> EmbeddingOutput:
        """Return a vector for one prompt; for the arguments see `LLM.embed`."""
        plain = no_infill(one_prompt(prompt))
        model = self.resolved.model
        check_dimensions(model.pooling, model.hidden_size, dimensions)
        before = prompt_before(model.pooling, prompt_name)
        keep = truncation(truncate_prompt_tokens, self.texts.max_model_len)
        request = self._request(request_id, SamplingParams(adapter=adapter), 0)
        request.pooling = pooling or default_pooling(model.pooling)
        request.prompt = plain if isinstance(plain, str) else None

        make = partial(text_input, pooling=model.pooling, limit=keep)

        async def encode() -> list[int]:
            if not isinstance(plain, str):
                return ids_input(model.pooling, plain, keep).ids
            return (await self._input(make, (before + plain,), keep)).ids

        stream = AsyncStream(self, request, encode)
        return embedding_output(await stream.result(), normalize=normalize, dimensions=dimensions)

    async def score(
        self,
        text_1: str,
        text_2: str,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
    ) -> ScoreOutput:
        """Return a reranker's score of how well two texts match; for the arguments see
        `LLM.score`."""
        pooling = scoring(self.resolved.model.pooling)
        keep = truncation(truncate_prompt_tokens, self.texts.max_model_len)
        make = partial(pair_input, pooling=pooling, instruction=instruction, limit=keep)
        encode = partial(self._input, make, (text_1, text_2), keep)
        output = await self._scored(request_id, "", encode)
        return score_output(output, pooling.function)

    async def classify(
        self,
        prompt: Prompt,
        second_text: str | None = None,
        *,
        use_activation: bool = True,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        adapter: str = "",
    ) -> ClassificationOutput:
        """Return how likely each label of a classifier is for one prompt, or for a pair of texts;
        for the arguments see `LLM.classify`."""
        plain = no_infill(one_prompt(prompt))
        pooling = classifying(self.resolved.model.pooling)
        keep = truncation(truncate_prompt_tokens, self.texts.max_model_len)
        special, before = add_special_tokens, prompt_before(pooling, None)
        text = partial(text_input, pooling=pooling, limit=keep, special=special)
        pair = partial(pair_input, pooling=pooling, instruction=None, limit=keep)

        async def encode() -> PooledInput:
            if second_text is not None:
                return await self._input(pair, (check_text(plain), second_text), keep)
            if not isinstance(plain, str):
                return ids_input(pooling, plain, keep)
            return await self._input(text, (before + plain,), keep)

        output = await self._scored(request_id, adapter, encode)
        function = pooling.function if use_activation else "none"
        return classification_output(output, pooling.labels, function)

    async def _scored(
        self,
        request_id: str | None,
        adapter: str,
        encode: Callable[[], Awaitable[PooledInput]],
    ) -> RequestOutput:
        """Return what the model's head returns for an input."""
        request = self._request(request_id, SamplingParams(adapter=adapter), 0)
        request.pooling = SCORE

        async def ids() -> list[int]:
            encoded = await encode()
            request.second_text = encoded.second_text
            return encoded.ids

        return await AsyncStream(self, request, ids).result()

    async def _input(
        self, make: Callable[..., PooledInput], texts: Sequence[str], keep: int | None
    ) -> PooledInput:
        """Tokenise texts to pool; see `Texts.input`."""
        async with self._text_places:
            return await self.texts.input(make, texts, keep)

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream ends with the finish reason "abort". Returns whether it was
        known."""
        self._check_loop()
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.aborted = True
        if request.sent:
            self.client.end(request_id)
        else:
            self._admission.leave(request_id)
        return True

    # -- inside ----------------------------------------------------------------------------------

    def _check_loop(self) -> None:
        """Raise `RuntimeError` in another event loop than the engine's."""
        if self._loop not in (None, asyncio.get_running_loop()):
            raise RuntimeError("this AsyncLLM belongs to another event loop")

    def _request(
        self, request_id: str | None, params: SamplingParams | None, priority: int
    ) -> AsyncRequest:
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ParamError("params", f"must be SamplingParams, not {shown(params)}")
        check_priority(priority, self.resolved.scheduler.policy)
        if request_id is None:
            request_id = f"async-{next(self._serial)}"
        elif not isinstance(request_id, str):
            raise ParamError("request_id", f"must be a string, not {shown(request_id)}")
        return AsyncRequest(request_id, params, priority)

    async def _encode(self, request: AsyncRequest, prompt: Prompt) -> list[int]:
        plain = one_prompt(prompt)
        if isinstance(plain, Infill):
            async with self._text_places:
                texts, params = (plain.prefix, plain.suffix), request.params
                ids, request.params, _ = await self.texts.infill(*texts, params)
            return ids
        if not isinstance(plain, str):
            return plain
        request.prompt = plain
        async with self._text_places:
            ids = await self.texts.encode(plain)
        if not ids:
            raise ParamError("prompt", "must not be empty")
        return ids

    async def _render(self, request: AsyncRequest, messages: Sequence[Message]) -> list[int]:
        plain = check_messages(messages)
        async with self._text_places:
            request.prompt = await self.texts.render(plain)
            return await self.texts.encode(request.prompt, add_special_tokens=False)

    async def _submit(
        self, request: AsyncRequest, ids: Callable[[], Awaitable[list[int]]], *, streaming: bool
    ) -> None:
        """Send a request to the engine when its queue has room."""
        self.begin()
        if request.request_id in self._requests:
            raise ParamError("request_id", f"{request.request_id!r} is already being served")
        self._requests[request.request_id] = request
        prompt_ids = await ids()
        params, unenforced = await self.texts.checked(request.params)
        tell_unenforced(unenforced)
        make = partial(
            engine_request,
            request.request_id,
            prompt_ids,
            params,
            self.texts.tokenizer,
            priority=request.priority,
            pooling=request.pooling,
            second_text=request.second_text,
        )
        made = await asyncio.to_thread(make) if params.words else make()
        self.client.check(made)
        if not (request.aborted or request.closed):
            request.reservation = await self._admission.admit(made)
        if not (request.aborted or request.closed):
            await self.client.ready()
        if request.closed:  # meanwhile, by another task
            if request.reservation is not None:
                request.reservation.release()
                self._admission.update()
            return
        self._processor.add(made, request.prompt, streaming=streaming)
        if request.aborted:
            siblings, now = range(made.params.n), time.monotonic()
            self._take(last_deltas(made.request_id, siblings, now, None, reason=FinishReason.ABORT))
            return
        self.client.add(made)
        request.sent = True

    def _take(self, deltas: list[RequestDelta]) -> None:
        """Pass deltas of any number of requests to their readers."""
        processed = self._processor.process(deltas)
        for request_id, index, reason, error in processed.to_end:
            self.client.end(request_id, index, reason, error)
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is not None and request.reservation is not None and delta.token_ids:
                request.reservation.started(delta.index)
        for piece in processed.deltas:
            request = self._requests[piece.request_id]
            request.pending.append(piece)
            request.changed.set()
        for output in processed.finished:
            request = self._requests[output.request_id]
            request.output = output
            request.changed.set()
            self._forget(request)
        self._admission.update()

    def _forget(self, request: AsyncRequest) -> None:
        """Remove a request, and end it if it has not ended."""
        if self._requests.get(request.request_id) is not request:
            return
        del self._requests[request.request_id]
        self._processor.discard(request.request_id)
        if not request.sent:
            self._admission.leave(request.request_id)
        elif request.output is None:
            self.client.end(request.request_id)
        if request.reservation is not None:
            request.reservation.release()
            self._admission.update()


class AsyncStream(AsyncIterator[TextDelta]):
    """The deltas of one request, for one reader. After the last one, `output` holds the result.

    Text is generated whether or not it is read: text that a slow reader has not taken is merged
    into one delta per completion. Iterating raises the error of an invalid request, and
    `RuntimeError` after the last delta if the engine failed in it.
    """

    def __init__(
        self, engine: AsyncLLM, request: AsyncRequest, ids: Callable[[], Awaitable[list[int]]]
    ) -> None:
        self.request_id = request.request_id
        self.output: RequestOutput | None = None
        self._engine = engine
        self._request = request
        self._ids = ids
        self._begun = False
        self._deltas: deque[TextDelta] = deque()
        self._end = finalize(self, _forget_soon, engine, request)
        self._end.atexit = False

    async def __anext__(self) -> TextDelta:
        await self._wait(until_end=False)
        if not self._deltas:
            self._deltas += self._request.take()
        if self._deltas:
            return self._deltas.popleft()
        self._check()
        raise StopAsyncIteration

    async def result(self) -> RequestOutput:
        """Wait for the whole output; deltas that were not read are discarded.

        Raises:
            RuntimeError: the engine failed, or the stream was closed before the end.
        """
        await self._wait(until_end=True)
        self._deltas.clear()
        self._request.take()
        self._check()
        if self.output is None:
            raise RuntimeError(f"{self.request_id} was closed before it had a result")
        return self.output

    async def aclose(self) -> None:
        """End the request and discard deltas that were not read."""
        self._end.detach()
        self._engine._forget(self._request)
        self._deltas.clear()
        self._request.take()
        self._request.closed = True
        self._request.changed.set()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def _wait(self, *, until_end: bool) -> None:
        """Wait for the next delta, or for the end. If the wait is interrupted, the request ends."""
        request = self._request
        try:
            if not self._begun and not request.closed:
                self._begun = True
                await self._engine._submit(request, self._ids, streaming=not until_end)
            while not request.ended and (until_end or not (self._deltas or request.pending)):
                request.changed.clear()
                await request.changed.wait()
        except BaseException:
            await self.aclose()
            raise
        self.output = request.output

    def _check(self) -> None:
        """Raise `RuntimeError` if the engine failed in the request."""
        completions = [] if self.output is None else self.output.outputs
        error = next((c.error for c in completions if c.error is not None), None)
        if error is not None:
            raise RuntimeError(f"{self.request_id}: {error}")


@dataclass(slots=True, eq=False)
class AsyncRequest:
    """A request, and the output that its reader has not taken yet."""

    request_id: str
    params: SamplingParams
    priority: int
    pooling: str | None = None
    second_text: int = 0
    prompt: str | None = None  # its text; None: token ids
    reservation: Reservation | None = None
    sent: bool = False  # it was sent to the engine
    aborted: bool = False  # it was aborted by its id; its last deltas are still delivered
    closed: bool = False  # its reader closed it; nothing more is delivered
    pending: list[TextDelta] = field(default_factory=list)
    output: RequestOutput | None = None
    # Set when there is output to take, or the request has ended.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.closed or self.output is not None

    def take(self) -> list[TextDelta]:
        """Return the text since the last call, as one delta per completion."""
        pending, self.pending = self.pending, []
        return merged(pending)


Place = asyncio.Future[Reservation | None]


class AdmissionQueue:
    """Admits requests to the engine's queue while it has room, ordered by priority.

    Args:
        clock: seconds.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._limit = min(LOOKAHEAD, config.max_queued_requests)
        self._queue = Admission(self._limit, config.max_queued_tokens, shared=False, clock=clock)
        self._waiting: list[tuple[int, int, EngineRequest, Place]] = []  # a heap
        self._places: dict[str, Place] = {}  # of waiting requests, by id
        self._serial = itertools.count()

    async def admit(self, request: EngineRequest) -> Reservation | None:
        """Wait for a place in the queue; None: `leave` was called.

        Raises:
            RuntimeError: the engine was closed.
        """
        place: Place = asyncio.get_running_loop().create_future()
        self._places[request.request_id] = place
        heappush(self._waiting, (request.priority, next(self._serial), request, place))
        self.update()
        try:
            return await place
        except asyncio.CancelledError:
            if (
                place.done()
                and not place.cancelled()
                and (reservation := place.result()) is not None
            ):
                reservation.release()
            raise
        finally:
            if self._places.get(request.request_id) is place:  # else the id is in use again
                del self._places[request.request_id]
            self.update()

    def leave(self, request_id: str) -> None:
        """Take a request out of the queue, if it waits."""
        place = self._places.get(request_id)
        if place is not None and not place.done():
            place.set_result(None)

    def update(self) -> None:
        """Admit waiting requests while there is room."""
        while self._waiting:
            _, _, request, place = self._waiting[0]
            if not place.done():  # else it has left or was cancelled
                n = min(request.params.n, self._limit)
                try:
                    place.set_result(self._queue.admit("", n, len(request.prompt_token_ids)))
                except OverloadError:
                    return
            heappop(self._waiting)

    def close(self) -> None:
        """Refuse all waiting requests."""
        for place in self._places.values():
            if not place.done():
                place.set_exception(RuntimeError("the engine was closed"))


def _forget_soon(engine: AsyncLLM, request: AsyncRequest) -> None:
    """Schedule the removal of a request whose stream was garbage-collected, from any thread: the
    garbage collector may run anywhere."""
    if engine._loop is not None:
        with suppress(RuntimeError):  # the event loop was closed
            engine._loop.call_soon_threadsafe(engine._forget, request)
