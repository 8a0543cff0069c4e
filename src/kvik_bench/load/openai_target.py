"""Sends requests to a server with an OpenAI-compatible API, over HTTP. Needs aiohttp (the extra
`bench`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import aiohttp
import msgspec

from kvik.cli.openai_stream import (
    Chunk,
    Event,
    EventTooLarge,
    SseParser,
    StreamedChoice,
    StreamedUsage,
    error_message,
)
from kvik.errors import ConfigError
from kvik_bench.load.metrics import CONNECT, RequestRecord
from kvik_bench.load.workload import Content, LoadRequest


@dataclass(frozen=True, slots=True)
class Dialect:
    """The optional fields of the OpenAI API that a server accepts, found by trying them."""

    limit: str = "max_tokens"  # or "max_completion_tokens": the name of the token limit
    ignore_eos: bool = True  # answers of the full length
    usage: bool = True  # token counts at the end of a stream
    running_usage: bool = True  # token counts with each chunk

    def fields(self, output_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {self.limit: output_tokens}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.usage:
            options = {"include_usage": True}
            if self.running_usage:
                options["continuous_usage_stats"] = True
            fields["stream_options"] = options
        return fields

    def names(self) -> tuple[str, ...]:
        """Return the names of the fields that are sent."""
        fields = self.fields(0)
        options = fields.pop("stream_options", {})
        return (*fields, *options)

    def after_refusal(self, message: str) -> Dialect | None:
        """Return the dialect to try after a server refused a request with this message; None:
        none."""
        if "max_completion_tokens" in message and self.limit == "max_tokens":
            return replace(self, limit="max_completion_tokens")
        if "ignore_eos" in message and self.ignore_eos:
            return replace(self, ignore_eos=False)
        if "continuous_usage_stats" in message and self.usage and self.running_usage:
            return replace(self, running_usage=False)
        if ("stream_options" in message or "include_usage" in message) and self.usage:
            return replace(self, usage=False)
        # The message names no field.
        plainer = Dialect(self.limit, ignore_eos=False, usage=self.usage, running_usage=False)
        if plainer != self:
            return plainer
        return replace(self, usage=False) if self.usage else None


MAX_DETAIL = 200  # characters kept of what a server says about an error


class BrokenAnswer(Exception):
    """An answer that is not valid."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail[:MAX_DETAIL]


