"""API keys. Only hashes are kept, and every comparison reads all of them."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers

from kvik.errors import ConfigError

# [NAME:] KEY [admin]; a key itself may hold colons, so a name is followed by space
LINE = re.compile(r"(?:([\w.-]{1,64}):\s+)?(\S+)(?:\s+(admin))?")
HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        tenant: the name under which it shares the engine and the prefix cache.
        name: for logs; reveals nothing of the key.
        is_admin: may use the admin routes.
    """

    tenant: str
    name: str
    is_admin: bool = False


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
        """Whose key these headers have; None: no valid one.

        A key is sent as `Authorization: Bearer KEY` or as `x-api-key: KEY`; some clients send both,
        and one that is right will do.
        """
        if not self._keys:
            return ANONYMOUS
        found = None
        for text in presented(headers):
            digest = sha256(text.encode("utf-8", "surrogateescape")).digest()
            for key in self._keys:  # all of them, so that timing reveals nothing
                if hmac.compare_digest(digest, key.digest):
                    found = key.caller
        return found


def presented(headers: Headers) -> list[str]:
    """The keys in the headers of a request."""
    texts = list(headers.getlist("x-api-key"))
    for value in headers.getlist("authorization"):
        scheme, _, text = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            texts.append(text.strip())
    return [text for text in texts if text]


def read_keys(texts: Sequence[str], file: str | None = None) -> Keys:
    """The given keys, then those of a file. A single key without a name is an
    administrator's: the server has one user.

    Raises:
        ConfigError: `api_key` or `api_key_file` holds something that cannot be a key.
    """
    keys = [Key(_digest("api_key", text), _caller(f"key-{i + 1}")) for i, text in enumerate(texts)]
    named = False
    if file is not None:
        found, named = _of_file(file)
        keys += found
    if len(keys) == 1 and not named:
        keys = [replace(keys[0], caller=replace(keys[0].caller, is_admin=True))]
    names = [key.caller.name for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("api_key_file", f"has the name {name} twice")
    return Keys(keys)


def _of_file(file: str) -> tuple[list[Key], bool]:
    """The keys of a file, and whether one of them has a name."""
    try:
        lines = Path(file).expanduser().read_text("utf-8").splitlines()
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
    if not text or text != text.strip() or not text.isascii() or not text.isprintable():
        raise ConfigError(field, "must be printable ASCII text without spaces around it")
    return sha256(text.encode()).digest()
