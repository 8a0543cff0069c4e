"""Bodies are read within limits and decoded strictly."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import pytest
from helpers.http_server import HttpServer, ask, http_server
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvik.config.server_config import ServerConfig
from kvik.errors import OverloadError
from kvik.server import route as body
from kvik.server.access import Keys
from kvik.server.app import App
from kvik.server.errors import HttpError
from kvik.server.route import BodyBudget, BodyLimits, Route, parse_json, read_body
from kvik.server.server import Drain

LIMITS = BodyLimits(max_bytes=1 << 20, max_values=10_000, max_keys=1000, max_depth=20)


class Part(msgspec.Struct):
    text: str
    side: Literal["left", "right"] | None = None


class Body(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    flag: bool = False
    parts: list[Part] = []
    bias: dict[int, float] = {}
    named: dict[str, Part] = {}
    mode: Literal["auto", "none"] | Part = "auto"
    anything: Any = None


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    async def body(request: Request) -> Response:
        body = await read_body(request, Body)
        return JSONResponse(msgspec.to_builtins(body, str_keys=True))

    config = ServerConfig(host="")
    app = App([Route("/body", body)], Keys(), Drain(), config, limits=LIMITS)
    with http_server(app) as running:
        yield running


def test_valid_bodies_are_read(server: HttpServer) -> None:
    body = {
        "number": 3,
        "share": 1,
        "flag": True,
        "parts": [{"text": "ä \U0001f600 \x00", "side": "left"}],
        "bias": {"7": -1.5},
        "named": {"a": {"text": "", "side": None}},
        "mode": "none",
        "anything": [None, {"a": [[]]}],
    }
    reply = ask(server, "POST", "/body", body)
    assert reply.status == 200, reply.body
    assert reply.json == body
    assert "x-kvik-ignored-fields" not in reply.headers


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"number": "3"}', "number"),
        ('{"number": 3.5}', "number"),
        ('{"number": null}', "number"),
        ('{"share": 0}', "share"),
        ('{"share": 1.5}', "share"),
        ('{"flag": 1}', "flag"),
        ('{"parts": [{"text": 1}]}', "parts[0].text"),
        ('{"parts": [{}]}', "parts[0].text"),
        ('{"bias": {"x": 1}}', "bias"),
        ('{"number": 1, "number": 1}', "number"),
        ('{"new\\nline": 1, "new\\nline": 1}', "new\\nline"),
    ],
)
def test_the_field_that_is_wrong_is_named(server: HttpServer, text: str, param: str) -> None:
    reply = ask(server, "POST", "/body", text)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert param in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"parts": [{"text": "", "side": "up"}]}', {"left", "right"}),
        ('{"named": {"a": {"text": "", "side": "up"}}}', {"left", "right"}),
        ('{"mode": "up"}', {"auto", "none"}),
        ('{"mode": {"text": "", "side": "up"}}', {"left", "right"}),
    ],
)
def test_the_values_of_a_choice_are_listed(server: HttpServer, text: str, values: set[str]) -> None:
    reply = ask(server, "POST", "/body", text)
    assert reply.status == 400
    assert set(re.findall(r'"(\w+)"', reply.error["message"])) == values


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"number": 1}x',
        "[]",
        "null",
        '{"number": 01}',
        '{"anything": NaN}',
        '{"share": 1e400}',
        '{"anything": -1e400}',
        '{"anything": 123456789012345678901234567890}',
        '{"anything": -9223372036854775809}',
        '{"number": 1' + "0" * 10_000 + "}",
        '{"anything": "\\ud800"}',
        '{"\\ud800": 1}',
        '\ufeff{"number": 1}',
        '{"anything": ' + "[" * 100_000,
        '{"a":' * 50_000,
        '{"anything": ' + "[" * 20 + "]" * 20 + "}",
        '{"unknown": ' + "[" * 20 + "]" * 20 + "}",
        '{"anything": [' + "0," * 10_000 + "0]}",
        "{" + ",".join(f'"{i}": 0' for i in range(1001)) + "}",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_invalid_json(server: HttpServer, text: str) -> None:
    reply = ask(server, "POST", "/body", text)
    assert reply.status == 400
    assert reply.error["message"]
    assert len(reply.error["message"]) < 400


def test_json_that_is_barely_valid(server: HttpServer) -> None:
    for text in (
        '{"anything": ' + "[" * 19 + "]" * 19 + "}",
        "{" + ",".join(f'"{i}": 0' for i in range(1000)) + "}",
        '{"anything": "' + "[{,:" * 30_000 + '"}',  # inside a string these are text
        '{"anything": "\\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["}',
        '{"anything": [9223372036854775807, -9223372036854775808]}',
        '{"anything": [1e308, 1E-400, 12345678901234567890.5, -0.0]}',
        '{"anything": "12345678901234567890123 1e999"}',
        '{"anything": [' + ",".join(["0"] * 9000) + "]}",
        '{"anything": "' + "x" * 200_000 + '"}',
    ):
        reply = ask(server, "POST", "/body", text)
        assert reply.status == 200, (text[:40], reply.body[:200])


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
        (None, 415),
    ],
)
def test_content_types(server: HttpServer, kind: str | None, status: int) -> None:
    assert ask(server, "POST", "/body", "{}", content_type=kind).status == status


@pytest.mark.parametrize("coding", ["gzip", "zstd", "gzip, identity", "x"])
def test_compressed_bodies_are_refused(server: HttpServer, coding: str) -> None:
    data = gzip.compress(b"{" + b" " * 1_000_000 + b"}")
    assert ask(server, "POST", "/body", data, content_encoding=coding).status == 415
    assert ask(server, "POST", "/body", "{}", content_encoding="identity").status == 200


def test_unknown_fields_are_listed(server: HttpServer) -> None:
    body = {"number": 1, "one": 1, "two, three": 2, "zwölf": 12, "x" * 100: 0, "\r\nset-cookie:": 1}
    reply = ask(server, "POST", "/body", body)
    assert reply.status == 200
    ignored = reply.headers["x-kvik-ignored-fields"]
    assert ignored.startswith("one, two, three, zw\\xf6lf, ")
    assert "x" * 64 + "..." in ignored
    assert ignored.endswith("\\r\\nset-cookie:")
    many = {f"field{i}": i for i in range(900)}
    assert len(ask(server, "POST", "/body", many).headers["x-kvik-ignored-fields"]) < 400


def test_large_bodies_share_a_budget() -> None:
    budget = BodyBudget(BodyLimits(small_bytes=10, total_bytes=100))
    with budget.share() as one, budget.share() as two, budget.share() as small:
        one(40)
        one(60)
        two(40)
        small(10)  # not counted
        assert budget.num_bytes == 100
        with pytest.raises(OverloadError) as error:
            two(41)
        assert not error.value.of_caller
    assert budget.num_bytes == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@settings(max_examples=examples(200))
@given(JSON, st.booleans())
def test_any_json_is_read_as_the_library_reads_it_or_refused(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = json.dumps(value).encode()
    try:
        read = parse_json(data, BodyLimits())
    except HttpError as error:
        assert error.status == 400
        return
    assert read == json.loads(data)


@settings(max_examples=examples(300))
@given(st.binary(max_size=64) | st.text(alphabet='[]{}",:\\u0d8e19 ').map(str.encode))
def test_any_bytes_are_json_or_refused(data: bytes) -> None:
    try:
        parse_json(data, BodyLimits(max_depth=4, max_values=8))
    except HttpError as error:
        assert error.status == 400


def outside_strings(data: bytes) -> bytes:
    """Remove strings from the whole body."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


@given(st.lists(st.sampled_from([*b'"\\[]{},a', 0xC3]), max_size=40).map(bytes))
def test_a_body_in_pieces_is_the_same_as_whole(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "PIECE_BYTES", 3)
        assert body._outside_strings(data, 1000) == outside_strings(data)
        quotes = data.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"')
        if quotes > 2:
            assert body._outside_strings(data, 1) is None
        text = data.replace(b"\xc3", "ä€🐕".encode())
        assert body._decoded(text) == text.decode()
        if b"\xc3" in data:
            with pytest.raises(HttpError, match="UTF-8"):
                body._decoded(data)
