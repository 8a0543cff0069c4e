"""Routes and endpoints, and a request's context and body as handlers see them."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn, TypeVar, get_type_hints

import msgspec
from msgspec import inspect
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from kvik.errors import OverloadError
from kvik.server.access import ANONYMOUS, Caller
from kvik.server.errors import HttpError, escaped
from kvik.server.server import Server
from kvik.server.unhonoured import NOTHING, Table, refuse

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of a method on a path, and its description for `/openapi.json`."""

    path: str  # as in Starlette: "/v1/models/{model:path}" sets `request.path_params["model"]`
    handler: Handler  # takes the request and returns the response. It may raise any `KvikError`.
    method: str = "POST"  # GET also serves HEAD
    open: bool = False  # served without an API key
    # Shows how all callers use the server. If API keys are set, it needs an administrator's key. It
    # is also served while the server stops.
    operator: bool = False
    body: type[msgspec.Struct] | None = None  # what `read_body` decodes; None: no body
    answer: type[msgspec.Struct] | None = None  # type of the JSON response, if it is described
    note: str = ""  # one sentence for the documentation


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of request bodies."""

    max_bytes: int = 32 << 20  # size of one body
    seconds: float = 30.0  # time until a body must be complete
    max_values: int = 1 << 20  # number of JSON values; each takes many times the memory of its text
    max_keys: int = 1 << 17  # number of object keys, and also of arrays and objects together
    max_depth: int = 64  # nesting depth of arrays and objects
    # A body up to this size is not counted, and is decoded in the event loop.
    small_bytes: int = 64 << 10
    total_bytes: int = 256 << 20  # size of all larger bodies being read at the same time


DEFAULT_LIMITS = BodyLimits()


class BodyBudget:
    """Counts the bytes of large bodies, so that together they cannot exhaust memory."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Count one body until the block ends.

        Yields:
            A function to call with the current size of the body. It raises `OverloadError` if all
            bodies together are too large.
        """
        counted = 0

        def grow(num_bytes: int) -> None:
            nonlocal counted
            if num_bytes <= self.limits.small_bytes:
                return
            if self.num_bytes - counted + num_bytes > self.limits.total_bytes:
                raise OverloadError("body", "too many large requests at once", 1.0, of_caller=False)
            self.num_bytes += num_bytes - counted
            counted = num_bytes

        try:
            yield grow
        finally:
            self.num_bytes -= counted


SCOPE_KEY = "kvik.context"
# Functions that the connection puts into the scope. One closes the connection, whatever is still to
# be sent; the other sets how many seconds a response may wait for its client.
CLOSE_EXTENSION, UNREAD_EXTENSION = "kvik.close", "kvik.unread"


@dataclass(slots=True)
class RequestContext:
    """What the application knows about a request."""

    request_id: str  # random; also the header `x-kvik-request-id`
    budget: BodyBudget  # limits reading of the body
    caller: Caller = ANONYMOUS  # set before a handler runs
    # By the engine's clock; the time of its last byte, so that a slow client loses nothing of its
    # deadline.
    arrived: float = field(default_factory=time.monotonic)
    # Fields of the body without effect, in the header `x-kvik-ignored-fields` -> whether the server
    # knows them.
    ignored_fields: dict[str, bool] = field(default_factory=dict)

    def ignore(self, names: Iterable[str], *, known: bool = True) -> None:
        """Add names of fields in a request, escaped for a header, up to `MAX_IGNORED`."""
        for name in islice(names, MAX_IGNORED - len(self.ignored_fields)):
            self.ignored_fields[escaped(name, 64)] = known


def context_of(request: Request) -> RequestContext:
    """Return the context of a request that came through the application."""
    context: RequestContext = request.scope[SCOPE_KEY]
    return context


def caller_of(request: Request) -> Caller:
    """Return the caller that sent a request."""
    return context_of(request).caller


def break_connection(scope: Scope) -> bool:
    """Close the connection of a response that cannot be completed. Returns whether that was
    possible: under other servers the app must raise instead."""
    close = scope.get("extensions", {}).get(CLOSE_EXTENSION)
    if close is not None:
        close()
    return close is not None


def limit_unread(scope: Scope, seconds: float) -> None:
    """Close the connection if the client does not read the response for this long."""
    limit = scope.get("extensions", {}).get(UNREAD_EXTENSION)
    if limit is not None:
        limit(seconds)


async def until_gone(receive: Receive) -> None:
    """Wait until the client disconnects; the body of the request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


