"""`--url` and `--api-key` of all commands that talk to a server."""

from __future__ import annotations

from http.client import HTTPSConnection
from pathlib import Path

import pytest
from helpers.commands import Command

from kvik.errors import ConfigError
from kvik.remote_server import RemoteServer

COMMANDS = (["top", "--once"], ["chat"], ["bench", "serve"])


@pytest.mark.parametrize(
    ("given", "host", "port", "target"),
    [
        ("localhost:8000/v1", "localhost", 8000, "/v1/models"),
        ("localhost", "localhost", 80, "/v1/models"),
        ("https://a.b/kvik/v1/", "a.b", 443, "/kvik/v1/models"),
        ("https://a.b:4//", "a.b", 4, "/v1/models"),
        ("http://[::1]:8000", "::1", 8000, "/v1/models"),
    ],
)
def test_forms_of_addresses(given: str, host: str, port: int, target: str) -> None:
    server = RemoteServer.at(given)
    connection = server.connection(5.0)
    assert (connection.host, connection.port, connection.timeout) == (host, port, 5.0)
    assert isinstance(connection, HTTPSConnection) == given.startswith("https")
    assert server.target("/v1/models") == target
    assert not server.headers


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    "url",
    ["", "ftp://here", "http://", "http://me:secret@here", "here:99999", "here:x", "http://[a",
     "he re", "a/b c", "here?key=1", "here#x"],
)  # fmt: skip
def test_invalid_addresses(words: list[str], url: str, command: Command) -> None:
    error = f"--url: must be like http://127.0.0.1:8000, not {url!r}"
    assert command.refusal(*words, "--url", url) == error


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("key", ["a\nb", "a b", "@/no/such/file", "@"])
def test_what_is_no_key(words: list[str], key: str, command: Command) -> None:
    assert command.refusal(*words, "--url", "here", "--api-key", key).startswith("--api-key: ")


def test_a_key_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    server = RemoteServer.at("here", f"@{file}")
    assert server.headers == {"Authorization": "Bearer secret"}
    assert "secret" not in repr(server)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="api_key: cannot be read"):
        RemoteServer.at("here", f"@{file}")