class AnswerReader:
    """Reads the bytes of a stream and records each chunk of output with its time.

    Tokens are counted by the server's `usage` if it comes with each chunk. Otherwise a chunk counts
    as one token, and the sum is compared with the usage at the end.
    """

    def __init__(self, record: RequestRecord, decoder: msgspec.json.Decoder[Chunk]) -> None:
        self._record = record
        self._decode = decoder.decode
        self._sse = SseParser()
        self._texts: list[str] = []
        self._usage: StreamedUsage | None = None
        self._running = False  # counts come with the chunks, not only after them
        self._counted = 0  # tokens recorded so far
        self._finish: float | None = None
        self._finish_was_empty = False
        self.done = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at `now`. Raises `BrokenAnswer`."""
        try:
            events = self._sse.feed(data)
        except EventTooLarge as error:
            raise BrokenAnswer("bad chunk", str(error)) from None
        for event in events:
            if event.data == b"[DONE]":
                self.done = True
            elif not self.done:
                self._take(event, now)

    def end(self) -> None:
        """End the stream and finalise the counts. Raises `BrokenAnswer`."""
        record, usage = self._record, self._usage
        if not self.done:
            raise BrokenAnswer("no [DONE]", "the stream ended early")
        if not record.times:
            raise BrokenAnswer("empty answer", "no output came")
        if usage is not None and usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens
        if usage is not None and usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage is None or usage.completion_tokens is None:
            record.assumed = True
        else:
            # An end-of-text token has no text; it came with the finish reason.
            if self._finish_was_empty and usage.completion_tokens == self._counted + 1:
                self._record_output(self._finish or record.times[-1], 1)
            record.output_tokens = usage.completion_tokens
        record.finished = record.times[-1] if self._finish is None else self._finish

    def _take(self, event: Event, now: float) -> None:
        if event.name == b"error":
            raise BrokenAnswer("error event", event.data.decode(errors="replace"))
        try:
            chunk = self._decode(event.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise BrokenAnswer("bad chunk", event.data.decode(errors="replace")) from None
        if bytes(chunk.error) != b"null":
            raise BrokenAnswer("error event", bytes(chunk.error).decode(errors="replace"))
        total = None
        if chunk.usage is not None:
            self._usage, total = chunk.usage, chunk.usage.completion_tokens
        for choice in chunk.choices or ():
            self._take_choice(choice, total, now)

    def _take_choice(self, choice: StreamedChoice, total: int | None, now: float) -> None:
        """Record a choice; `total`: tokens of the answer so far, if the server reports them."""
        has_output, ends = self._has_output(choice), choice.finish_reason is not None
        if ends and self._finish is None:
            self._finish = now
            self._finish_was_empty = not has_output
        # Usage that comes only at the end is not a running count, unless there was no chunk before.
        self._running |= bool(total) and not (ends and self._counted)
        if not (total and self._running):
            if has_output:
                self._record_output(now, 1)
        elif not self._counted:
            if has_output:
                self._record_output(now, total)
        elif total > self._counted and (has_output or ends):
            self._record_output(now, total - self._counted)

    def _has_output(self, choice: StreamedChoice) -> bool:
        text, delta, more = choice.text, choice.delta, False
        if delta is not None:
            text = delta.content
            thought = delta.reasoning_content or delta.reasoning
            more = bool(thought or delta.refusal or delta.tool_calls)
        if text:
            self._texts.append(text)
        return bool(text) or more

    def _record_output(self, now: float, tokens: int) -> None:
        self._record.chunk(now, tokens)
        self._counted += tokens


ROUTES: Mapping[str, str] = {"completions": "/completions", "chat": "/chat/completions"}
CONNECT_SECONDS = 30.0
# Servers close idle connections, some after 5 s; a request must not run into that.
KEEP_ALIVE_SECONDS = 4.0
AFTER_DONE_SECONDS = 0.5  # wait for the end of the stream, so that the connection can be reused
MAX_ERROR_BYTES = 4096

# Errors after which every request would fail, with a hint.
REFUSALS: Mapping[str, str] = {
    "HTTP 400": "",
    "HTTP 401": "; --api-key gives a key",
    "HTTP 403": "; --api-key gives a key",
    "HTTP 404": "; --model names another model, --endpoint chat another route",
    "HTTP 405": "; --endpoint chat is another route",
    "HTTP 422": "",
}
DISLIKES = ("HTTP 400", "HTTP 422")  # possibly because of one field


@dataclass(frozen=True, slots=True)
class TargetServer:
    """The server that requests are sent to, and the form of these requests."""

    url: str  # with or without the ending /v1
    endpoint: str  # "completions" or "chat"
    # Its name there. Of several, separated by commas, each conversation takes one, such as the name
    # of an adapter.
    model: str
    api_key: str = field(default="", repr=False)
    extra: Mapping[str, object] = field(default_factory=dict)  # fields added to each request
    timeout: float = 600.0  # seconds that a request may take in all
    dialect: Dialect = field(default_factory=Dialect)

    def route(self, path: str) -> str:
        base = self.url.rstrip("/")
        return (base if base.endswith("/v1") else base + "/v1") + path

    def body(self, request: LoadRequest) -> bytes:
        question = next(content for role, content in request.messages if role != "system")
        names = self.model.split(",")
        model = names[crc32(repr(question).encode()) % len(names)]
        fields: dict[str, object] = {"model": model, "stream": True}
        if self.endpoint == "chat":
            fields["messages"] = [
                {"role": role, "content": content} for role, content in request.messages
            ]
        else:
            fields["prompt"] = joined([content for _, content in request.messages])
        return msgspec.json.encode(
            {**fields, **self.dialect.fields(request.output_tokens), **self.extra}
        )


class OpenAITarget:
    """Sends each request once, without retries."""

    def __init__(self, server: TargetServer, session: aiohttp.ClientSession) -> None:
        self._server = server
        self._session = session
        self._url = server.route(ROUTES[server.endpoint])
        self._decoder = msgspec.json.Decoder(Chunk)
        self._clock = asyncio.get_running_loop().time

    async def send(self, request: LoadRequest, record: RequestRecord) -> str | None:
        """Send a request, and fill the record while the answer arrives.

        Sets `sent` as late as possible. Errors of the server do not raise: they are noted in the
        record, and None is returned instead of the answer's text. When cancelled, raises
        `CancelledError` and leaves the record unchanged.
        """
        body = self._server.body(request)
        answer = AnswerReader(record, self._decoder)
        record.sent = self._clock()
        try:
            async with self._session.post(self._url, data=body) as response:
                await self._read(response, answer)
            answer.end()
        except BrokenAnswer as error:
            record.fail(error.kind, error.detail)
        except TimeoutError as error:
            connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
            record.fail(CONNECT if connecting else "timeout", str(error))
        except aiohttp.ClientConnectorError as error:
            record.fail(CONNECT, str(error))
        except (aiohttp.ClientError, OSError) as error:
            record.fail("connection lost", f"{type(error).__name__} {error}".strip())
        return answer.text if record.completed else None

    async def _read(self, response: aiohttp.ClientResponse, answer: AnswerReader) -> None:
        if response.status != 200:
            detail = b""
            with suppress(aiohttp.ClientError):  # the status says enough
                detail = await response.content.read(MAX_ERROR_BYTES)
            raise BrokenAnswer(f"HTTP {response.status}", error_message(detail))
        if response.content_type != "text/event-stream":
            raise BrokenAnswer("not a stream", f"it is {response.content_type}")
        async for data in response.content.iter_any():
            answer.feed(data, self._clock())
            if answer.done:
                break
        with suppress(TimeoutError, aiohttp.ClientError):  # the answer is already complete
            async with asyncio.timeout(AFTER_DONE_SECONDS):
                await response.content.read()


@asynccontextmanager
async def connected(server: TargetServer) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session for any number of connections to the server."""
    headers = {
        "User-Agent": "kvik bench",
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",  # compressed chunks would arrive late
    }
    if server.api_key:
        headers["Authorization"] = f"Bearer {server.api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=server.timeout, sock_connect=CONNECT_SECONDS),
        headers=headers,
    ) as session:
        yield session