# The JSON body of a request: read within limits, then decoded strictly into a Struct.

T = TypeVar("T", bound=msgspec.Struct)
Data = bytes | bytearray

log = logging.getLogger(__name__)

ONE_KIND = bytes.maketrans(b"{}", b"[]")
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# A number outside int64, or too large for a float, contains one of these after all its digits are
# replaced by 0. (A regular expression would be 20 times slower.)
ONE_DIGIT = bytes.maketrans(b"0123456789E", b"0000000000e")
LONG_NUMBER = (b"0" * 19, b"0e")
NO_BACKSLASH = re.compile(rb"[^\\]")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
PLACE = re.compile(r"(.*) - at (`key` in )?`\$\.?(.*)`", re.DOTALL)  # in messages of msgspec
PIECE_BYTES = 1 << 18  # of a large body per call, since other threads wait meanwhile
MAX_SHOWN = 24  # characters of a number in an error message
MAX_IGNORED = 16  # fields that are reported


@dataclass(frozen=True, slots=True)
class Endpoint(Route):
    """A route of any server: its handler takes the server, the request and, if there is one, the
    decoded body."""

    handler: Callable[..., Awaitable[Response]]
    unhonoured: Table = field(default_factory=dict)  # see `read_body`

    def of(self, server: Server) -> Route:
        """Return the route of one server."""

        async def handler(request: Request) -> Response:
            if self.body is None:
                return await self.handler(server, request)
            body = await read_body(request, self.body, self.unhonoured)
            return await self.handler(server, request, body)

        return replace(self, handler=handler)


def post(
    path: str, unhonoured: Table = NOTHING, *, answer: type[msgspec.Struct] | None = None, note: str
) -> Callable[[Callable[..., Awaitable[Response]]], Endpoint]:
    """Make an endpoint from a handler, whose argument `body` is annotated with the body's type."""
    return lambda handle: Endpoint(
        path,
        handle,
        body=get_type_hints(handle)["body"],
        unhonoured=unhonoured,
        answer=answer,
        note=note,
    )


def get(
    path: str,
    *,
    answer: type[msgspec.Struct] | None = None,
    note: str,
    open: bool = False,
    method: str = "GET",
) -> Callable[[Callable[..., Awaitable[Response]]], Endpoint]:
    """Make an endpoint from a handler that takes no body."""
    return lambda handle: Endpoint(path, handle, method, open, answer=answer, note=note)


def routes_of(*endpoints: Endpoint) -> Callable[[Server], list[Route]]:
    """Return a function that makes the routes of these endpoints for a server."""
    return lambda server: [endpoint.of(server) for endpoint in endpoints]


async def read_body(request: Request, kind: type[T], unhonoured: Table = NOTHING) -> T:
    """Read the body as `kind`. Fields unknown to `kind` go into `x-kvik-ignored-fields`.

    Args:
        unhonoured: fields to refuse if they would have an effect, unless `kind` has them.

    Raises:
        HttpError: 400, 408, 413 or 415, naming the field if one is at fault.
        ParamError: a field is not honoured.
        OverloadError: too many large bodies are being read.
    """
    return await read_chosen(request, lambda value: (kind, unhonoured))


async def read_chosen(
    request: Request, choose: Callable[[dict[str, Any]], tuple[type[T], Table]]
) -> T:
    """Read a body that determines its own kind, as `read_body` does.

    Args:
        choose: returns the kind of a JSON object and the fields that are not honoured; may raise
            `HttpError`.
    """
    context = context_of(request)
    limits = context.budget.limits
    _check_headers(request)
    with context.budget.share() as grow:
        data = await read_bytes(request, limits, grow)
        if not data:
            raise HttpError(400, "the body is empty")
        context.arrived = time.monotonic()
        if len(data) <= limits.small_bytes:
            body, ignored = _decode(data, choose, limits)
        else:  # in a thread, so as not to block the event loop
            body, ignored = await asyncio.to_thread(_decode, data, choose, limits)
    context.ignore(ignored, known=False)
    return body


def _decode(
    data: Data, choose: Callable[[dict[str, Any]], tuple[type[T], Table]], limits: BodyLimits
) -> tuple[T, list[str]]:
    """Decode the body; returns it with the names of the ignored fields."""
    value = parse_json(data, limits)
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object")
    kind, unhonoured = choose(value)
    unknown = {name: value[name] for name in value if name not in kind.__struct_encode_fields__}
    refuse(unknown, unhonoured)
    ignored = [name for name in unknown if name not in unhonoured]
    return convert(value, kind), ignored


