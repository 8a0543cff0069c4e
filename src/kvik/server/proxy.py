"""A proxy in front of several servers that sends equal prefixes to the same server.

Bytes pass through unchanged, as fast as the client reads them. A request goes to another server
only if no byte of an answer has arrived, or if its server handed it over: then the other one
continues it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvik.core.routing import ReplicaChoice
from kvik.errors import KvikError
from kvik.server.access import Hosts
from kvik.server.errors import HttpError, http_error, in_messages
from kvik.server.route import (
    BodyBudget,
    BodyLimits,
    Data,
    break_connection,
    limit_unread,
    read_bytes,
    until_gone,
)
from kvik.server.routed_prompts import RoutedPrompt, cached_share, read_prompt
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
from kvik.server.upstreams import UpstreamError, Upstreams, decoded, text_of

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")

MAX_PREFILLED = 1 << 16  # bytes of a prefill server's answer
# Bodies are kept until their requests end, as another server may get them. No key was checked.
LIMITS = BodyLimits(max_bytes=64 << 20, seconds=60.0, total_bytes=1 << 30)
TAIL = 4096  # bytes at the end of an answer that are searched for its usage
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
NOT_FOUND = 404
GENERATES = re.compile(r"/(chat/completions|completions?|messages|responses|generate)$")
SAFE_ID = re.compile(rb"[A-Za-z0-9_.-]{1,128}")


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
        self.servers = Upstreams(urls, timeout, clock)
        self.retries = 0
        self.prefills = 0
        self.moves = 0
        self.budget = BodyBudget(LIMITS)
        self._hosts = hosts

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

    async def _models(self, scope: Scope) -> Response | None:
        """Return the models of all servers, each once; None: let one of them answer."""
        headers = passed_on(scope["headers"], NOT_PASSED_ON | {b"accept-encoding"})
        healthy = [server for server in self.servers.listed if server.healthy]
        if len(healthy) < 2:
            return None
        answers = await asyncio.gather(
            *(self.servers.get(server.url + "/v1/models", headers) for server in healthy),
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

    def _health(self) -> Response:
        if any(server.healthy for server in self.servers.listed):
            return _json(200, {"status": "ok"})
        return _json(503, {"status": "unavailable", "reason": self.servers.reasons()})

    def _state(self) -> Response:
        return _json(200, {"replicas": self.servers.listed, "retries": self.retries})

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
            lines += [f'kvik_route_{name}{{url="{o.url}"}} {of(o)}' for o in self.servers.listed]
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
        self._servers = proxy.servers
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
        self._headers, self._content, self._prompt = (
            headers,
            body,
            read_prompt(self._scope["method"], self._scope["path"], body),
        )
        lacking = self._servers.without(self._prompt)
        tried = [*lacking]
        while True:
            choice = self._servers.choose(self._prompt, tried)
            if choice is None and self._closed:
                choice, self._closed = self._servers.choose(self._prompt, lacking), False
            if choice is None and await self._servers.has_others(tried):
                choice = self._servers.choose(self._prompt, tried)
            if choice is None:
                await self._refuse(self._servers.unavailable(self._errors))
                return
            if not tried:
                headers += await self._prefilled(choice)
            if await self._ask(choice, tried):
                return
            tried.append(choice.replica)
            self._proxy.retries += 1

    def _note_failure(self, choice: ReplicaChoice, reason: str) -> None:
        self._errors[self._servers.listed[choice.replica].url] = reason

    async def _refuse(self, error: HttpError) -> None:
        response = error.response(anthropic=in_messages(self._scope["path"]))
        await response(self._scope, self._receive, self._send)

    async def _ask(
        self, choice: ReplicaChoice, tried: Collection[int], resumed: _Resumed | None = None
    ) -> bool:
        """Send the request to a server and forward its answer. Return whether the client has one.

        Args:
            tried: servers that were asked before.
            resumed: set if another server has begun it.
        """
        servers, name = self._servers, secrets.token_hex(8)
        servers.sent(name, choice, self._prompt)
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
                servers.failed(choice.replica, str(error))
            if resumed is not None and not resumed.begun:
                return False
            if self._begun:  # the client must not mistake the partial answer for a complete one
                if not break_connection(self._scope):
                    raise
                return True
            if may_retry:
                return False
            await self._refuse(servers.unavailable(self._errors))
            return True
        finally:
            share = cached_share(tail or b"")
            servers.ended(name, choice, None if share is None else share * self._prompt.size)

    async def _continue(
        self, previous: ReplicaChoice, answer: aiohttp.ClientResponse, state: bytes
    ) -> None:
        """Let another server continue the request that was handed over; if none does, its first
        server.

        Raises:
            UpstreamError: the request is lost.
        """
        servers = self._servers
        self._proxy.moves += 1
        tried = [previous.replica, *servers.without(self._prompt)]
        release = asyncio.get_running_loop().call_later(LET_GO_SECONDS, answer.close)
        try:
            while True:
                await servers.has_others(tried)
                choice = servers.choose(self._prompt, tried)
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
        servers, name = self._servers, secrets.token_hex(8)
        prefill = servers.choose_prefill(choice, self._prompt)
        if prefill is None or not GENERATES.search(self._scope["path"]):
            return []
        servers.sent(name, prefill, self._prompt)
        try:
            ticket = await self._unless_gone(self._ask_prefill(prefill))
            servers.began(name)
        except UpstreamError as error:
            if not error.closed:
                servers.failed(prefill.replica, str(error))
            return []
        finally:
            servers.ended(name, prefill, None)
        if ticket is None:
            return []
        self._proxy.prefills += 1
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

        pairs = decoded(headers)
        method, target = self._scope["method"], self._target(choice)
        try:
            async with self._servers.session.request(
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
        url = self._servers.listed[choice.replica].url + path
        return URL(f"{url}?{query}" if query else url, encoded=True)

    async def _pass(
        self, choice: ReplicaChoice, name: str, tried: Collection[int], resumed: _Resumed | None
    ) -> bytes | None:
        """Send the request and forward the answer. Return its end; None if another server should be
        asked.

        Args:
            tried: servers that were asked before.
        """
        scope, servers = self._scope, self._servers
        headers, tail = self._headers, b""
        if resumed is not None:
            headers = [pair for pair in headers if pair[0] != SOURCE_HEADER.encode()]
            headers.append((RESUMED_HEADER.encode(), resumed.state))
        # Others may be available when it is handed over, even if none is now.
        if len(servers.listed) > 1 and not (resumed is not None and resumed.back):
            headers = [*headers, (MOVES_HEADER.encode(), b"1")]
        async with self._answer(choice, headers) as answer:
            if MOVED_HEADER in answer.headers:
                state = await answer.content.readuntil(MOVED_END)
                await self._continue(choice, answer, state.removesuffix(MOVED_END))
                return b""
            if resumed is not None and answer.status != 200:
                error = await answer.content.read(MAX_PREFILLED)
                reason = text_of(error, "error", "message") or f"status {answer.status}"
                servers.refused(choice.replica, reason)
                return None
            num_begun = self._num_begun + (answer.status != UNAVAILABLE)
            retry = answer.status in RETRIED and answer.headers.get("x-should-retry") != "false"
            retry = retry and num_begun < MAX_BEGUN
            if retry and await servers.has_others({*tried, choice.replica}):
                self._note_failure(choice, f"it answers with status {answer.status}")
                self._num_begun = num_begun
                return None
            read = b""
            if answer.status == NOT_FOUND and self._prompt.model:
                read = await answer.content.read(MAX_PREFILLED)
                others = {*tried, choice.replica}
                if self._prompt.model in _message(read) and await servers.has_others(others):
                    servers.lacks(choice.replica, self._prompt.model)
                    return None
            passed = passed_on(answer.raw_headers, HOP_BY_HOP)
            limit_unread(scope, UNREAD_SECONDS)
            start = {"type": "http.response.start", "status": answer.status, "headers": passed}
            mark = MovedMark() if answer.content_type == "text/event-stream" else None
            first = True
            async for part in _parts(read, answer):
                if first:
                    servers.began(name)
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
                servers.began(name)
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


async def _parts(read: bytes, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Iterate over the parts of an answer of which some was read before."""
    if read:
        yield read
    async for part in answer.content.iter_any():
        yield part


def _message(body: bytes) -> str:
    """Return the message of an error."""
    return text_of(body, "error", "message") or text_of(body, "message")