async def first_model(server: TargetServer, session: aiohttp.ClientSession) -> str:
    """Return the first model that the server lists.

    Raises:
        ConfigError: it cannot be reached, or lists none.
    """
    try:
        async with session.get(server.route("/models")) as response:
            body, status = await response.read(), response.status
    except (aiohttp.ClientError, OSError) as error:
        raise ConfigError("url", f"{server.url} cannot be reached: {error}") from None
    if status in (401, 403):
        refusal = f"HTTP {status}"
        raise ConfigError("url", f"{refusal} ({error_message(body)}){REFUSALS[refusal]}")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
        raise ConfigError("model", "must be given: the server does not list its models") from None


async def accepted(
    server: TargetServer, session: aiohttp.ClientSession, request: LoadRequest
) -> TargetServer:
    """Return the server with the optional fields that it accepts, found by sending a request.

    Temporary errors (overload, a broken stream) do not end the search.

    Raises:
        ConfigError: it cannot be reached, or refuses the plainest request too.
    """
    while True:
        now = asyncio.get_running_loop().time()
        record = RequestRecord(request.prompt_tokens, now, now)
        await OpenAITarget(server, session).send(request, record)
        error = record.error or ""
        if error == CONNECT:
            raise ConfigError("url", f"{server.url} cannot be reached: {record.detail}")
        if error not in REFUSALS:
            return server
        dialect = server.dialect.after_refusal(record.detail) if error in DISLIKES else None
        if dialect is None:
            reason = record.detail or "no reason given"
            raise ConfigError("url", f"{error} ({reason}){REFUSALS[error]}")
        server = replace(server, dialect=dialect)


def joined(contents: Sequence[Content]) -> Content:
    """Join contents to one prompt: ids are concatenated, texts are separated by an empty line."""
    texts = [content for content in contents if isinstance(content, str)]
    if texts:
        assert len(texts) == len(contents)
        return "\n\n".join(texts)
    return [token for content in contents if isinstance(content, list) for token in content]
