"""A proxy in front of several servers that sends equal prefixes to the same server.

It knows neither the tokenizer nor the cache of a server. So it takes the prompt from the body, in
canonical form and in chunks of characters, and assumes that a server holds the prompts that it has
answered, corrected by the usage in its answers. Bytes pass through unchanged, as fast as the client
reads them. A request goes to another server only if no byte of an answer has arrived, or if its
server handed it over: then the other one continues it.

Servers may have different models. Which ones a server lacks is learned from its answers, so that
it works with keys and with adapters that come and go.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvik.core.block_pool import HASH_BYTES
from kvik.core.routing import ReplicaChoice, ReplicaRouter
from kvik.errors import KvikError
from kvik.server.access import Hosts
from kvik.server.errors import RETRY, HttpError, http_error, in_messages
from kvik.server.route import (
    BodyBudget,
    BodyLimits,
    Data,
    break_connection,
    limit_unread,
    read_bytes,
    until_gone,
)
from kvik.server.stored_responses import store_of
from kvik.server.transfer import (
    MAX_RESUMPTION,
    MOVED_COMMENT,
    MOVED_END,
    MOVED_HEADER,
    MOVES_HEADER,
    PREFILL_HEADER,
    RESUMED_HEADER,
    SOURCE_HEADER,
)

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")

log = logging.getLogger(__name__)

MIN_MISSING = 2  # missing chunks of a prompt below which the decode server computes it itself
MAX_PREFILLED = 1 << 16  # bytes of a prefill server's answer
PIECE = 256  # characters of a prompt per hash
MAX_PIECES = 2048  # chunks of a prompt that are hashed
LARGE_BODY = 256 << 10  # bytes of a body above which its prompt is hashed as it is written
NULL = msgspec.Raw(b"null")
LIFETIME = 600.0  # seconds for which a server is assumed to hold a prompt
ROWS = 64  # assumed batch size of a server
# Bodies are kept until their requests end, as another server may get them. No key was checked.
LIMITS = BodyLimits(max_bytes=64 << 20, seconds=60.0, total_bytes=1 << 30)
TAIL = 4096  # bytes at the end of an answer that are searched for its usage
# Bytes of a header of an answer. That with the ignored fields of a request may have 10 KiB, and a
# server whose answer cannot be read counts as failed.
MAX_HEADER = 64 << 10
HEALTH_SECONDS, HEALTH_TIMEOUT = 1.0, 2.0
LOOK_SECONDS = 0.5  # that a request waits for the health of servers that get none
CONNECT_SECONDS = 5.0
START_SECONDS = 30.0  # for the first server to answer; they may have been started with the proxy
UNREAD_SECONDS = 60.0  # for a client to read the next part of an answer
# Headers of a connection, not of the message (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
# The last four are the proxy's own.
NOT_PASSED_ON = HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect"),
    *(PREFILL_HEADER.encode(), SOURCE_HEADER.encode()),
    *(MOVES_HEADER.encode(), RESUMED_HEADER.encode()),
}
LET_GO_SECONDS = 10.0  # time after which a server that handed over a request may go
UNAVAILABLE = 503  # the server has not begun the request
RETRIED = (502, UNAVAILABLE, 504)  # another server may succeed
MAX_BEGUN = 2  # servers that may have begun the same request
STORED = re.compile(r"/responses/(resp_[^/]+)")
MODEL = re.compile(r"/models/(.+)$")
NOT_FOUND = 404
MAX_BODY = 1 << 20  # bytes of a server's health or of its list of models that are read
LACKS_SECONDS = 30.0  # after which a server is asked again for a model that it lacked
MAX_LACKED = 1024  # models that a server is known to lack; the oldest are forgotten
GENERATES = re.compile(r"/(chat/completions|completions?|messages|responses|generate)$")
SAFE_ID = re.compile(rb"[A-Za-z0-9_.-]{1,128}")
_PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,12})')
_canonical = msgspec.json.Encoder(order="deterministic").encode


# -- prompts of requests ---------------------------------------------------------------------------


def rendered(body: Mapping[str, Any]) -> bytes:
    """Return a request's prompt in a canonical form: in the order of the model's input, so that the
    turns of a conversation share a prefix."""
    first = [body.get(name) for name in ("model", "cache_salt", "tools", "system", "instructions")]
    parts = [_canonical(first)]
    for name in ("messages", "prompt", "input", "query", "text"):
        value = body.get(name)
        if isinstance(value, msgspec.Raw):
            parts.append(bytes(memoryview(value)[: MAX_PIECES * PIECE]))
        elif value is not None:
            entries = value if isinstance(value, list) else [value]
            if entries and isinstance(entries[0], int):
                entries = [entries]  # token ids
            parts += [_canonical(entry).strip(b'"[]') for entry in entries]
    return b"\n".join(parts)


class _Item(msgspec.Struct):
    """An item of `input`; see `_store_named`."""

    type: str | None = None
    id: str | None = None


class _LargeBody(msgspec.Struct):
    """The fields of a large body from which its server is chosen; prompts stay JSON. To decode all
    of it could stop all streams for seconds."""

    model: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = NULL
    system: msgspec.Raw = NULL
    instructions: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    input: msgspec.Raw = NULL
    query: msgspec.Raw = NULL
    text: msgspec.Raw = NULL
    session_id: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None


def _fields(body: Data) -> dict[str, Any]:
    """Decode a body."""
    if len(body) <= LARGE_BODY:
        fields: dict[str, Any] = msgspec.json.decode(body)
        return fields
    return msgspec.structs.asdict(msgspec.json.decode(body, type=_LargeBody))


def _items(value: object) -> list[_Item]:
    """Return the items of `input`; [] if it has none."""
    with suppress(msgspec.ValidationError):
        if isinstance(value, msgspec.Raw):
            return msgspec.json.decode(value, type=list[_Item])
        return msgspec.convert(value, list[_Item])
    return []


def _store_named(body: Mapping[str, Any]) -> str:
    """Return the name of the store that has what a request continues or refers to; "": there is
    none."""
    items = _items(body.get("input"))
    referred = (item.id for item in items if item.type in (None, "item_reference"))
    named = (body.get("previous_response_id"), *referred)
    return next(filter(None, (store_of(name) for name in named if isinstance(name, str))), "")


class RoutedPrompt(NamedTuple):
    """A prompt for the choice of a server."""

    hashes: Sequence[bytes] = ()  # of its pieces
    size: int = 0  # characters
    session: str = ""  # name shared by requests that belong together
    store: str = ""  # name of the store of the response that the request is about; "": of none
    model: str = ""  # that is named; "": none


def piece_hashes(text: bytes) -> list[bytes]:
    """Return the chained hashes of a prompt's full chunks."""
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, min(len(text) - PIECE + 1, MAX_PIECES * PIECE), PIECE):
        piece = text[start : start + PIECE]
        parent = blake2b(parent + piece, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def cached_share(tail: bytes) -> float | None:
    """Return the share of a prompt that was in the server's cache, according to the end of its
    answer; None if it is not reported."""
    cached, prompt = _CACHED_TOKENS.findall(tail), _PROMPT_TOKENS.findall(tail)
    if not cached or not prompt or not int(prompt[-1]):
        return None
    return min(1.0, int(cached[-1]) / int(prompt[-1]))


def passed_on(
    headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]
) -> list[tuple[bytes, bytes]]:
    """Return the headers that belong to the message, without those that `Connection` names."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {
        token.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for token in value.split(b",")
    }
    return [(name, value) for name, value in pairs if name not in dropped and name not in named]


class MovedMark:
    """Finds the mark in a stream with which a server hands it over."""

    def __init__(self) -> None:
        self.found = False  # whether the mark was found; the rest is for the next server
        self.state: bytes | None = None  # the complete rest; None if it is not complete yet
        self._rest = b"\n"  # the last forwarded byte, and a possible beginning of the mark

    def feed(self, part: bytes) -> bytes:
        """Process the next part of a stream and return the part for the client."""
        data = self._rest + part
        if not self.found:
            at = data.find(b"\n" + MOVED_COMMENT)
            if at < 0:
                longest = min(len(MOVED_COMMENT), len(data) - 1)
                sizes = (
                    n for n in range(longest, 0, -1) if data.endswith(b"\n" + MOVED_COMMENT[:n])
                )
                size = next(sizes, 0)
                end = len(data) - size
                self._rest = data[end - 1 :]
                return data[1:end]
            self.found, passed = True, data[1 : at + 1]
            data = data[at + 1 + len(MOVED_COMMENT) :]
        else:
            passed = b""
        state, end_mark, _ = data.partition(MOVED_END)
        self._rest = data
        if end_mark:
            self.state = state
        elif len(data) > MAX_RESUMPTION:
            raise ValueError("its description of where a stream continues is too long")
        return passed


# -- the servers -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Upstream:
    """A server behind the proxy."""

    url: str
    reason: str = "it was not asked yet"  # why it gets no requests; "" if it does
    role: str = "both"  # the role that it reports; see `EngineConfig`
    store: str = ""  # name of its `ResponseStore`
    refusal: str = ""  # why it last refused to continue a request of another server
    unfinished: int = 0
    requests: int = 0  # number sent to it
    errors: int = 0  # number of those that were lost

    @property
    def healthy(self) -> bool:
        return not self.reason


class UpstreamError(Exception):
    """Raised when a server gave no answer, or broke it off."""

    def __init__(self, error: Exception, *, closed: bool = False, sent: bool = True) -> None:
        super().__init__(_described(error))
        # The connection was closed before an answer, as a server may do with an idle connection,
        # which does not indicate a failure.
        self.closed = closed
        self.sent = sent  # the server may have received the request


class Proxy:
    """An ASGI application in front of servers with OpenAI's API.

    Args:
        urls: URLs of the servers, without a trailing slash or /v1.
        hosts: names under which it may be reached.
        timeout: maximum silence of a server during a request, in seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        hosts: Hosts,
        timeout: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.upstreams = [Upstream(url) for url in urls]
        self.retries = 0
        self.prefills = 0
        self.moves = 0
        self.budget = BodyBudget(LIMITS)
        # Models that each server does not have -> when it said so, the oldest first.
        self._lacking: list[dict[str, float]] = [{} for _ in urls]
        self._hosts = hosts
        self._timeout = timeout
        self._clock = clock
        self._router = ReplicaRouter(urls, PIECE, ROWS, LIFETIME)
        self._session: aiohttp.ClientSession | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._looks: dict[int, asyncio.Task[bool]] = {}  # queries of health, by server
        self._mismatch = ""  # missing role, as last logged

    async def start(self) -> None:
        """Begin to monitor the servers; returns when each has been asked and one has answered.

        Raises:
            KvikError: aiohttp is not installed, a URL has no such API, or no server answers.
        """
        try:
            import aiohttp
        except ImportError:
            raise KvikError(
                "route", "needs aiohttp to talk to servers: pip install 'kvik[route]'"
            ) from None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=self._timeout
            ),
            auto_decompress=False,
            skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            max_field_size=MAX_HEADER,
        )
        try:
            await self._find_one()
            await asyncio.gather(
                *(self._check_api(server) for server in self.upstreams if server.healthy)
            )
        except BaseException:
            await self.close()
            raise
        for server in self.upstreams:
            if not server.healthy:
                log.warning("%s gets no requests yet: %s", server.url, server.reason)
        self._check_roles()
        loop = asyncio.get_running_loop()
        self._watching = [loop.create_task(self._watch(i)) for i in range(len(self.upstreams))]

    async def close(self) -> None:
        """Close all connections to servers."""
        for task in (*self._watching, *self._looks.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        assert scope["type"] == "http"
        try:
            self._hosts.check(Headers(scope=scope), scope["http_version"])
        except HttpError as error:
            response = error.response(anthropic=in_messages(scope["path"]))
            await response(scope, receive, send)
            return
        handlers = {"/health": self._health, "/ready": self._health, "/ping": self._health}
        handlers |= {"/replicas": self._state, "/metrics": self._metrics}
        lists = scope["method"] == "GET" and scope["path"] in ("/v1/models", "/models")
        if lists and (models := await self._models(scope)) is not None:
            await models(scope, receive, send)
            return
        if scope["method"] in ("GET", "HEAD") and scope["path"] in handlers:
            await handlers[scope["path"]]()(scope, receive, send)
            return
        with suppress(ClientDisconnect):
            await _Passing(self, scope, receive, send).run()

    # -- for one request -------------------------------------------------------------------------

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start was not called"
        return self._session

    def choose(self, prompt: RoutedPrompt, avoid: Sequence[int]) -> ReplicaChoice | None:
        """Choose a server for a prompt; None if there is none. A prefill server is chosen only if
        there is no other."""
        prefill = self._prefill_servers()
        facts = (prompt.hashes, prompt.size, self._clock(), prompt.session)
        choice = self._router.choose(*facts, {*avoid, *prefill})
        return self._router.choose(*facts, avoid) if choice is None and prefill else choice

    def without(self, prompt: RoutedPrompt) -> list[int]:
        """Return the servers that lack the store or the model of a request; [] if all do, so that
        any of them may say that."""
        since, store = self._clock() - LACKS_SECONDS, prompt.store
        lacking = [
            i
            for i, server in enumerate(self.upstreams)
            if (store and server.store != store)
            or self._lacking[i].get(prompt.model, since) > since
        ]
        return lacking if len(lacking) < len(self.upstreams) else []

    def lacks(self, number: int, model: str) -> None:
        """Note that a server does not have a model."""
        lacked = self._lacking[number]
        lacked.pop(model, None)
        lacked[model] = self._clock()
        if len(lacked) > MAX_LACKED:
            del lacked[next(iter(lacked))]

    async def has_others(self, numbers: Collection[int]) -> bool:
        """Return whether a server other than these is available. If none seems to be, their health
        is queried first, as one may have become available since the last query."""
        others = [i for i in range(len(self.upstreams)) if i not in numbers]
        if others and not any(self.upstreams[i].healthy for i in others):
            await asyncio.wait([self._looking(i) for i in others], timeout=LOOK_SECONDS)
        return any(self.upstreams[i].healthy for i in others)

    def choose_prefill(self, choice: ReplicaChoice, prompt: RoutedPrompt) -> ReplicaChoice | None:
        """Choose a server to compute the prompt for the chosen one; None if that computes it
        itself."""
        missing = len(prompt.hashes) - choice.hit
        if self.upstreams[choice.replica].role != "decode" or missing < MIN_MISSING:
            return None
        avoided = set(range(len(self.upstreams))) - self._prefill_servers()
        avoided |= set(self.without(prompt))
        return self._router.choose(prompt.hashes, prompt.size, self._clock(), avoid=avoided)

    def sent(self, name: str, choice: ReplicaChoice, prompt: RoutedPrompt) -> None:
        upstream = self.upstreams[choice.replica]
        upstream.unfinished += 1
        upstream.requests += 1
        self._router.sent(name, choice, prompt.hashes, prompt.size, self._clock())

    def began(self, name: str) -> None:
        self._router.began(name, self._clock())

    def ended(self, name: str, choice: ReplicaChoice, cached: float | None) -> None:
        self.upstreams[choice.replica].unfinished -= 1
        self._router.ended(name, self._clock(), cached)

    def failed(self, number: int, reason: str) -> None:
        """Mark a server as failed: it gets no requests until it is healthy again."""
        self.upstreams[number].errors += 1
        self._set(number, reason)

    def refused(self, number: int, reason: str) -> None:
        """Note that a server refused to continue a request of another server."""
        server = self.upstreams[number]
        if server.refusal != reason:
            log.warning("%s cannot continue requests of other servers: %s", server.url, reason)
        server.refusal = reason

    def unavailable(self, errors: Mapping[str, str]) -> HttpError:
        """Return the error when no server is available, or those that were asked failed.

        Args:
            errors: URLs of the servers that were asked -> how they failed.
        """
        reasons = "; ".join(f"{url}: {error}" for url, error in errors.items()) or self._reasons()
        message = f"no server is there to answer: {reasons}"
        return HttpError(503, message, code="unavailable", headers=RETRY)

    # -- inside ----------------------------------------------------------------------------------

    def _prefill_servers(self) -> set[int]:
        return {i for i, server in enumerate(self.upstreams) if server.role == "prefill"}

    def _reasons(self) -> str:
        unavailable = (server for server in self.upstreams if server.reason)
        return "; ".join(f"{server.url}: {server.reason}" for server in unavailable)

    def _set(self, number: int, reason: str) -> None:
        server = self.upstreams[number]
        if bool(server.reason) != bool(reason):
            log.log(
                logging.WARNING if reason else logging.INFO, "%s: %s", server.url, reason or "up"
            )
        server.reason = reason
        self._router.set_available(number, not reason)

    async def _find_one(self) -> None:
        """Wait until a server answers; one that is loading a model does."""
        loop = asyncio.get_running_loop()
        until, warned = loop.time() + START_SECONDS, False
        while not any(await asyncio.gather(*map(self._look, range(len(self.upstreams))))):
            if loop.time() >= until:
                raise KvikError(
                    "url", f"no server answers: {self._reasons()}; start one, or correct its URL"
                )
            if not warned:
                log.warning("waiting for a server: %s", self._reasons())
                warned = True
            await asyncio.sleep(HEALTH_SECONDS)

    async def _watch(self, number: int) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self._look(number)
            self._check_roles()

    def _check_roles(self) -> None:
        """Tell once if the roles of the servers do not fit each other."""
        if not all(server.healthy for server in self.upstreams):
            return
        roles, mismatch = {server.role for server in self.upstreams}, ""
        if "prefill" in roles and "decode" not in roles:
            mismatch = "no server has --role decode, so those with --role prefill are of no use"
        elif "decode" in roles and "prefill" not in roles:
            mismatch = (
                "no server has --role prefill, so those with --role decode compute all prompts"
            )
        if mismatch and mismatch != self._mismatch:
            log.warning("a role is missing: %s; start one, or leave out --role", mismatch)
        self._mismatch = mismatch

    def _looking(self, number: int) -> asyncio.Task[bool]:
        """Return a running query of a server's health, shared by all that wait for one."""
        look = self._looks.get(number)
        if look is None or look.done():
            look = self._looks[number] = asyncio.create_task(self._look(number))
        return look

    async def _look(self, number: int) -> bool:
        """Query the health of a server. Return whether it answered."""
        try:
            status, body = await self._get(self.upstreams[number].url + "/health")
        except UpstreamError as error:
            self._set(number, str(error))
            return False
        if status == 200:
            role = _text(body, "role")
            self.upstreams[number].role = role if role in ("prefill", "decode") else "both"
            self.upstreams[number].store = _text(body, "store")
        # Servers without this path count as healthy.
        reason = _text(body, "reason") or f"/health answers with status {status}"
        self._set(number, "" if status < 500 else reason)
        return True

    async def _check_api(self, server: Upstream) -> None:
        """Raise `KvikError` if a server does not have the API."""
        with suppress(UpstreamError):
            status, body = await self._get(server.url + "/v1/models")
            try:
                models = msgspec.json.decode(body)
            except ValueError:
                models = None
            lists = isinstance(models, dict) and models.keys() & {"data", "object", "models"}
            # A server with keys refuses this, and one that is loading cannot answer yet.
            if not (status == 200 and lists) and status not in (401, 403) and status < 500:
                answered = f"status {status} for /v1/models"
                raise KvikError(
                    "url",
                    f"{server.url} answers, but not as a server of the OpenAI API ({answered}): "
                    "name the URL that clients use, without /v1",
                )

    async def _models(self, scope: Scope) -> Response | None:
        """Return the models of all servers, each once; None: let one of them answer."""
        headers = passed_on(scope["headers"], NOT_PASSED_ON | {b"accept-encoding"})
        healthy = [server for server in self.upstreams if server.healthy]
        if len(healthy) < 2:
            return None
        answers = await asyncio.gather(
            *(self._get(server.url + "/v1/models", headers) for server in healthy),
            return_exceptions=True,
        )
        models: dict[str, object] = {}
        for answer in answers:
            if isinstance(answer, tuple) and answer[0] == 200:
                with suppress(ValueError, TypeError, KeyError):
                    for model in msgspec.json.decode(answer[1])["data"]:
                        models.setdefault(model["id"], model)
        listed = {"object": "list", "data": [*models.values()], "has_more": False}
        return _json(200, listed) if models else None

    async def _get(
        self, url: str, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> tuple[int, bytes]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
        pairs = _decoded(headers)
        try:
            async with self.session.get(
                url, headers=pairs, timeout=timeout, allow_redirects=False
            ) as answer:
                body = b""
                while len(body) < MAX_BODY and (part := await answer.content.readany()):
                    body += part
                return answer.status, body
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UpstreamError(error) from None

    def _health(self) -> Response:
        if any(server.healthy for server in self.upstreams):
            return _json(200, {"status": "ok"})
        return _json(503, {"status": "unavailable", "reason": self._reasons()})

    def _state(self) -> Response:
        return _json(200, {"replicas": self.upstreams, "retries": self.retries})

    def _metrics(self) -> Response:
        lines = []
        for name in ("retries", "prefills", "moves"):
            lines.append(f"# TYPE kvik_route_{name}_total counter")
            lines.append(f"kvik_route_{name}_total {getattr(self, name)}")
        for name, kind, of in (
            ("up", "gauge", lambda server: int(server.healthy)),
            ("unfinished_requests", "gauge", lambda server: server.unfinished),
            ("requests_total", "counter", lambda server: server.requests),
            ("errors_total", "counter", lambda server: server.errors),
        ):
            lines.append(f"# TYPE kvik_route_{name} {kind}")
            lines += [f'kvik_route_{name}{{url="{o.url}"}} {of(o)}' for o in self.upstreams]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


@dataclass(slots=True)
class _Resumed:
    """A request that a server handed over."""

    state: bytes  # the state for the next server
    # The first server's answer, kept open until the next one's has begun.
    answer: aiohttp.ClientResponse
    back: bool  # whether the request returns to its first server, as no other one takes it
    begun: bool = False  # whether the next server's answer has begun

    def begin(self) -> None:
        self.begun = True
        self.answer.close()


class _Passing:
    """Forwards one request."""

    def __init__(self, proxy: Proxy, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy = proxy
        self._scope = scope
        self._receive = receive
        self._send = send
        self._headers: list[tuple[bytes, bytes]] = []  # of the request, for servers
        self._content: Data = b""  # its body
        self._prompt = RoutedPrompt()
        self._begun = False  # a byte of the answer was sent to the client
        self._num_begun = 0  # servers that may have begun the request, and gave no answer
        self._closed = False  # one of them closed the connection, which may have been idle
        self._errors: dict[str, str] = {}  # URLs of the servers that were asked -> how they failed

    async def run(self) -> None:
        with self._proxy.budget.share() as grow:
            try:
                request = Request(self._scope, self._receive)
                body = await read_bytes(request, self._proxy.budget.limits, grow)
            except KvikError as error:
                await self._refuse(http_error(error))
            else:
                await self._forward(body)

    async def _forward(self, body: Data) -> None:
        headers = passed_on(self._scope["headers"], NOT_PASSED_ON)
        if not any(name == b"x-request-id" and SAFE_ID.fullmatch(v) for name, v in headers):
            headers = [(name, value) for name, value in headers if name != b"x-request-id"]
            headers.append((b"x-request-id", secrets.token_hex(16).encode()))
        client = self._scope.get("client")
        if client is not None:
            headers.append((b"x-forwarded-for", str(client[0]).encode()))
        self._headers, self._content, self._prompt = headers, body, self._read_prompt(body)
        lacking = self._proxy.without(self._prompt)
        tried = [*lacking]
        while True:
            choice = self._proxy.choose(self._prompt, tried)
            if choice is None and self._closed:
                choice, self._closed = self._proxy.choose(self._prompt, lacking), False
            if choice is None and await self._proxy.has_others(tried):
                choice = self._proxy.choose(self._prompt, tried)
            if choice is None:
                await self._refuse(self._proxy.unavailable(self._errors))
                return
            if not tried:
                headers += await self._prefilled(choice)
            if await self._ask(choice, tried):
                return
            tried.append(choice.replica)
            self._proxy.retries += 1

    def _note_failure(self, choice: ReplicaChoice, reason: str) -> None:
        self._errors[self._proxy.upstreams[choice.replica].url] = reason

    async def _refuse(self, error: HttpError) -> None:
        response = error.response(anthropic=in_messages(self._scope["path"]))
        await response(self._scope, self._receive, self._send)

    def _read_prompt(self, body: Data) -> RoutedPrompt:
        """Return the prompt of a body; an empty one if there is none."""
        if stored := STORED.search(self._scope["path"]):
            return RoutedPrompt(store=store_of(stored[1]))
        if named := MODEL.search(self._scope["path"]):
            return RoutedPrompt(model=named[1])
        if self._scope["method"] != "POST" or body.lstrip()[:1] != b"{":
            return RoutedPrompt()
        try:
            fields = _fields(body)
            text = rendered(fields)
        except (ValueError, RecursionError):  # the server will report the error
            return RoutedPrompt()
        session = fields.get("session_id") or fields.get("prompt_cache_key")
        name = session if isinstance(session, str) else ""
        size = len(text) if len(body) <= LARGE_BODY else len(body)
        model = fields.get("model")
        hashes, store = piece_hashes(text), _store_named(fields)
        return RoutedPrompt(hashes, size, name, store, model if isinstance(model, str) else "")

    async def _ask(
        self, choice: ReplicaChoice, tried: Collection[int], resumed: _Resumed | None = None
    ) -> bool:
        """Send the request to a server and forward its answer. Return whether the client has one.

        Args:
            tried: servers that were asked before.
            resumed: set if another server has begun it.
        """
        proxy, name = self._proxy, secrets.token_hex(8)
        proxy.sent(name, choice, self._prompt)
        tail: bytes | None = b""
        try:
            passing = self._pass(choice, name, tried, resumed)
            # The first server's call watches for a client disconnect, also for the next ones.
            tail = await (passing if resumed else self._unless_gone(passing))
            return tail is not None
        except UpstreamError as error:
            self._note_failure(choice, str(error))
            self._num_begun += error.sent and resumed is None
            may_retry = resumed is None and self._num_begun < MAX_BEGUN
            closed = error.closed and may_retry
            self._closed |= closed
            if not closed:
                proxy.failed(choice.replica, str(error))
            if resumed is not None and not resumed.begun:
                return False
            if self._begun:  # the client must not mistake the partial answer for a complete one
                if not break_connection(self._scope):
                    raise
                return True
            if may_retry:
                return False
            await self._refuse(proxy.unavailable(self._errors))
            return True
        finally:
            share = cached_share(tail or b"")
            proxy.ended(name, choice, None if share is None else share * self._prompt.size)

    async def _continue(
        self, previous: ReplicaChoice, answer: aiohttp.ClientResponse, state: bytes
    ) -> None:
        """Let another server continue the request that was handed over; if none does, its first
        server.

        Raises:
            UpstreamError: the request is lost.
        """
        proxy = self._proxy
        proxy.moves += 1
        tried = [previous.replica, *proxy.without(self._prompt)]
        release = asyncio.get_running_loop().call_later(LET_GO_SECONDS, answer.close)
        try:
            while True:
                await proxy.has_others(tried)
                choice = proxy.choose(self._prompt, tried)
                resumed = _Resumed(state, answer, back=choice is None)
                if await self._ask(choice or previous, tried, resumed):
                    return
                if choice is None:
                    raise UpstreamError(ConnectionError("no server continues its answer"))
                tried.append(choice.replica)
        finally:
            release.cancel()

    async def _prefilled(self, choice: ReplicaChoice) -> list[tuple[bytes, bytes]]:
        """Let a prefill server compute the prompt for the chosen server. Return the header with the
        location of its pages; [] if the chosen server computes it itself."""
        proxy, name = self._proxy, secrets.token_hex(8)
        prefill = proxy.choose_prefill(choice, self._prompt)
        if prefill is None or not GENERATES.search(self._scope["path"]):
            return []
        proxy.sent(name, prefill, self._prompt)
        try:
            ticket = await self._unless_gone(self._ask_prefill(prefill))
            proxy.began(name)
        except UpstreamError as error:
            if not error.closed:
                proxy.failed(prefill.replica, str(error))
            return []
        finally:
            proxy.ended(name, prefill, None)
        if ticket is None:
            return []
        proxy.prefills += 1
        return [(SOURCE_HEADER.encode(), ticket)]

    async def _ask_prefill(self, choice: ReplicaChoice) -> bytes | None:
        """Return the location of the prompt's pages from a prefill answer; None if there is
        none."""
        headers = [*self._headers, (PREFILL_HEADER.encode(), b"1")]
        async with self._answer(choice, headers) as answer:
            await answer.content.read(MAX_PREFILLED)
            ticket = answer.headers.get(SOURCE_HEADER)
            return None if answer.status != 200 or ticket is None else ticket.encode("latin-1")

    @asynccontextmanager
    async def _answer(
        self, choice: ReplicaChoice, headers: list[tuple[bytes, bytes]]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request to a server and provide its answer. Raises UpstreamError if there is
        none, or it breaks off."""
        import aiohttp

        pairs = _decoded(headers)
        method, target = self._scope["method"], self._target(choice)
        try:
            async with self._proxy.session.request(
                method, target, headers=pairs, data=self._content or None, allow_redirects=False
            ) as answer:
                yield answer
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError, ValueError) as error:
            closed = isinstance(error, aiohttp.ServerDisconnectedError) and not self._begun
            unsent = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
            sent = not isinstance(error, unsent)
            raise UpstreamError(error, closed=closed, sent=sent) from None

    async def _unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work. If the client disconnects, cancel it and raise
        ClientDisconnect."""
        passing = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(until_gone(self._receive))
        try:
            await asyncio.wait((passing, gone), return_when=asyncio.FIRST_COMPLETED)
            if not passing.done():
                raise ClientDisconnect
            return passing.result()
        finally:
            for task in (gone, passing):
                task.cancel()
            await asyncio.gather(gone, passing, return_exceptions=True)

    def _target(self, choice: ReplicaChoice) -> URL:
        from yarl import URL

        query = self._scope["query_string"].decode("latin-1")
        target = self._scope.get("raw_path") or self._scope["path"].encode()
        # That of `OPTIONS *` is no path, and would be a part of the port.
        path = "/" + target.decode("latin-1").removeprefix("/")
        url = self._proxy.upstreams[choice.replica].url + path
        return URL(f"{url}?{query}" if query else url, encoded=True)

    async def _pass(
        self, choice: ReplicaChoice, name: str, tried: Collection[int], resumed: _Resumed | None
    ) -> bytes | None:
        """Send the request and forward the answer. Return its end; None if another server should be
        asked.

        Args:
            tried: servers that were asked before.
        """
        scope, proxy = self._scope, self._proxy
        headers, tail = self._headers, b""
        if resumed is not None:
            headers = [pair for pair in headers if pair[0] != SOURCE_HEADER.encode()]
            headers.append((RESUMED_HEADER.encode(), resumed.state))
        # Others may be available when it is handed over, even if none is now.
        if len(proxy.upstreams) > 1 and not (resumed is not None and resumed.back):
            headers = [*headers, (MOVES_HEADER.encode(), b"1")]
        async with self._answer(choice, headers) as answer:
            if MOVED_HEADER in answer.headers:
                state = await answer.content.readuntil(MOVED_END)
                await self._continue(choice, answer, state.removesuffix(MOVED_END))
                return b""
            if resumed is not None and answer.status != 200:
                error = await answer.content.read(MAX_PREFILLED)
                reason = _text(error, "error", "message") or f"status {answer.status}"
                proxy.refused(choice.replica, reason)
                return None
            num_begun = self._num_begun + (answer.status != UNAVAILABLE)
            retry = answer.status in RETRIED and answer.headers.get("x-should-retry") != "false"
            retry = retry and num_begun < MAX_BEGUN
            if retry and await proxy.has_others({*tried, choice.replica}):
                self._note_failure(choice, f"it answers with status {answer.status}")
                self._num_begun = num_begun
                return None
            read = b""
            if answer.status == NOT_FOUND and self._prompt.model:
                read = await answer.content.read(MAX_PREFILLED)
                others = {*tried, choice.replica}
                if self._prompt.model in _message(read) and await proxy.has_others(others):
                    proxy.lacks(choice.replica, self._prompt.model)
                    return None
            passed = passed_on(answer.raw_headers, HOP_BY_HOP)
            limit_unread(scope, UNREAD_SECONDS)
            start = {"type": "http.response.start", "status": answer.status, "headers": passed}
            mark = MovedMark() if answer.content_type == "text/event-stream" else None
            first = True
            async for part in _parts(read, answer):
                if first:
                    proxy.began(name)
                    if resumed is not None:
                        resumed.begin()
                    await self._start(start)
                    first = False
                passing = part if mark is None else mark.feed(part)
                tail = (tail + passing)[-TAIL:]
                if passing:
                    await self._out(
                        {"type": "http.response.body", "body": passing, "more_body": True}
                    )
                if mark is not None and mark.state is not None:
                    await self._continue(choice, answer, mark.state)
                    return tail
            if mark is not None and mark.found:
                raise ConnectionError("it broke off while it handed over an answer")
            if first:
                proxy.began(name)
                await self._start(start)
        await self._out({"type": "http.response.body", "body": b"", "more_body": False})
        return tail

    async def _start(self, message: dict[str, Any]) -> None:
        """Begin the answer, unless it has begun."""
        if not self._begun:
            await self._out(message)

    async def _out(self, message: dict[str, Any]) -> None:
        self._begun = True
        try:
            await self._send(message)
        except OSError:
            raise ClientDisconnect from None


def _json(status: int, body: object) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


async def _parts(read: bytes, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Iterate over the parts of an answer of which some was read before."""
    if read:
        yield read
    async for part in answer.content.iter_any():
        yield part


def _message(body: bytes) -> str:
    """Return the message of an error."""
    return _text(body, "error", "message") or _text(body, "message")


def _described(error: Exception) -> str:
    """Return a description of a server's failure."""
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    cause = getattr(error, "os_error", None)
    text = getattr(cause, "strerror", None) or str(error) or type(error).__name__
    return f"it cannot be reached ({text})" if cause is not None else f"it failed ({text})"


def _text(body: bytes, *names: str) -> str:
    """Return a text inside a JSON object, by the names that lead to it; "" if there is none."""
    with suppress(ValueError, AttributeError):
        value = msgspec.json.decode(body)
        for name in names:
            value = value.get(name)
        if isinstance(value, str):
            return value[:200]
    return ""
