"""Responses: JSON, and server-sent events to clients that may be slow or gone."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvik.core.types import TokenLogprobs
from kvik.engine.output import RequestOutput, TextDelta, merged
from kvik.errors import KvikError
from kvik.server.errors import HttpError, escaped, escaped_traceback, http_error
from kvik.server.generation import Generation, GenerationRequest, GivenAway, wait_for_change
from kvik.server.route import context_of, limit_unread, until_gone
from kvik.server.server import Server
from kvik.server.transfer import (
    MOVED_COMMENT,
    MOVED_END,
    MOVED_HEADER,
    SOURCE_HEADER,
    Prefilled,
    signed,
)

T = TypeVar("T")
INLINE_ITEMS = 2000  # 1 or 2 µs each: waking a thread takes longer


async def offload(num_items: int, work: Callable[[], T]) -> T:
    """Run `work` here if it is short, else in a thread, so as not to block the event loop.

    Args:
        num_items: number of tokens, messages or log probabilities that it loops over.
    """
    return work() if num_items <= INLINE_ITEMS else await asyncio.to_thread(work)


CHUNK_ITEMS = 16  # entries of a long list encoded per call


class LazyList:
    """A list whose entries are created while they are encoded, and then freed.

    Creating, collecting or freeing all of them at once would block other threads.

    Args:
        rows: the entries are made from these, one from each.
        chunk: entries encoded per call.
    """

    def __init__(
        self, rows: Sequence[T], make: Callable[[T], object], chunk: int = CHUNK_ITEMS
    ) -> None:
        self._rows = rows
        self._make = make
        self.chunk = chunk

    def __len__(self) -> int:
        return len(self._rows)

    def slice(self, start: int, stop: int) -> list[object]:
        return [self._make(row) for row in self._rows[start:stop]]


def encode_in_chunks(value: object) -> bytes:
    """Encode like `msgspec.json.encode`, but let other threads run in between.

    Accepts Structs without renamed fields, lists and `LazyList`s.
    """
    out: list[bytes] = []
    _add(value, out)
    return b"".join(out)


def _add(value: object, out: list[bytes]) -> None:
    match value:
        case msgspec.Struct():
            before = b"{"
            for name in value.__struct_fields__:
                item = getattr(value, name)
                if item is not msgspec.UNSET:
                    out += (before, msgspec.json.encode(name), b":")
                    _add(item, out)
                    before = b","
            out.append(b"{}" if before == b"{" else b"}")
        case LazyList() if len(value):
            _add_slices(len(value), value.slice, value.chunk, out)
        case LazyList():
            out.append(b"[]")
        # Structs may hold lazy lists, which msgspec cannot encode.
        case list() if any(isinstance(item, msgspec.Struct) for item in value[:CHUNK_ITEMS]):
            before = b"["
            for item in value:
                out.append(before)
                _add(item, out)
                before = b","
            out.append(b"]")
        case list() if len(value) > CHUNK_ITEMS:
            _add_slices(len(value), lambda start, stop: value[start:stop], CHUNK_ITEMS, out)
        case _:
            out.append(msgspec.json.encode(value))


def _add_slices(
    length: int, of: Callable[[int, int], list[object]], chunk: int, out: list[bytes]
) -> None:
    before = b"["
    for start in range(0, length, chunk):
        out += (before, msgspec.json.encode(of(start, start + chunk))[1:-1])
        before = b","
    out.append(b"]")


CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"  # ends a stream for OpenAI clients
HEARTBEAT = b": alive\n\n"  # a comment, which clients ignore


def event(data: bytes, name: str | None = None) -> bytes:
    """Return one event; `data` is JSON on one line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return b"".join((head, b"data: ", data, b"\n\n"))  # copies long data once


def json_event(value: object, name: str | None = None) -> bytes:
    return event(msgspec.json.encode(value), name)


HOLE = "\ue000text\ue000"  # placeholder for the text of an event


class Template:
    """An event whose JSON is encoded once per stream; only its text differs.

    Args:
        value: anything msgspec can encode; contains `HOLE` exactly once.
        name: of the event.
    """

    def __init__(self, value: object, name: str | None = None) -> None:
        encoded = event(msgspec.json.encode(value), name)
        self._before, hole, self._after = encoded.partition(msgspec.json.encode(HOLE))
        if not hole:
            raise ValueError("the value has no hole")

    def fill(self, text: str) -> bytes:
        """Return the event with `text` in place of `HOLE`."""
        return self._before + msgspec.json.encode(text) + self._after