def convert(value: Mapping[str, Any], kind: type[T], *, strict: bool = True) -> T:
    """Convert decoded JSON to a Struct.

    Args:
        strict: False: texts may stand for numbers, as in a query.

    Raises:
        HttpError: 400, naming the field.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True, strict=strict)
    except msgspec.ValidationError as error:
        _invalid(str(error), kind)


def parse_json(data: Data, limits: BodyLimits) -> Any:
    """Parse a JSON text. Its depth and size are limited, keys must be unique, numbers finite,
    integers within 64 bits, and strings encodable as UTF-8.

    Raises:
        HttpError: 400.
    """
    text = _decoded(data)
    check_size((data,), limits)
    # A long text is parsed in a thread, and other threads run only during these callbacks.
    exact = len(data) > limits.small_bytes or _has_long_number(data)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            # Checking each number is slow and rarely needed.
            parse_int=_int64 if exact else None,
            parse_float=_finite if exact else None,
        )
    except RecursionError:
        raise _too_deep(limits) from None
    except _BadNumber as error:
        raise _bad_number(error, text) from None
    except ValueError as error:
        if isinstance(error, HttpError):
            raise
        raise HttpError(400, f"the body is not JSON: {error}") from None
    _check_depth(data, limits)
    if SURROGATE.search(data):
        _check_surrogates(value)
    return value


def _decoded(data: Data) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        parts = [
            decoder.decode(data[start : start + PIECE_BYTES])
            for start in range(0, len(data), PIECE_BYTES)
        ]
        parts.append(decoder.decode(b"", final=True))
    except UnicodeDecodeError:
        raise HttpError(400, "the body must be UTF-8 text") from None
    return "".join(parts)


def _has_long_number(data: Data) -> bool:
    alike = data.translate(ONE_DIGIT)
    return any(sign in alike for sign in LONG_NUMBER)


def _check_headers(request: Request) -> None:
    """Refuse a request for JSON by its headers, before the body is read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another origin may send some other content types without a preflight request.
    if kind != "application/json":
        raise HttpError(415, "the content type must be application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HttpError(415, "the body must not be compressed")


async def read_bytes(
    request: Request, limits: BodyLimits, grow: Callable[[int], None]
) -> bytearray:
    """Read a body within limits.

    Args:
        grow: see `BodyBudget.share`.

    Raises:
        HttpError: 408 or 413.
        OverloadError: too many large bodies are being read.
    """
    length = request.headers.get("content-length", "0")
    if int(length) > limits.max_bytes:  # the HTTP parser checked that it is a number
        raise _too_large(limits)
    data = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for piece in request.stream():
                data += piece
                if len(data) > limits.max_bytes:
                    raise _too_large(limits)
                grow(len(data))
    except TimeoutError:
        headers = {"connection": "close"}
        message = f"the body did not come within {limits.seconds:g} seconds"
        raise HttpError(408, message, headers=headers) from None
    return data


def check_size(texts: Sequence[Data], limits: BodyLimits) -> None:
    """Raise `HttpError` (400) if JSON texts of a body have too many values together."""
    if _is_small(b",".join(texts), limits):
        return
    max_strings = limits.max_values + limits.max_keys
    outside = [_outside_strings(text, max_strings) for text in texts]
    known = [text for text in outside if text is not None]
    if len(known) < len(texts) or not _is_small(b",".join(known), limits):
        allowed = f"{limits.max_values} values, and {limits.max_keys} keys or objects"
        raise HttpError(400, f"the body must have at most {allowed}")


def _outside_strings(data: Data, max_strings: int) -> bytes | None:
    """Return JSON without its strings; None if there are more than `max_strings`.

    A regular expression would block all other threads ten times longer.
    """
    outside: list[Data] = []
    num_quotes = 0
    for piece in _uncut(data):
        # Without escapes, quotes occur only at the ends of strings.
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = plain.split(b'"')
        outside += parts[num_quotes % 2 :: 2]
        num_quotes += len(parts) - 1
        if num_quotes > 2 * max_strings:
            return None
    return b"".join(outside)


def _uncut(data: Data) -> Iterator[Data]:
    """Yield the data in pieces, none of which ends inside an escape."""
    start = 0
    while start < len(data):
        end = start + PIECE_BYTES
        if data[end - 1 : end] == b"\\":
            after = NO_BACKSLASH.search(data, end)
            end = after.end() if after else len(data)
        yield data[start:end]
        start = end


def _is_small(data: Data, limits: BodyLimits) -> bool:
    """Return whether the data has few values: each follows a comma or an opening bracket."""
    num_brackets = data.count(b"[") + data.count(b"{")
    num_values = num_brackets + data.count(b",")
    num_keys = max(num_brackets, data.count(b":"))
    return num_values <= limits.max_values and num_keys <= limits.max_keys


def _check_depth(data: Data, limits: BodyLimits) -> None:
    if data.count(b"[") + data.count(b"{") <= limits.max_depth:
        return
    outside = _outside_strings(data, max_strings=limits.max_values + limits.max_keys)
    if outside is None:
        raise _too_deep(limits)
    brackets = outside.translate(ONE_KIND, NOT_BRACKETS)
    for _ in range(limits.max_depth):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")  # the innermost level
    if brackets:
        raise _too_deep(limits)


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HttpError(400, "a string of the body has half a surrogate pair") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        name = escaped(twice, 64)
        raise HttpError(400, f"{name}: is given twice", name)
    return value


class _BadNumber(ValueError):
    def __init__(self, number: str, reason: str) -> None:
        super().__init__(number, reason)
        self.number = number[:MAX_SHOWN]
        self.why = reason


def _bad_number(error: _BadNumber, text: str) -> HttpError:
    """Return the error of a bad number. The parser does not report its field: search for it."""
    match = re.search(r'"(\w{1,64})"\s*:\s*' + re.escape(error.number), text)
    field = match[1] if match else ""
    problem = f"{error.number} {error.why}"
    return HttpError(400, f"{field}: {problem}" if field else problem, field)


def _no_number(text: str) -> NoReturn:
    raise _BadNumber(text, "is not a JSON number")


def _int64(text: str) -> int:
    if len(text) <= 20 and -(2**63) <= int(text) < 2**63:
        return int(text)
    raise _BadNumber(text, "is too large for an integer")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadNumber(text, "is too large for a number")
    return value


def _invalid(message: str, kind: type[msgspec.Struct]) -> NoReturn:
    """Raise 400 from a message like "Expected `int`, got `str` - at `$.stop[0]`"."""
    match = PLACE.fullmatch(message)
    problem, place = (match[1], match[3]) if match else (message, "")
    missing = re.fullmatch(r"Object missing required field `(.*)`", problem)
    if missing:
        place = f"{place}.{missing[1]}".removeprefix(".")
        problem = "is required"
    else:
        if problem.startswith("Invalid enum value"):
            problem += f"; allowed: {', '.join(_choices(kind, place))}"
        problem = problem[:1].lower() + problem[1:]
    if match and match[2]:
        problem = f"a key of the object: {problem}"
    place = escaped(place, 200)
    raise HttpError(400, f"{place}: {problem}" if place else problem, place)


def _choices(kind: type[msgspec.Struct], place: str) -> list[str]:
    """Return the values that the literals at a place like "messages[0].role" allow, as JSON."""
    types = [inspect.type_info(kind)]
    for name in re.findall(r"\[|[A-Za-z_]\w*", place):
        types = [inner for outer in types for inner in _inside(outer, name)]
    literals = [literal for literal in types if isinstance(literal, inspect.LiteralType)]
    return [json.dumps(value) for literal in literals for value in literal.values]


def _inside(kind: inspect.Type, name: str) -> Sequence[inspect.Type]:
    """Return the types of a field, or of the entries of a list or of an object ("[")."""
    fields: Mapping[str, inspect.Type] = {}
    if isinstance(kind, inspect.StructType):
        fields = {field.encode_name: field.type for field in kind.fields}
    elif isinstance(kind, inspect.ListType):
        fields = {"[": kind.item_type}
    elif isinstance(kind, inspect.DictType):
        fields = {"[": kind.value_type}
    inner = fields.get(name)
    if inner is None:
        return ()
    types = inner.types if isinstance(inner, inspect.UnionType) else (inner,)
    return [kind.type if isinstance(kind, inspect.Metadata) else kind for kind in types]


def _too_large(limits: BodyLimits) -> HttpError:
    return HttpError(413, f"the body must have at most {limits.max_bytes} bytes")


def _too_deep(limits: BodyLimits) -> HttpError:
    return HttpError(400, f"the body must not be nested deeper than {limits.max_depth} levels")
