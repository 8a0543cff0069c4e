"""A server with an OpenAI-compatible API, over HTTP. Needs aiohttp (the extra `bench`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import aiohttp
import msgspec

from kvik.cli.openai_stream import Chunk
from kvik.errors import ConfigError
from kvik_bench.load.answer import AnswerReader, BrokenAnswer
from kvik_bench.load.dialect import Dialect
from kvik_bench.load.records import RequestRecord
from kvik_bench.load.workload import Content, LoadRequest

ROUTES: Mapping[str, str] = {"completions": "/completions", "chat": "/chat/completions"}
CONNECT_SECONDS = 30.0
# Servers close idle connections, some after 5 s; a request must not run into that.
KEEP_ALIVE_SECONDS = 4.0
AFTER_DONE_SECONDS = 0.5  # for the end of the stream, so that the connection can serve again
MAX_ERROR_BYTES = 4096

# Answers after which every request would fail, with what may help.
REFUSALS: Mapping[str, str] = {
    "HTTP 400": "",
    "HTTP 401": "; --api-key gives a key",
    "HTTP 403": "; --api-key gives a key",
    "HTTP 404": "; --model names another model, --endpoint chat another route",
    "HTTP 405": "; --endpoint chat is another route",
    "HTTP 422": "",
}
DISLIKES = ("HTTP 400", "HTTP 422")  # of a field, maybe


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send, and how.

    Attributes:
        url: with or without the ending /v1.
        endpoint: "completions" or "chat".
        extra: fields added to each request.
        timeout: seconds that a request may take in all.
    """

    url: str
    endpoint: str
    model: str
    api_key: str = field(default="", repr=False)
    extra: Mapping[str, object] = field(default_factory=dict)
    timeout: float = 600.0
    dialect: Dialect = field(default_factory=Dialect)

    def route(self, path: str) -> str:
        base = self.url.rstrip("/")
        return (base if base.endswith("/v1") else base + "/v1") + path

    def body(self, request: LoadRequest) -> bytes:
        fields: dict[str, object] = {"model": self.model, "stream": True}
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
    """Sends each request once; nothing is tried again."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self._server = server
        self._session = session
        self._url = server.route(ROUTES[server.endpoint])
        self._decoder = msgspec.json.Decoder(Chunk)
        self._clock = asyncio.get_running_loop().time

    async def send(self, request: LoadRequest, record: RequestRecord) -> str | None:
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
            record.fail("connect" if connecting else "timeout", str(error))
        except aiohttp.ClientConnectorError as error:
            record.fail("connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            record.fail("connection lost", f"{type(error).__name__} {error}".strip())
        return answer.text if record.completed else None

    async def _read(self, response: aiohttp.ClientResponse, answer: AnswerReader) -> None:
        if response.status != 200:
            detail = b""
            with suppress(aiohttp.ClientError):  # the status says enough
                detail = await response.content.read(MAX_ERROR_BYTES)
            raise BrokenAnswer(f"HTTP {response.status}", message_of(detail))
        if response.content_type != "text/event-stream":
            raise BrokenAnswer("not a stream", f"it is {response.content_type}")
        async for data in response.content.iter_any():
            answer.feed(data, self._clock())
            if answer.done:
                break
        with suppress(TimeoutError, aiohttp.ClientError):  # the answer is complete in any case
            async with asyncio.timeout(AFTER_DONE_SECONDS):
                await response.content.read()


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for any number of connections to the server."""
    headers = {
        "User-Agent": "kvik bench",
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",  # packed chunks would come late
    }
    if server.api_key:
        headers["Authorization"] = f"Bearer {server.api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=server.timeout, sock_connect=CONNECT_SECONDS),
        headers=headers,
    ) as session:
        yield session


async def first_model(server: Server, session: aiohttp.ClientSession) -> str:
    """The first model that the server lists.

    Raises:
        ConfigError: it cannot be reached, or lists none.
    """
    try:
        async with session.get(server.route("/models")) as response:
            body, status = await response.read(), response.status
    except (aiohttp.ClientError, OSError) as error:
        raise ConfigError("url", f"{server.url} cannot be reached: {error}") from None
    if status in (401, 403):
        raise ConfigError("url", f"HTTP {status} ({message_of(body)}){REFUSALS[f'HTTP {status}']}")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
        raise ConfigError("model", "must be given: the server does not list its models") from None


async def accepted(server: Server, session: aiohttp.ClientSession, request: LoadRequest) -> Server:
    """The server with the optional fields that it accepts, found by sending one request.

    What may pass (overload, a broken stream) is no reason to give up.

    Raises:
        ConfigError: it cannot be reached, or refuses the plainest request too.
    """
    while True:
        now = asyncio.get_running_loop().time()
        record = RequestRecord(request.prompt_tokens, now, now)
        await OpenAITarget(server, session).send(request, record)
        error = record.error or ""
        if error == "connect":
            raise ConfigError("url", f"{server.url} cannot be reached: {record.detail}")
        if error not in REFUSALS:
            return server
        dialect = server.dialect.after_refusal(record.detail) if error in DISLIKES else None
        if dialect is None:
            said = record.detail or "no reason given"
            raise ConfigError("url", f"{error} ({said}){REFUSALS[error]}")
        server = replace(server, dialect=dialect)


def joined(contents: Sequence[Content]) -> Content:
    """One prompt of several contents: ids one after another, texts with an empty line between."""
    texts = [content for content in contents if isinstance(content, str)]
    if texts:
        assert len(texts) == len(contents)
        return "\n\n".join(texts)
    return [token for content in contents if isinstance(content, list) for token in content]


def message_of(body: bytes) -> str:
    """The `error.message` of OpenAI's error body, else the body; on one line."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
        message = body.decode(errors="replace")
    return " ".join(message.split())
