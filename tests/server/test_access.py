"""Requests are authenticated the same, however they are written."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from helpers.edge import KEY, Calls, edge_server
from helpers.http_server import HttpServer, ask, raw
from starlette.datastructures import Headers

from kvik.config.server_config import ServerConfig
from kvik.errors import ConfigError
from kvik.server.access import Keys, read_keys


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls()


@pytest.fixture(scope="module")
def server(calls: Calls) -> Iterator[HttpServer]:
    with edge_server(["right", "other"], ServerConfig(), calls) as running:
        yield running


TARGETS = [
    "/v1/models",
    "//v1/models",
    "/V1/models",
    "/v1/models/",
    "/v1/x/../models",
    "/v1%2Fmodels",
    "/v1/models%00",
    "/v1/models?key=right",
    "/health/../v1/models",
    "/health%2f..%2fv1/models",
    "http://elsewhere/v1/models",
    "http://x@127.0.0.1/health/../v1/models",
    "*",
    "/v1/models#/health",
    "/health/",
    "/HEALTH",
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "TRACE"])
def test_without_a_key_all_forms_of_requests_are_refused(
    server: HttpServer, calls: Calls, method: str, target: str
) -> None:
    del calls[:]
    head = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    answer = raw(server, head.encode())
    assert answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), answer
    assert calls == []
    if b" 401 " in answer:
        assert b'www-authenticate: Bearer realm="kvik"' in answer


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/models", 200),
        ("/v1/models/a%2Fb", 200),
        ("http://elsewhere/v1/models", 200),
        ("/V1/models", 404),
        ("//v1/models", 404),
    ],
)
def test_the_router_decides_the_same_with_a_key(
    server: HttpServer, target: str, status: int
) -> None:
    head = (
        f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer right\r\n"
        "Connection: close\r\n\r\n"
    )
    assert raw(server, head.encode()).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer right"},
        {"authorization": "bearer   right "},
        {"x_api_key": "right"},
        {"authorization": "Bearer wrong", "x_api_key": "right"},
    ],
)
def test_a_key_in_either_header(server: HttpServer, headers: dict[str, str]) -> None:
    assert ask(server, "GET", "/v1/models", **headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "right"},
        {"authorization": "Basic right"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer Right"},
        {"x_api_key": ""},
        {"x_api_key": "righ"},
        {"cookie": "x-api-key=right"},
    ],
)
def test_no_or_a_wrong_key(server: HttpServer, headers: dict[str, str]) -> None:
    reply = ask(server, "POST", "/v1/echo", {}, **headers)
    assert reply.status == 401
    assert reply.error["code"] == "invalid_api_key"
    assert "Bearer" in reply.headers["www-authenticate"]
    assert "x-should-retry" not in reply.headers


def test_the_key_is_checked_before_the_body_is_read(server: HttpServer) -> None:
    head = (
        b"POST /v1/echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000\r\nConnection: close\r\n\r\n"
    )
    assert raw(server, head).startswith(b"HTTP/1.1 401 ")  # the body was not sent


def test_each_key_is_a_separate_caller(server: HttpServer) -> None:
    names = [
        ask(server, "POST", "/v1/echo", {}, authorization=f"Bearer {key}").json["caller"]
        for key in ("right", "other", "right")
    ]
    assert names[0] == names[2] != names[1]
    assert not {"right", "other"} & set(names)


def test_open_routes_need_no_key(server: HttpServer) -> None:
    assert ask(server, "GET", "/health").status == 200
    assert ask(server, "HEAD", "/health").body == b""
    assert ask(server, "POST", "/health").status == 401  # only routes that are declared open


def test_websockets_are_refused(server: HttpServer, calls: Calls) -> None:
    del calls[:]
    head = (
        "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    for target in ("/v1/echo", "/v1/models"):
        assert b" 401 " in raw(server, head.format(target).encode())[:20]
    assert calls == []


def test_unknown_paths_and_methods(server: HttpServer) -> None:
    reply = ask(server, "GET", "/v1/none", **KEY)
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    reply = ask(server, "PUT", "/v1/echo", **KEY)
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    reply = ask(server, "OPTIONS", "/v1/models", **KEY)
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


def test_head_is_get_without_a_body(server: HttpServer) -> None:
    got, headed = (ask(server, method, "/v1/models", **KEY) for method in ("GET", "HEAD"))
    assert headed.status == 200
    assert headed.body == b""
    assert headed.headers["content-length"] == str(len(got.body))


# API keys and their callers


def who(keys: Keys, **headers: str) -> str | None:
    raw = [(name.replace("_", "-").encode(), v.encode("latin-1")) for name, v in headers.items()]
    caller = keys.caller(Headers(raw=raw))
    return caller and caller.name


def test_without_keys_all_callers_may() -> None:
    keys = read_keys([])
    assert not keys.needed
    assert who(keys) == who(keys, authorization="Bearer x") == "anybody"


def test_a_file_with_names_administrators_and_hashes(tmp_path: Path) -> None:
    digest = sha256(b"third").hexdigest()
    file = tmp_path / "keys"
    file.write_text(
        "# who may\n\nalice: first\n  bob:  second admin \n"
        f"carol: sha256:{digest}\nsk:with:colons\n"
    )
    keys = read_keys(["given"], str(file))
    assert keys.needed
    assert keys.has_admin
    for text, name in (
        ("first", "alice"),
        ("second", "bob"),
        ("third", "carol"),
        ("sk:with:colons", "line-6"),
        ("given", "key-1"),
        (digest, None),
        (f"sha256:{digest}", None),
        ("alice:", None),
        ("admin", None),
        ("#", None),
    ):
        assert who(keys, authorization=f"Bearer {text}") == name
        assert who(keys, x_api_key=text) == name
    bob = keys.caller(Headers({"x-api-key": "second"}))
    assert (bob.tenant, bob.is_admin) == ("bob", True)


@pytest.mark.parametrize(
    ("given", "lines", "administrators"),
    [
        (["a"], None, {"a"}),
        ([], "a", {"a"}),
        ([], f"sha256:{sha256(b'a').hexdigest()}", {"a"}),
        ([], "user: a", set()),
        ([], "user: a admin", {"a"}),
        (["a", "b"], None, set()),
        (["a"], "b", set()),
        (["a"], "b admin", {"b"}),
        ([], "a\nb", set()),
    ],
)
def test_the_key_of_a_single_user_server_is_an_administrators(
    tmp_path: Path, given: list[str], lines: str | None, administrators: set[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text(lines or "")
    keys = read_keys(given, None if lines is None else str(file))
    callers = {text: keys.caller(Headers({"x-api-key": text})) for text in ("a", "b")}
    assert {text for text, who in callers.items() if who and who.is_admin} == administrators
    assert keys.has_admin == bool(administrators)


def test_only_hashes_are_kept() -> None:
    keys = read_keys(["sesame"])
    assert "sesame" not in repr(vars(keys))


def test_any_bytes_may_be_sent() -> None:
    keys = read_keys(["right"])
    assert who(keys, x_api_key="\xff\x80") is None
    assert who(keys, x_api_key="r" * 60_000) is None


def test_every_key_is_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time reveals neither which key matched nor how much of a key was right."""
    keys = read_keys([f"key{i}" for i in range(10)])
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", count)
    for text in ("key0", "key9", "wrong"):
        del compared[:]
        keys.caller(Headers({"x-api-key": text}))
        assert len(compared) == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one two three", "line 1 must be"),
        ("a: x\na: y", "the name a twice"),
        ("a: secret\nb: secret", "a key twice"),
        ("", "holds no key"),
        ("# nothing", "holds no key"),
        ("secret\nbob:", "line 2 has no key"),
        ("bob: admin", "line 1 has no key"),
        ("x: \u00fc", "printable ASCII"),
        (f"x: sha256:{'0' * 63}", "64 hexadecimal"),
    ],
)
def test_a_wrong_file_is_refused_and_no_key_shown(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_keys([], str(file))
    assert error.value.field == "api_key_file"
    assert "three" not in error.value.message


@pytest.mark.parametrize("key", ["", " x", "a\nb", "ü"])
def test_a_key_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError, match="printable"):
        read_keys([key])


def test_no_file() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys([], "/no/such/file")
