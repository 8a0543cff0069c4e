"""Addresses of a server: HTTPS, a Unix socket, a path prefix of a reverse proxy."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

import pytest
from helpers.certificates import CERTIFICATE, KEY, KEY_WITH_PASSWORD, OTHER_KEY
from helpers.edge import edge_server
from helpers.http_server import HttpServer, ask, http_server, until
from starlette.types import Receive, Scope, Send

from kvik.cli.main import main
from kvik.config.server_config import ServerConfig
from kvik.errors import ConfigError
from kvik.server.http_protocol import ConnectionLimits
from kvik.server.run import bind_unix, server_tls


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {
        "cert": CERTIFICATE,
        "key": KEY,
        "other": OTHER_KEY,
        "locked": KEY_WITH_PASSWORD,
        "both": CERTIFICATE + KEY,
        "text": "no certificate",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in texts}


def trusting(file: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=file)


@pytest.mark.parametrize("names", [("cert", "key"), ("both", None)])
def test_https(files: dict[str, str], names: tuple[str, str | None]) -> None:
    tls = server_tls(files[names[0]], None if names[1] is None else files[names[1]])
    with edge_server([], ServerConfig(), tls=tls) as server:
        context = trusting(files["cert"])
        connection = HTTPSConnection("localhost", server.port, timeout=30, context=context)
        for path in ("/v1/models", "/v1/stream"):
            connection.request("GET", path)
            response = connection.getresponse()
            assert response.status == 200
            assert response.read()
        connection.close()
        until(lambda: not server.listener.num_connections)
        with pytest.raises(OSError):  # the client does not trust the certificate
            HTTPSConnection("localhost", server.port, timeout=30).request("GET", "/health")
        with socket.create_connection(("127.0.0.1", server.port), 30) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP/1.1 200" not in plain.recv(100)


def test_a_handshake_has_limited_time(files: dict[str, str]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    tls = server_tls(files["cert"], files["key"])
    with (
        http_server(app, ConnectionLimits(head_seconds=0.3), tls=tls) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as silent,
    ):
        assert silent.recv(100) == b""


@pytest.mark.parametrize(
    ("cert", "key", "field", "part"),
    [
        ("missing", "key", "ssl_certfile", "No such file"),
        ("cert", "missing", "ssl_keyfile", "No such file"),
        ("text", "key", "ssl_certfile", "has no certificate"),
        ("cert", "text", "ssl_keyfile", "has no private key"),
        ("cert", "locked", "ssl_keyfile", "without a password"),
        ("cert", "other", "ssl_keyfile", "is not the key of the certificate"),
        ("cert", None, "ssl_certfile", "has no private key"),
    ],
)
def test_files_that_cannot_be_used(
    files: dict[str, str], cert: str, key: str | None, field: str, part: str
) -> None:
    paths = {**files, "missing": "/no/such/file"}
    with pytest.raises(ConfigError, match=part) as refused:
        server_tls(paths[cert], None if key is None else paths[key])
    assert refused.value.field == field


def test_a_key_needs_its_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--ssl-keyfile", "key.pem"]) == 2
    assert (
        "--ssl-keyfile: needs the certificate of the key: --ssl-certfile" in capsys.readouterr().err
    )


class UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("gpu.example", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "kvik.sock")
    with bind_unix(path) as listening:
        with pytest.raises(ConfigError, match="uds: cannot listen on .* in use"), bind_unix(path):
            pass
        edge = ServerConfig(allowed_host=("*",))
        with edge_server(["right"], edge, listening=listening) as server:
            connection = UnixConnection(path)
            for _ in range(2):
                connection.request("GET", "/health")
                assert connection.getresponse().read() == b'{"path":null}'
            connection.close()
            with socket.socket(socket.AF_UNIX) as half:  # only closes its sending half
                half.settimeout(30)
                half.connect(path)
                half.sendall(
                    b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer right\r\n\r\n"
                )
                half.shutdown(socket.SHUT_WR)
                received = b""
                while piece := half.recv(4096):
                    received += piece
            assert b"data: 2" in received
            until(lambda: not server.listener.num_connections)
    assert not Path(path).exists()


def test_only_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kvik.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with bind_unix(str(path)):
        assert path.is_socket()
    stopping = ExitStack()
    stopping.enter_context(bind_unix(str(path))).close()  # it still waits for its engine to end
    with bind_unix(str(path)):
        stopping.close()
        assert path.is_socket()
    path.write_text("precious")
    for wrong in (str(path), "/no/such/folder/kvik.sock", "x" * 200):
        with pytest.raises(ConfigError) as refused, bind_unix(wrong):
            pass
        assert refused.value.field == "uds"
        assert ("not a socket" in refused.value.message) == (wrong == str(path))
    assert path.read_text() == "precious"


@pytest.fixture(scope="module")
def prefixed() -> Iterator[HttpServer]:
    with edge_server([], ServerConfig(root_path="/llm")) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models", 200),
        ("/llm/v1/models", 200),
        ("/llm/llm/v1/models", 404),
        ("/llmx/v1/models", 404),
        ("/other/v1/models", 404),
    ],
)
def test_a_prefix_may_be_removed_or_not(prefixed: HttpServer, path: str, status: int) -> None:
    assert ask(prefixed, "GET", path).status == status


def test_errors_below_a_prefix_have_the_shape_of_their_api(prefixed: HttpServer) -> None:
    assert ask(prefixed, "POST", "/llm/v1/messages/fail", {}).json["type"] == "error"
