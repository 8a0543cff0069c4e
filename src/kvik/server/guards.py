"""Browsers: which pages may use the server, and that no name of a stranger leads to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers

from kvik.server.errors import HttpError

ANY = "*"
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")
EXPOSED = "retry-after, x-request-id, x-kvik-request-id, x-kvik-ignored-fields, x-should-retry"
MAX_AGE = "600"  # seconds that a browser remembers what it may do


def is_loopback(host: str) -> bool:
    """Whether an address, or a name of one, is reached from this machine alone."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def check_host(headers: Headers, *, loopback: bool, http_version: str) -> None:
    """Refuse a Host that cannot be, or that is not this machine where only it may connect: a page
    whose own name leads here (DNS rebinding) says so in this header.

    Raises:
        HttpError: 400 or 403.
    """
    hosts = headers.getlist("host")
    if not hosts and http_version == "1.0":
        return  # no browser
    if len(hosts) != 1:
        raise HttpError(400, "there must be one Host header")
    parts = HOST.fullmatch(hosts[0])
    if parts is None:
        raise HttpError(400, "the Host header is malformed")
    if loopback and not is_loopback(parts[1]):
        message = "the server listens on this machine alone and is not known by that name"
        raise HttpError(403, message)


class Origins:
    """The web pages that may use the server."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    def headers(self, headers: Headers) -> dict[str, str]:
        """What to add to an answer. Never with credentials: a key is sent by the page itself."""
        origin = headers.get("origin")
        if origin is None or not self._is_listed(origin):
            return {}
        return {
            "access-control-allow-origin": ANY if ANY in self._allowed else origin,
            "access-control-expose-headers": EXPOSED,
            "vary": "origin",
        }

    def preflight(self, headers: Headers) -> dict[str, str] | None:
        """What the answer to a browser that asks whether it may send a request has beside
        `headers`; None: it did not ask, or may not."""
        if not self.headers(headers) or "access-control-request-method" not in headers:
            return None
        asked = headers.get("access-control-request-headers", "")
        return {
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": re.sub(r"[^A-Za-z0-9_, -]", "", asked),
            "access-control-max-age": MAX_AGE,
        }

    def check(self, headers: Headers) -> None:
        """Refuse a page of another origin.

        Raises:
            HttpError: 403.
        """
        origin = headers.get("origin")
        if origin is None or self._is_listed(origin):
            return
        if origin.lower().partition("://")[2] != headers.get("host", "").lower():
            raise HttpError(403, "pages of this origin may not use the server (--cors-origin)")

    def _is_listed(self, origin: str) -> bool:
        return ANY in self._allowed or origin.lower() in self._allowed