def json_response(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


DEGRADED_HEADER = "x-kvik-degraded"
UNENFORCED_HEADER = "kvik-unenforced"
MAX_HEADER_CHARS = 2000
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # no proxy buffering
_log = logging.getLogger(__name__)


class ResponseFormat(ABC):
    """How an API presents generations: as one object, or as a stream of events."""

    heartbeat = HEARTBEAT  # the event that keeps an idle stream alive
    resumable = True  # whether a stream that another server began can be continued

    @abstractmethod
    def complete(self, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """Return the response object."""

    def begin(self) -> bytes:
        """Return the events before the first text."""
        return b""

    def grow(self, position: int, deltas: Sequence[TextDelta]) -> bytes:
        """Return the events for new text.

        Args:
            position: index of the generation.
            deltas: at most one for each of its completions.
        """
        return b"".join(event for delta in deltas for event in self.events(position, delta))

    @abstractmethod
    def events(self, position: int, delta: TextDelta) -> Iterable[bytes]:
        """Return the events for one delta."""

    @abstractmethod
    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the events after the last text; not called after a failure."""

    def failed(self, error: HttpError) -> bytes:
        """Return the event with which a stream ends that has failed."""
        return json_event(error.body())


async def start_all(
    server: Server,
    request: Request,
    requests: Sequence[GenerationRequest],
    *,
    stream: bool | None = False,
) -> list[Generation]:
    """Start generations for the caller of a request; see `Generations.start_all`."""
    context, headers = context_of(request), request.headers
    return await server.generations.start_all(
        requests,
        context.caller.tenant,
        streaming=bool(stream),
        arrived=context.arrived,
        headers=headers,
    )


async def generation_response(
    request: Request, generations: Sequence[Generation], form: ResponseFormat, stream: bool | None
) -> Response:
    """Return the response for generations that were started together. Raises KvikError and
    ClientDisconnect as `wait_for_outputs`."""
    lends = generations[0].transfer.lends
    if stream and not lends:
        for generation in generations:
            generation.movable &= form.resumable
        return StreamReply(generations, form)
    try:
        outputs = await wait_for_outputs(request, generations)
    except GivenAway:
        return MovedReply(generations[0])
    if lends:
        return _prefilled(generations)
    num_items = sum(map(_num_logprobs, outputs))
    data = await offload(num_items, lambda: encode_in_chunks(form.complete(outputs)))
    headers = headers_of(generations)
    return Response(data, media_type="application/json", headers=headers)


MOVED_SECONDS = 30.0  # a response that another server continues stays open at most this long
MOVED_BEAT_SECONDS = 0.2  # between bytes sent to find out whether the proxy still needs it


class MovedReply(Response):
    """Reports that another server is to answer. It stays open until the proxy no longer needs it,
    since this server and its pages are needed until then."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(status_code=503, headers={MOVED_HEADER: "1"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, v) for name, v in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        watch = asyncio.ensure_future(until_gone(receive))
        try:
            await _hand_on(send, self._generation.resumption(streams=False).encode(), watch)
        finally:
            watch.cancel()


async def _hand_on(send: Send, resumption: bytes, watch: asyncio.Future[None]) -> None:
    """Send the resumption for another server, and wait until that server has begun."""
    await send({"type": "http.response.body", "body": resumption + MOVED_END, "more_body": True})
    until = asyncio.get_running_loop().time() + MOVED_SECONDS
    while asyncio.get_running_loop().time() < until and not watch.done():
        await asyncio.wait((watch,), timeout=MOVED_BEAT_SECONDS)
        # A client may half-close the connection and still read: only writing shows that it is gone.
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})
    if not watch.done():
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _prefilled(generations: Sequence[Generation]) -> Response:
    """Return the answer to a request whose prompts were computed for another server. It names pages
    only if there is a single prompt."""
    num_tokens = sum(len(generation.prompt_token_ids) for generation in generations)
    pages = generations[0].page_source if len(generations) == 1 else None
    response = json_response(Prefilled(num_tokens, pages.num_tokens if pages is not None else 0))
    if pages is not None:
        response.headers[SOURCE_HEADER] = signed(pages, generations[0].transfer.token)
    return response


