"""Prompts that one server computes for another one, which decodes.

A request with `PREFILL_HEADER` computes the prompt alone. The answer names the pages that are kept
under a lease, in `SOURCE_HEADER`, and the same request goes to a server that decodes with that
header. It is signed with the secret of both, so that no client makes a server connect to anything.

A server that drains gives requests away that came with `MOVES_HEADER`: the proxy sends the same
request to another server with what is known of it in `RESUMED_HEADER`, signed likewise. That one
makes the text of the tokens so far again, sends what the client lacks, and goes on.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

import msgspec

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import Handover, PageSource, RequestReport
from kvik.server.errors import HttpError

T = TypeVar("T")

log = logging.getLogger(__name__)

PREFILL_HEADER, SOURCE_HEADER = "x-kvik-prefill", "x-kvik-kv-from"
MAX_TICKET = 2048  # characters
# Of a request: its server may give it away. And of one that another server began.
MOVES_HEADER, RESUMED_HEADER = "x-kvik-moves", "x-kvik-resumed"
# An answer, or the rest of a stream, is in another server: a header, and a comment of the stream.
MOVED_HEADER, MOVED_COMMENT = "x-kvik-moved", b": kvik-moved "
MOVED_END = b"\n\n"  # of what follows them, which is a `Resumption`
MAX_MOVED_TOKENS = 8192  # of output: they go into a header
MAX_RESUMPTION = 48 << 10  # characters
_SIGNATURE = 32  # bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Where a request is computed, beside here.

    Attributes:
        lends: its prompt is computed for another server.
        source: where its prompt was computed.
        token: of the servers that share prompts.
        moves: it may be given away, to go on in another server.
        resumed: another server began with it.
    """

    lends: bool = False
    source: PageSource | None = None
    token: bytes = b""
    moves: bool = False
    resumed: Resumption | None = None

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return what is to be generated here."""
        if self.resumed is not None:
            return params.with_changes(max_tokens=self.resumed.max_tokens)
        return params.with_changes(max_tokens=1, min_tokens=0) if self.lends else params


class Resumption(msgspec.Struct, frozen=True, array_like=True):
    """What another server needs to know to go on with a request. Times are relative to now.

    Attributes:
        name: of the request.
        created: its answer, in whole seconds since 1970.
        prompt: `prompt_digest` of its tokens.
        max_tokens: as its first server set it.
        tokens: of the output, compressed.
        seed, source, report: see `Handover`.
        begun: the client has the beginning of its stream.
        num_sent: tokens of output that the client has.
    """

    name: str
    created: int
    prompt: bytes
    max_tokens: int | None
    tokens: bytes
    seed: int
    source: PageSource | None
    report: RequestReport
    begun: bool
    num_sent: int

    @classmethod
    def of(
        cls,
        handover: Handover,
        now: float,
        *,
        name: str,
        created: int,
        prompt: Sequence[int],
        max_tokens: int | None,
        begun: bool,
        num_sent: int,
    ) -> Resumption:
        """Return what to tell of a request that the engine gave away at `now`."""
        tokens = zlib.compress(array("I", handover.output_token_ids).tobytes())
        told = (handover.seed, handover.source, _moved(handover.report, -now))
        return cls(name, created, prompt_digest(prompt), max_tokens, tokens, *told, begun, num_sent)

    def handover(self, now: float) -> Handover:
        """Return it in the form that the engine takes.

        Raises:
            ValueError: it is damaged.
        """
        unpacked = zlib.decompressobj()
        data = unpacked.decompress(self.tokens, 8 * MAX_MOVED_TOKENS)
        if unpacked.unconsumed_tail or len(data) % 4:
            raise ValueError("too many tokens")
        return Handover(array("I", data).tolist(), self.seed, self.source, _moved(self.report, now))


def _moved(report: RequestReport, by: float) -> RequestReport:
    """Return a report by another clock."""
    names = ("arrival", "first_scheduled", "first_token", "finished")
    times = {name: getattr(report, name) for name in names}
    return replace(report, **{name: time + by for name, time in times.items() if time is not None})


def prompt_digest(tokens: Sequence[int]) -> bytes:
    """Return what tells a prompt from others."""
    return blake2b(array("I", tokens).tobytes(), digest_size=16).digest()


ALONE = Transfer()


class Prefilled(msgspec.Struct):
    """A prompt was computed.

    Attributes:
        prompt_tokens: of all prompts.
        kept_tokens: that another server need not compute.
    """

    prompt_tokens: int
    kept_tokens: int


def transfer_of(headers: Mapping[str, str], role: str, token: bytes) -> Transfer:
    """Return what the headers of a request say to a server of this role.

    Raises:
        HttpError: 400, it computes no prompts for others; 409, it cannot go on with a request.
    """
    moves = MOVES_HEADER in headers and bool(token)
    if RESUMED_HEADER in headers:
        resumed = read_resumption(headers[RESUMED_HEADER], token)
        if resumed is None:
            raise cannot_resume("was not made with the kv_token of this server")
        return Transfer(token=token, moves=moves, resumed=resumed)
    if PREFILL_HEADER in headers:
        if role != "prefill":
            raise HttpError(400, f"{PREFILL_HEADER} needs a server with --role prefill, not {role}")
        return Transfer(lends=True, token=token)
    ticket = headers.get(SOURCE_HEADER)
    if ticket is None or role != "decode":
        return Transfer(token=token, moves=True) if moves else ALONE
    source = read_ticket(ticket, token)
    if source is None:
        log.warning(
            "%s of a request was not made with the kv_token of this server: its prompt is computed "
            "here; give all servers with a role the same one",
            SOURCE_HEADER,
        )
    return Transfer(source=source, token=token, moves=moves)


def cannot_resume(why: str) -> HttpError:
    """Return the error of a request that another server is to go on with."""
    return HttpError(409, f"{RESUMED_HEADER} {why}", code="cannot_resume")


def make_ticket(source: PageSource, token: bytes) -> str:
    """Return the header that names where a prompt was computed."""
    return _signed(b"ticket", source, token)


def read_ticket(text: str, token: bytes) -> PageSource | None:
    """Return what a header names; None: it was not made with this token."""
    return _read(b"ticket", text[:MAX_TICKET], token, PageSource)


def make_resumption(resumption: Resumption, token: bytes) -> str:
    """Return the header with which another server goes on."""
    return _signed(b"resumed", resumption, token)


def read_resumption(text: str, token: bytes) -> Resumption | None:
    """Return what a header says; None: it was not made with this token."""
    return _read(b"resumed", text[:MAX_RESUMPTION], token, Resumption)


def _signed(kind: bytes, value: object, token: bytes) -> str:
    data = msgspec.msgpack.encode(value)
    return base64.urlsafe_b64encode(_signature(kind, data, token) + data).decode()


def _read(kind: bytes, text: str, token: bytes, what: type[T]) -> T | None:
    try:
        data = base64.urlsafe_b64decode(text.encode())
        if token and hmac.compare_digest(
            data[:_SIGNATURE], _signature(kind, data[_SIGNATURE:], token)
        ):
            return msgspec.msgpack.decode(data[_SIGNATURE:], type=what)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        pass
    return None


def _signature(kind: bytes, data: bytes, token: bytes) -> bytes:
    return hmac.digest(token, kind + data, "sha256")
