"""Access control: API keys, and for browsers the Host header and the origin of the page."""

from __future__ import annotations

import hmac
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from starlette.datastructures import Headers

from kvik.errors import ConfigError
from kvik.server.errors import HttpError

# API keys. Only hashes are kept, and every comparison reads all of them.

# [NAME:] KEY [admin]; a key itself may hold colons, so a name is followed by space
LINE = re.compile(r"(?:([\w.-]{1,64}):\s+)?(\S+)(?:\s+(admin))?")
NO_KEY = re.compile(r"[\w.-]{1,64}:|admin")  # the rest of a line whose key was never filled in
HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    tenant: str  # the name under which it shares the engine and the prefix cache
    name: str  # name for logs; reveals nothing about the key
    is_admin: bool = False  # whether it may use the admin routes


ANONYMOUS = Caller("", "anybody")  # where no keys are configured


@dataclass(frozen=True, slots=True)
class Key:
    digest: bytes  # SHA-256 of the key
    caller: Caller


class Keys:
    """All keys of a server."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    @property
    def needed(self) -> bool:
        """Whether callers must have a key."""
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        return any(key.caller.is_admin for key in self._keys)

    def caller(self, headers: Headers) -> Caller | None:
        """Return the owner of the key in these headers; None without a valid key.

        A key is sent as `Authorization: Bearer KEY` or as `x-api-key: KEY`; some clients send both,
            and one valid key is enough.
        """
        if not self._keys:
            return ANONYMOUS
        owner = None
        for text in presented(headers):
            digest = sha256(text.encode("utf-8", "surrogateescape")).digest()
            for key in self._keys:  # all of them, so that timing reveals nothing
                if hmac.compare_digest(digest, key.digest):
                    owner = key.caller
        return owner


def presented(headers: Headers) -> list[str]:
    """Return the keys in the headers of a request."""
    texts = list(headers.getlist("x-api-key"))
    for value in headers.getlist("authorization"):
        scheme, _, text = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            texts.append(text.strip())
    return [text for text in texts if text]


def read_keys(texts: Sequence[str], file: str | None = None) -> Keys:
    """Read the given keys, then those of a file.

    A single key without a name is an administrator's: the server has one user.

    Raises:
        ConfigError: `api_key` or `api_key_file` has an invalid key.
    """
    keys = [Key(_digest("api_key", text), _caller(f"key-{i + 1}")) for i, text in enumerate(texts)]
    named = False
    if file is not None:
        of_file, named = _of_file(file)
        keys += of_file
    if len(keys) == 1 and not named:
        keys = [replace(keys[0], caller=replace(keys[0].caller, is_admin=True))]
    if len({key.digest for key in keys}) < len(keys):  # whose tenant would its requests be?
        raise ConfigError("api_key" if file is None else "api_key_file", "has a key twice")
    for name, count in Counter(key.caller.name for key in keys).items():
        if count > 1:
            raise ConfigError("api_key_file", f"has the name {name} twice")
    return Keys(keys)


def _of_file(file: str) -> tuple[list[Key], bool]:
    """Return the keys of a file, and whether one of them has a name."""
    try:
        lines = Path(file).expanduser().read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError("api_key_file", f"{file!r} cannot be read: {reason}") from None
    keys, named = [], False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        # The message does not quote the line: it may be a key.
        parts = LINE.fullmatch(text)
        if parts is None:
            raise ConfigError("api_key_file", f"line {number} must be [NAME:] KEY [admin]")
        name, key, admin = parts.groups()
        if NO_KEY.fullmatch(key):  # anyone can guess it
            raise ConfigError("api_key_file", f"line {number} has no key")
        named = named or name is not None
        caller = _caller(name or f"line-{number}", admin=admin is not None)
        keys.append(Key(_digest("api_key_file", key), caller))
    if not keys:
        # An operator who names a file of keys does not want an open server.
        raise ConfigError("api_key_file", f"{file!r} holds no key")
    return keys, named


def _caller(name: str, *, admin: bool = False) -> Caller:
    return Caller(tenant=name, name=name, is_admin=admin)


def _digest(field: str, text: str) -> bytes:
    hashed = HASHED.fullmatch(text)
    if hashed:
        return bytes.fromhex(hashed[1])
    if text.startswith("sha256:"):  # which is no secret, so it must not be taken for the key itself
        raise ConfigError(field, "needs 64 hexadecimal digits behind sha256:")
    if not text or text != text.strip() or not text.isascii() or not text.isprintable():
        raise ConfigError(field, "must be printable ASCII text without spaces around it")
    return sha256(text.encode()).digest()


ANY = "*"
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?")
EXPOSED = (
    "retry-after, x-request-id, request-id, x-kvik-request-id, x-kvik-ignored-fields, "
    "x-kvik-degraded, kvik-unenforced, x-should-retry"
)
MAX_AGE = "600"  # seconds for which a browser caches a preflight response


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is reached only from this machine."""
    name = _plain(host)
    address = _address(name)
    is_local = name == "localhost" or name.endswith(".localhost")
    return is_local or (address is not None and address.is_loopback)


