"""Prompts that one server computes for another one, which decodes.

A request with `PREFILL_HEADER` computes the prompt alone. The answer names the pages that are kept
under a lease, in `SOURCE_HEADER`, and the same request goes to a server that decodes with that
header. It is signed with the secret of both, so nobody else makes a server connect to anything.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import PageSource
from kvik.server.errors import HttpError

log = logging.getLogger(__name__)

PREFILL_HEADER, SOURCE_HEADER = "x-kvik-prefill", "x-kvik-kv-from"
MAX_TICKET = 2048  # characters
_SIGNATURE = 32  # bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Where a request is computed, beside here.

    Attributes:
        lends: its prompt is computed for another server.
        source: where its prompt was computed.
        token: of the servers that share prompts.
    """

    lends: bool = False
    source: PageSource | None = None
    token: bytes = b""

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return what is to be generated here."""
        return params.with_changes(max_tokens=1, min_tokens=0) if self.lends else params


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
        HttpError: 400, it computes no prompts for others.
    """
    if PREFILL_HEADER in headers:
        if role != "prefill":
            raise HttpError(400, f"{PREFILL_HEADER} needs a server with --role prefill, not {role}")
        return Transfer(lends=True, token=token)
    ticket = headers.get(SOURCE_HEADER)
    if ticket is None or role != "decode":
        return ALONE
    source = read_ticket(ticket, token)
    if source is None:
        log.warning(
            "%s of a request was not made with the kv_token of this server: its prompt is computed "
            "here; give all servers with a role the same one",
            SOURCE_HEADER,
        )
    return Transfer(source=source, token=token)


def make_ticket(source: PageSource, token: bytes) -> str:
    """Return the header that names where a prompt was computed."""
    data = msgspec.msgpack.encode(source)
    return base64.urlsafe_b64encode(_signature(data, token) + data).decode()


def read_ticket(text: str, token: bytes) -> PageSource | None:
    """Return what a header names; None: it was not made with this token."""
    try:
        data = base64.urlsafe_b64decode(text[:MAX_TICKET].encode())
        if hmac.compare_digest(data[:_SIGNATURE], _signature(data[_SIGNATURE:], token)):
            return msgspec.msgpack.decode(data[_SIGNATURE:], type=PageSource)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        pass
    return None


def _signature(data: bytes, token: bytes) -> bytes:
    return hmac.digest(token, b"ticket" + data, "sha256")
