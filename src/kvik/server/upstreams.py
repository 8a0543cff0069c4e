"""The servers behind `kvik route`: their health, and the choice among them for a prompt.

The proxy does not know the cache of a server. So it assumes that a server holds the prompts that it
has answered, corrected by the usage in its answers. Servers may have different models. Which ones a
server lacks is learned from its answers, so that it works with keys and with adapters that come and
go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvik.core.routing import ReplicaChoice, ReplicaRouter
from kvik.errors import KvikError
from kvik.server.errors import RETRY, HttpError
from kvik.server.routed_prompts import PIECE, RoutedPrompt

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

MIN_MISSING = 2  # missing chunks of a prompt below which the decode server computes it itself
LIFETIME = 600.0  # seconds for which a server is assumed to hold a prompt
ROWS = 64  # assumed batch size of a server
# Bytes of a header of an answer. That with the ignored fields of a request may have 10 KiB, and a
# server whose answer cannot be read counts as failed.
MAX_HEADER = 64 << 10
HEALTH_SECONDS, HEALTH_TIMEOUT = 1.0, 2.0
LOOK_SECONDS = 0.5  # that a request waits for the health of servers that get none
CONNECT_SECONDS = 5.0
START_SECONDS = 30.0  # for the first server to answer; they may have been started with the proxy
MAX_BODY = 1 << 20  # bytes of a server's health or of its list of models that are read
LACKS_SECONDS = 30.0  # after which a server is asked again for a model that it lacked
MAX_LACKED = 1024  # models that a server is known to lack; the oldest are forgotten


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
        super().__init__(described(error))
        # The connection was closed before an answer, as a server may do with an idle connection,
        # which does not indicate a failure.
        self.closed = closed
        self.sent = sent  # the server may have received the request


class Upstreams:
    """The servers, watched while the proxy runs.

    Args:
        urls: URLs of the servers, without a trailing slash or /v1.
        timeout: maximum silence of a server during a request, in seconds.
    """

    def __init__(self, urls: Sequence[str], timeout: float, clock: Callable[[], float]) -> None:
        self.listed = [Upstream(url) for url in urls]
        # Models that each server does not have -> when it said so, the oldest first.
        self._lacking: list[dict[str, float]] = [{} for _ in urls]
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
                *(self._check_api(server) for server in self.listed if server.healthy)
            )
        except BaseException:
            await self.close()
            raise
        for server in self.listed:
            if not server.healthy:
                log.warning("%s gets no requests yet: %s", server.url, server.reason)
        self._check_roles()
        loop = asyncio.get_running_loop()
        self._watching = [loop.create_task(self._watch(i)) for i in range(len(self.listed))]

    async def close(self) -> None:
        """Close all connections to servers."""
        for task in (*self._watching, *self._looks.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()

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
            for i, server in enumerate(self.listed)
            if (store and server.store != store)
            or self._lacking[i].get(prompt.model, since) > since
        ]
        return lacking if len(lacking) < len(self.listed) else []

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
        others = [i for i in range(len(self.listed)) if i not in numbers]
        if others and not any(self.listed[i].healthy for i in others):
            await asyncio.wait([self._looking(i) for i in others], timeout=LOOK_SECONDS)
        return any(self.listed[i].healthy for i in others)

    def choose_prefill(self, choice: ReplicaChoice, prompt: RoutedPrompt) -> ReplicaChoice | None:
        """Choose a server to compute the prompt for the chosen one; None if that computes it
        itself."""
        missing = len(prompt.hashes) - choice.hit
        if self.listed[choice.replica].role != "decode" or missing < MIN_MISSING:
            return None
        avoided = set(range(len(self.listed))) - self._prefill_servers()
        avoided |= set(self.without(prompt))
        return self._router.choose(prompt.hashes, prompt.size, self._clock(), avoid=avoided)

    def sent(self, name: str, choice: ReplicaChoice, prompt: RoutedPrompt) -> None:
        upstream = self.listed[choice.replica]
        upstream.unfinished += 1
        upstream.requests += 1
        self._router.sent(name, choice, prompt.hashes, prompt.size, self._clock())

    def began(self, name: str) -> None:
        self._router.began(name, self._clock())

    def ended(self, name: str, choice: ReplicaChoice, cached: float | None) -> None:
        self.listed[choice.replica].unfinished -= 1
        self._router.ended(name, self._clock(), cached)

    def failed(self, number: int, reason: str) -> None:
        """Mark a server as failed: it gets no requests until it is healthy again."""
        self.listed[number].errors += 1
        self._set(number, reason)

    def refused(self, number: int, reason: str) -> None:
        """Note that a server refused to continue a request of another server."""
        server = self.listed[number]
        if server.refusal != reason:
            log.warning("%s cannot continue requests of other servers: %s", server.url, reason)
        server.refusal = reason

    def unavailable(self, errors: Mapping[str, str]) -> HttpError:
        """Return the error when no server is available, or those that were asked failed.

        Args:
            errors: URLs of the servers that were asked -> how they failed.
        """
        reasons = "; ".join(f"{url}: {error}" for url, error in errors.items()) or self.reasons()
        message = f"no server is there to answer: {reasons}"
        return HttpError(503, message, code="unavailable", headers=RETRY)

    # -- inside ----------------------------------------------------------------------------------

    def _prefill_servers(self) -> set[int]:
        return {i for i, server in enumerate(self.listed) if server.role == "prefill"}

    def reasons(self) -> str:
        unavailable = (server for server in self.listed if server.reason)
        return "; ".join(f"{server.url}: {server.reason}" for server in unavailable)

    def _set(self, number: int, reason: str) -> None:
        server = self.listed[number]
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
        while not any(await asyncio.gather(*map(self._look, range(len(self.listed))))):
            if loop.time() >= until:
                raise KvikError(
                    "url", f"no server answers: {self.reasons()}; start one, or correct its URL"
                )
            if not warned:
                log.warning("waiting for a server: %s", self.reasons())
                warned = True
            await asyncio.sleep(HEALTH_SECONDS)

    async def _watch(self, number: int) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self._look(number)
            self._check_roles()

    def _check_roles(self) -> None:
        """Tell once if the roles of the servers do not fit each other."""
        if not all(server.healthy for server in self.listed):
            return
        roles, mismatch = {server.role for server in self.listed}, ""
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
            status, body = await self.get(self.listed[number].url + "/health")
        except UpstreamError as error:
            self._set(number, str(error))
            return False
        if status == 200:
            role = text_of(body, "role")
            self.listed[number].role = role if role in ("prefill", "decode") else "both"
            self.listed[number].store = text_of(body, "store")
        # Servers without this path count as healthy.
        reason = text_of(body, "reason") or f"/health answers with status {status}"
        self._set(number, "" if status < 500 else reason)
        return True

    async def _check_api(self, server: Upstream) -> None:
        """Raise `KvikError` if a server does not have the API."""
        with suppress(UpstreamError):
            status, body = await self.get(server.url + "/v1/models")
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

    async def get(self, url: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[int, bytes]:
        """Return the status and the body of a short answer; raise UpstreamError if none comes."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
        pairs = decoded(headers)
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


def decoded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def described(error: Exception) -> str:
    """Return a description of a server's failure."""
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    cause = getattr(error, "os_error", None)
    text = getattr(cause, "strerror", None) or str(error) or type(error).__name__
    return f"it cannot be reached ({text})" if cause is not None else f"it failed ({text})"


def text_of(body: bytes, *names: str) -> str:
    """Return a text inside a JSON object, by the names that lead to it; "" if there is none."""
    with suppress(ValueError, AttributeError):
        value = msgspec.json.decode(body)
        for name in names:
            value = value.get(name)
        if isinstance(value, str):
            return value[:200]
    return ""
