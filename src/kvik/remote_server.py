"""A remote server, given by `--url` and `--api-key` of any command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from kvik.config.env import client_key
from kvik.errors import ConfigError, shown

_IN_A_HEADER = re.compile(r"[!-~]*")
KEY_HELP = "the key"


def add_key_flag(add: argparse._ActionsContainer, help: str = KEY_HELP) -> None:
    note = f"{help}, or @FILE that holds it (default: the environment's KVIK_API_KEY)"
    add.add_argument("--api-key", metavar="KEY", help=note)


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server given by `--url` and `--api-key`."""

    url: str  # with http:// or https://, and without the final /v1 of OpenAI's clients
    key: str = field(default="", repr=False)  # "": none

    @classmethod
    def at(cls, url: str, key: str | None = None) -> RemoteServer:
        """Return the server that a user names: http:// may be left out, and a final /v1 is ignored.

        Args:
            key: as typed; None: taken from the environment.

        Raises:
            ConfigError: url or api_key is invalid.
        """
        full_url = url if "://" in url else f"http://{url}"
        if not _is_http(full_url):
            raise ConfigError("url", f"must be like http://127.0.0.1:8000, not {shown(url)}")
        return cls(
            full_url.rstrip("/").removesuffix("/v1").rstrip("/"),
            _checked(client_key() if key is None else _read_key(key)),
        )

    def connection(self, timeout: float) -> HTTPConnection:
        """Return an unopened connection; `timeout` is the longest silence in seconds."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.hostname, parts.port or kind.default_port, timeout=timeout)

    def target(self, path: str) -> str:
        """Return the target of a request: `path` after the path of the URL."""
        return urlsplit(self.url).path + path

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port
        return False
    more = parts.query or parts.fragment or parts.username
    return bool(good and not more and re.fullmatch(r"[!-~]+", url))


def _read_key(text: str) -> str:
    key = text
    if text.startswith("@"):
        try:
            key = Path(text[1:]).read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError):  # ValueError: no text, or no name of a file
            raise ConfigError("api_key", f"cannot be read from {shown(text[1:])}") from None
    return key


def _checked(key: str) -> str:
    if not _IN_A_HEADER.fullmatch(key):
        raise ConfigError("api_key", "must be printable ASCII characters without spaces")
    return key
