"""Checks of browsers' requests: the Host header and the origin of the page."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers

from kvik.server.errors import HttpError

ANY = "*"
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")
EXPOSED = "retry-after, x-request-id, x-kvik-request-id, x-kvik-ignored-fields, x-should-retry"
MAX_AGE = "600"  # seconds for which a browser caches a preflight response


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reached only from this machine."""
    name = _plain(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


class Hosts:
    """The names under which a server may be reached. A page whose own name leads here (DNS
    rebinding) says that name in the Host header.

    Loopback names are always known. A server that others can reach is also known by any address,
    which no stranger can make lead elsewhere, and by the name of its machine. A page cannot send
    a key that it does not know, so where keys are needed any name will do, unless some are listed.

    Args:
        host: the server listens on; "" is every address.
        allowed: more names; * is any.
        keyed: the server needs keys.
    """

    def __init__(self, host: str, allowed: Sequence[str], *, keyed: bool) -> None:
        self._public = not is_loopback(host)
        self._names = {_plain(name) for name in allowed}
        self._any = ANY in self._names or (keyed and self._public and not self._names)
        if self._public:
            self._names |= {_plain(host), _plain(socket.gethostname())}

    def check(self, headers: Headers, http_version: str) -> None:
        """Refuse a Host that cannot be, or that is no name of the server.

        Raises:
            HttpError: 400 or 403.
        """
        hosts = headers.getlist("host")
        if not hosts and http_version == "1.0":
            return  # not a browser
        if len(hosts) != 1:
            raise HttpError(400, "there must be one Host header")
        parts = HOST.fullmatch(hosts[0])
        if parts is None:
            raise HttpError(400, "the Host header is malformed")
        if not self._any and not self._knows(parts[1]):
            raise HttpError(403, "the server is not known by this Host (--allowed-host)")

    def _knows(self, host: str) -> bool:
        name = _plain(host)
        return name in self._names or is_loopback(name) or (self._public and _is_address(name))


def _plain(host: str) -> str:
    return host.strip("[]").lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Origins:
    """The origins of web pages that may use the server."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    def headers(self, headers: Headers) -> dict[str, str]:
        """The CORS headers of a response; without credentials, as the page itself sends the key."""
        origin = headers.get("origin")
        if origin is None or not self._is_listed(origin):
            return {}
        return {
            "access-control-allow-origin": ANY if ANY in self._allowed else origin,
            "access-control-expose-headers": EXPOSED,
            "vary": "origin",
        }

    def preflight(self, headers: Headers) -> dict[str, str] | None:
        """The further headers of the response to an allowed preflight request; None: it is none."""
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
