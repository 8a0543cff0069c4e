"""Prompts of requests that `kvik route` passes on, as far as the choice of a server needs them.

The proxy has no tokenizer. So a prompt is the text of a body in canonical form, hashed in chunks of
characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from kvik.core.block_pool import HASH_BYTES
from kvik.server.route import Data
from kvik.server.stored_responses import store_of

PIECE = 256  # characters of a prompt per hash
MAX_PIECES = 2048  # chunks of a prompt that are hashed
LARGE_BODY = 256 << 10  # bytes of a body above which its prompt is hashed as it is written
NULL = msgspec.Raw(b"null")
STORED = re.compile(r"/responses/(resp_[^/]+)")
MODEL = re.compile(r"/models/(.+)$")
_PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,12})')
_canonical = msgspec.json.Encoder(order="deterministic").encode


class RoutedPrompt(NamedTuple):
    """A prompt for the choice of a server."""

    hashes: Sequence[bytes] = ()  # of its pieces
    size: int = 0  # characters
    session: str = ""  # name shared by requests that belong together
    store: str = ""  # name of the store of the response that the request is about; "": of none
    model: str = ""  # that is named; "": none


def read_prompt(method: str, path: str, body: Data) -> RoutedPrompt:
    """Return the prompt of a request; an empty one if there is none."""
    if stored := STORED.search(path):
        return RoutedPrompt(store=store_of(stored[1]))
    if named := MODEL.search(path):
        return RoutedPrompt(model=named[1])
    if method != "POST" or body.lstrip()[:1] != b"{":
        return RoutedPrompt()
    try:
        fields = _fields(body)
        text = rendered(fields)
    except (ValueError, RecursionError):  # the server will report the error
        return RoutedPrompt()
    session = fields.get("session_id") or fields.get("prompt_cache_key")
    name = session if isinstance(session, str) else ""
    size = len(text) if len(body) <= LARGE_BODY else len(body)
    model = fields.get("model")
    hashes, store = piece_hashes(text), _store_named(fields)
    return RoutedPrompt(hashes, size, name, store, model if isinstance(model, str) else "")


def rendered(body: Mapping[str, Any]) -> bytes:
    """Return a request's prompt in a canonical form: in the order of the model's input, so that the
    turns of a conversation share a prefix."""
    first = [body.get(name) for name in ("model", "cache_salt", "tools", "system", "instructions")]
    parts = [_canonical(first)]
    for name in ("messages", "prompt", "input", "query", "text"):
        value = body.get(name)
        if isinstance(value, msgspec.Raw):
            parts.append(bytes(memoryview(value)[: MAX_PIECES * PIECE]))
        elif value is not None:
            entries = value if isinstance(value, list) else [value]
            if entries and isinstance(entries[0], int):
                entries = [entries]  # token ids
            parts += [_canonical(entry).strip(b'"[]') for entry in entries]
    return b"\n".join(parts)


class _Item(msgspec.Struct):
    """An item of `input`; see `_store_named`."""

    type: str | None = None
    id: str | None = None


class _LargeBody(msgspec.Struct):
    """The fields of a large body from which its server is chosen; prompts stay JSON. To decode all
    of it could stop all streams for seconds."""

    model: str | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = NULL
    system: msgspec.Raw = NULL
    instructions: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    input: msgspec.Raw = NULL
    query: msgspec.Raw = NULL
    text: msgspec.Raw = NULL
    session_id: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None


def _fields(body: Data) -> dict[str, Any]:
    """Decode a body."""
    if len(body) <= LARGE_BODY:
        fields: dict[str, Any] = msgspec.json.decode(body)
        return fields
    return msgspec.structs.asdict(msgspec.json.decode(body, type=_LargeBody))


def _items(value: object) -> list[_Item]:
    """Return the items of `input`; [] if it has none."""
    with suppress(msgspec.ValidationError):
        if isinstance(value, msgspec.Raw):
            return msgspec.json.decode(value, type=list[_Item])
        return msgspec.convert(value, list[_Item])
    return []


def _store_named(body: Mapping[str, Any]) -> str:
    """Return the name of the store that has what a request continues or refers to; "": there is
    none."""
    items = _items(body.get("input"))
    referred = (item.id for item in items if item.type in (None, "item_reference"))
    named = (body.get("previous_response_id"), *referred)
    return next(filter(None, (store_of(name) for name in named if isinstance(name, str))), "")


def piece_hashes(text: bytes) -> list[bytes]:
    """Return the chained hashes of a prompt's full chunks."""
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, min(len(text) - PIECE + 1, MAX_PIECES * PIECE), PIECE):
        piece = text[start : start + PIECE]
        parent = blake2b(parent + piece, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def cached_share(tail: bytes) -> float | None:
    """Return the share of a prompt that was in the server's cache, according to the end of its
    answer; None if it is not reported."""
    cached, prompt = _CACHED_TOKENS.findall(tail), _PROMPT_TOKENS.findall(tail)
    if not cached or not prompt or not int(prompt[-1]):
        return None
    return min(1.0, int(cached[-1]) / int(prompt[-1]))