class Hosts:
    """The names under which a server may be reached. A page whose own name resolves to this server
    (DNS rebinding) sends that name in the Host header.

    Loopback names are always accepted. A server on a public address also accepts any IP address,
    which an attacker cannot redirect, and the name of its machine. A page cannot send a key that it
    does not know, so if keys are needed any name is accepted, unless names are listed.

    Args:
        host: address that the server listens on; "" is every address.
        allowed: additional names; * is any.
        keyed: whether the server needs keys.
    """

    def __init__(self, host: str, allowed: Sequence[str], *, keyed: bool) -> None:
        self._public = not is_loopback(host)
        self._names = {_plain(name) for name in allowed}
        self._any = ANY in self._names or (keyed and self._public and not self._names)
        if self._public:
            self._names |= {_plain(host), _plain(socket.gethostname())}

    def check(self, headers: Headers, http_version: str) -> None:
        """Refuse an invalid Host, or one that is not a name of the server: HttpError 400 or 403."""
        hosts = headers.getlist("host")
        if not hosts and http_version == "1.0":
            return  # not a browser
        if len(hosts) != 1:
            raise HttpError(400, "there must be one Host header")
        parts = HOST.fullmatch(hosts[0])
        if parts is None:
            raise HttpError(400, "the Host header is malformed")
        if not self._any and not self._knows(parts[1]):
            raise HttpError(403, "this Host is not a name of the server (--allowed-host)")

    def _knows(self, host: str) -> bool:
        name = _plain(host)
        return (
            name in self._names
            or is_loopback(name)
            or (self._public and _address(name) is not None)
        )


def _plain(host: str) -> str:
    return host.strip("[]").lower().rstrip(".")


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


class Origins:
    """The origins of web pages that may use the server."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    def headers(self, headers: Headers) -> dict[str, str]:
        """Return the CORS headers of a response.

        They allow no credentials, as the page itself sends the key.
        """
        origin = headers.get("origin")
        if origin is None or not self._is_listed(origin):
            return {}
        return {
            "access-control-allow-origin": ANY if ANY in self._allowed else origin,
            "access-control-expose-headers": EXPOSED,
            "vary": "origin",
        }

    def preflight(self, headers: Headers) -> dict[str, str] | None:
        """Return the headers of the response to an allowed preflight request; None for other
        requests."""
        if not self.headers(headers) or "access-control-request-method" not in headers:
            return None
        requested = headers.get("access-control-request-headers", "")
        return {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": re.sub(r"[^A-Za-z0-9_, -]", "", requested),
            "access-control-max-age": MAX_AGE,
        }

    def check(self, headers: Headers) -> None:
        """Refuse a page of another origin: HttpError 403."""
        origin = headers.get("origin")
        if origin is None or self._is_listed(origin):
            return
        if origin.lower().partition("://")[2] != headers.get("host", "").lower():
            raise HttpError(403, "pages of this origin may not use the server (--cors-origin)")

    def _is_listed(self, origin: str) -> bool:
        return ANY in self._allowed or origin.lower() in self._allowed