class StreamReply(Response):
    """Generations as server-sent events.

    The response starts with the first tokens, so an earlier failure gets its own HTTP status. A
    later failure becomes an error event, which ends the stream.

    Args:
        generations: started together, in the order of `ResponseFormat.grow`.
    """

    media_type = CONTENT_TYPE
    send_seconds = 60.0  # that the response may wait for its client; then the request ends
    heartbeat_seconds = 15.0  # without an event, after which a heartbeat is sent

    def __init__(self, generations: Sequence[Generation], form: ResponseFormat) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**_STREAM_HEADERS, **headers_of(generations)})
        self._generations = generations
        self._form = form
        self._begun = False
        self._opened = False  # whether the client has the events before the first text
        self._beat = False  # whether a heartbeat is due
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        limit_unread(scope, self.send_seconds)
        with _watched(receive, self._generations) as watch:
            ticker = loop.create_task(self._tick())
            try:
                await self._run(send, watch)
                if self._generations[0].moved is None:
                    return
                if self._begun:
                    resumption = self._generations[0].resumption(streams=True).encode()
                    await _hand_on(send, MOVED_COMMENT + resumption, watch)
                    return
            finally:
                ticker.cancel()
        await MovedReply(self._generations[0])(scope, receive, send)

    async def _run(self, send: Send, watch: asyncio.Task[None]) -> None:
        """Write all events, or those up to the point where another server continues."""
        for position, generation in enumerate(self._generations):
            resumed = generation.transfer.resumed
            if resumed is not None and resumed.begun:  # recreate what was sent, without sending it
                self._opened = True
                self._form.begin()
                replayed, generation.replayed = generation.replayed, []
                if replayed:
                    grow = partial(self._form.grow, position, merged(replayed))
                    await offload(sum(len(delta.token_ids) for delta in replayed), grow)
        while True:
            await wait_for_change(self._generations[0])
            if watch.done():
                raise ClientDisconnect
            try:
                chunk, last = await self._next()
            except Exception as error:
                if not self._begun:
                    raise
                await self._write(send, self._error_event(error), True)
                return
            if self._generations[0].moved is not None:
                if chunk and self._begun:
                    await self._write(send, chunk, False)
                return
            if chunk or last:
                await self._write(send, chunk, last)
            if last:
                return

    async def _next(self) -> tuple[bytes, bool]:
        """Return the events to send now, and whether they are the last."""
        batches = [generation.take() for generation in self._generations]
        failure = next((g.failure for g in self._generations if g.failure is not None), None)
        last = all(generation.result is not None for generation in self._generations)
        if failure is not None and not self._begun:
            raise failure
        parts: list[bytes] = []
        if not self._opened and (any(batches) or last or self._beat):
            self._opened = True
            parts.append(self._form.begin())
        for position, deltas in enumerate(batches):
            if deltas:
                grow = partial(self._form.grow, position, deltas)
                parts.append(await offload(_num_of_prompt(deltas), grow))
        if failure is not None:
            parts.append(self._error_event(failure))
            return b"".join(parts), True
        if last:
            results = [g.result for g in self._generations if g.result]
            num_items = sum(map(_num_logprobs, results))  # which the last events may repeat
            parts.append(await offload(num_items, partial(self._form.end, results)))
        elif self._beat and not any(batches):
            parts.append(self._form.heartbeat)
        self._beat = False
        return b"".join(parts), last

    async def _write(self, send: Send, chunk: bytes, last: bool) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        if not self._begun:
            self._begun = True
            for generation in self._generations:
                generation.streams = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        await send({"type": "http.response.body", "body": chunk, "more_body": not last})

    def _error_event(self, error: Exception) -> bytes:
        if not isinstance(error, KvikError):
            _log.error("a stream could not be written:\n%s", escaped_traceback(error))
        return self._form.failed(http_error(error))

    async def _tick(self) -> None:
        """Check periodically for an idle stream: cheaper than a timer for each event."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.heartbeat_seconds / 4)
            if loop.time() - self._sent_at > self.heartbeat_seconds:
                self._beat = True
                self._generations[0].changed.set()


async def wait_for_outputs(
    request: Request, generations: Sequence[Generation]
) -> list[RequestOutput]:
    """Wait for the results of generations that were started together.

    Raises:
        KvikError: one of them failed; all are then aborted.
        GivenAway: another server continues the only one.
        ClientDisconnect: the client disconnected; all are then aborted.
    """
    with _watched(request.receive, generations) as watch:
        while not watch.done():
            for generation in generations:
                if generation.failure is not None:
                    raise generation.failure
                if generation.moved is not None:
                    raise generation.moved
            results = [g.result for g in generations if g.result is not None]
            if len(results) == len(generations):
                return results
            await wait_for_change(generations[0])
        raise ClientDisconnect


@contextmanager
def _watched(receive: Receive, generations: Sequence[Generation]) -> Iterator[asyncio.Task[None]]:
    """Watch the client while its generations run. The task is done when the client disconnects.
    Generations that have not ended by then, or by the end of the block, are aborted."""

    def abort() -> None:
        for generation in generations:
            generation.abort("its reader is gone")

    def lose(watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            abort()
            generations[0].changed.set()

    watch = asyncio.get_running_loop().create_task(until_gone(receive))
    watch.add_done_callback(lose)
    try:
        yield watch
    finally:
        watch.cancel()
        abort()


def _num_logprobs(output: RequestOutput) -> int:
    """Count the log probabilities in the response to a finished request."""
    return _count([*(c.logprobs or () for c in output.outputs), output.prompt_logprobs or ()])


def _num_of_prompt(deltas: Sequence[TextDelta]) -> int:
    """Count the prompt log probabilities in deltas. The rest of a delta is small."""
    return _count([delta.prompt_logprobs or () for delta in deltas])


def _count(rows: Iterable[Sequence[TokenLogprobs | None]]) -> int:
    # The last entry is as wide as all others; the first of a prompt is None.
    return sum(len(row) * (1 + len(row[-1].top)) for row in rows if row and row[-1] is not None)


def headers_of(generations: Sequence[Generation]) -> dict[str, str]:
    """Return the headers that name the parts of the request that are not fulfilled."""
    headers = {
        DEGRADED_HEADER: next((g.degraded for g in generations if g.degraded), ""),
        UNENFORCED_HEADER: "; ".join(next((g.unenforced for g in generations), ())),
    }
    limit = MAX_HEADER_CHARS
    return {name: escaped(value, limit)[:limit] for name, value in headers.items() if value}
