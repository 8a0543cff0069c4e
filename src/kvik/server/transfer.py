"""Moving requests between servers: prefill for another server, and handover on shutdown.

For a request with `PREFILL_HEADER` only the prompt is computed. `SOURCE_HEADER` of the response
names the pages, which are kept under a lease. The same request is then sent, with that header, to a
server that decodes. The header is signed with the secret that both servers share, so that no client
can make a server connect to an arbitrary address.

A draining server gives away requests that have `MOVES_HEADER`: the proxy sends the same request to
another server, with its state in `RESUMED_HEADER`, also signed. That server recreates the text of
the tokens generated so far, sends what the client lacks, and continues.
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
from itertools import islice
from typing import TypeVar

import msgspec

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import (
    FinishReason,
    Handover,
    PageSource,
    RequestDelta,
    RequestReport,
    TokenLogprobs,
)
from kvik.engine.output import OutputSoFar
from kvik.server.errors import HttpError

T = TypeVar("T")

log = logging.getLogger(__name__)

PREFILL_HEADER, SOURCE_HEADER = "x-kvik-prefill", "x-kvik-kv-from"
# Request headers: the server may hand the request over; another server began the request.
MOVES_HEADER, RESUMED_HEADER = "x-kvik-moves", "x-kvik-resumed"
# Another server gives the answer or the rest of a stream: a header, and a comment in the stream.
MOVED_HEADER, MOVED_COMMENT = "x-kvik-moved", b": kvik-moved "
MOVED_END = b"\n\n"  # after the `Resumption`, which follows the comment's name
MAX_MOVED_TOKENS = 8192  # as `moved_size` counts: they go into a header
MAX_RESUMPTION = 48 << 10  # characters
_SIGNATURE = 32  # bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Which other servers take part in a request."""

    lends: bool = False  # its prompt is computed here for another server
    source: PageSource | None = None  # where its prompt was computed; None: nowhere else
    token: bytes = b""  # secret of the servers that share prompts
    moves: bool = False  # it may be handed over to another server
    resumed: Resumption | None = None  # its state, if another server began it

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters for the part that is generated here."""
        if self.resumed is not None:
            return params.with_changes(max_tokens=self.resumed.max_tokens)
        return (
            params.with_changes(max_tokens=1, min_tokens=0, num_beams=1) if self.lends else params
        )


class MovedOutput(msgspec.Struct, frozen=True, array_like=True):
    """One of the n outputs of a request that another server continues. Times are relative to
    the moment of the handover."""

    state: Handover  # its tokens and counts; of one that has ended, without seed and pages
    num_sent: int  # number of tokens that the client has, plus one if it also has the end
    logprobs: PackedLogprobs | None  # those that the client requested and lacks
    last: LastDelta | None  # how it ended; None: it continues

    @classmethod
    def of(
        cls,
        index: int,
        made: OutputSoFar,
        state: Handover | RequestDelta,
        now: float,
        num_sent: int,
    ) -> MovedOutput:
        """
        Args:
            state: state from the engine: it continues, or has ended.
            now: time of the handover.
            num_sent: number of tokens that the client has; more than there are if it also has the
                end.
        """
        tokens, last = made.token_ids, None
        if isinstance(state, RequestDelta):
            assert state.report is not None and state.finish_reason is not None
            last = LastDelta(state.finish_reason, state.stop_reason, state.complete, made.stopped)
            state = Handover(tokens, 0, None, state.report, index)
        lacks = max(0, len(tokens) - num_sent)
        return cls(
            replace(state, output_token_ids=tokens, report=_moved(state.report, -now)),
            min(num_sent, len(tokens) + (last is not None)),
            PackedLogprobs.of(made.logprobs[-lacks:]) if lacks and made.logprobs else None,
            last,
        )

    def deltas(self, request_id: str, now: float) -> tuple[list[RequestDelta], list[RequestDelta]]:
        """Return the deltas of the engine again: those that the client has, and the others."""
        tokens, last, index = self.state.output_token_ids, self.last, self.state.index
        # A stop token comes with the end, so that its text is not shown.
        end = len(tokens) - (last is not None and not last.by_text and bool(tokens))
        sent = min(self.num_sent, end)
        logprobs = (
            None if self.logprobs is None else self.logprobs.of_tokens(tokens[self.num_sent :])
        )

        def some(first: int, stop: int) -> RequestDelta:
            shown = None
            if logprobs is not None and first >= self.num_sent:
                shown = logprobs[first - self.num_sent : stop - self.num_sent]
            return RequestDelta(request_id, index, tokens[first:stop], logprobs=shown)

        received = [some(0, sent)] if sent else []
        lacking = [some(sent, end)] if sent < end else []
        if last is not None:
            delta = some(end, len(tokens))
            delta.finish_reason, delta.stop_reason = last.reason, last.stop_reason
            delta.complete, delta.report = last.complete, _moved(self.state.report, now)
            (received if self.num_sent > len(tokens) else lacking).append(delta)
        return received, lacking


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of several tokens, in columns, without the tokens."""

    ranks: list[int]  # of each token
    counts: list[int]  # of each token's alternatives
    ids: list[int]  # of all alternatives
    code: str  # type of the array
    values: bytes  # log probabilities of each token and its alternatives

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs]) -> PackedLogprobs:
        values = [v for entry in entries for v in (entry.logprob, *(v for _, v in entry.top))]
        # Samplers make 32-bit numbers; any other number must not lose bits either.
        code = "f" if array("f", values).tolist() == values else "d"
        ids = [token for entry in entries for token, _ in entry.top]
        ranks, counts = [entry.rank for entry in entries], [len(entry.top) for entry in entries]
        return cls(ranks, counts, ids, code, array(code, values).tobytes())

    def of_tokens(self, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Return them with their tokens, of which there may be more, after a stop string."""
        values, ids = iter(array(self.code, self.values)), iter(self.ids)
        entries = []
        for token, rank, count in zip(tokens, self.ranks, self.counts, strict=False):
            logprob = next(values)
            top = tuple(zip(islice(ids, count), islice(values, count), strict=True))
            entries.append(TokenLogprobs(token, logprob, rank, top))
        return entries


class LastDelta(msgspec.Struct, frozen=True, array_like=True):
    """How an output has ended; see `RequestDelta`."""

    reason: FinishReason
    stop_reason: int | str | None
    complete: bool
    by_text: bool  # a stop string was met


class Resumption(msgspec.Struct, frozen=True, array_like=True):
    """What another server needs to know to continue a request."""

    name: str  # id of the request
    created: int  # time at which its answer began, in whole seconds since 1970
    prompt: bytes  # `prompt_digest` of its tokens and its adapter
    max_tokens: int | None  # limit that its first server set
    begun: bool  # the client has the beginning of its stream
    outputs: list[MovedOutput]  # its n outputs

    def handovers(self, now: float) -> tuple[Handover, ...]:
        """Return the unfinished outputs in the form that the engine takes."""
        states = [output.state for output in self.outputs if output.last is None]
        return tuple(replace(state, report=_moved(state.report, now)) for state in states)

    @property
    def unfinished(self) -> bool:
        """Whether an output has not ended."""
        return any(output.last is None for output in self.outputs)

    def num_sent(self, index: int) -> int:
        """Return how many tokens of an output the client has."""
        return self.outputs[index].num_sent


def moved_size(n: int, num_tokens: int, logprobs: int | None) -> int:
    """Return the approximate size of a `Resumption`, in token ids.

    Args:
        num_tokens: tokens of all n outputs.
        logprobs: log probabilities sent with each token; None: none.
    """
    return (n - 1) * 100 + num_tokens * (1 if logprobs is None else 2 + 2 * logprobs)


def _moved(report: RequestReport, by: float) -> RequestReport:
    """Return a report with its times shifted by `by` seconds."""
    names = ("arrival", "first_scheduled", "first_token", "finished")
    times = {name: getattr(report, name) for name in names}
    return replace(report, **{name: time + by for name, time in times.items() if time is not None})


def prompt_digest(tokens: Sequence[int], adapter: str = "") -> bytes:
    """Return a hash that identifies a prompt. `adapter`: the digest of its adapter's files."""
    return blake2b(array("I", tokens).tobytes(), digest_size=16, key=adapter.encode()).digest()


ALONE = Transfer()


class Prefilled(msgspec.Struct):
    """The answer to a request whose prompt was computed for another server."""

    prompt_tokens: int  # tokens of all prompts
    kept_tokens: int  # tokens that another server need not compute


def transfer_of(headers: Mapping[str, str], role: str, token: bytes) -> Transfer:
    """Return what the headers of a request mean to a server of this role.

    Raises:
        HttpError: 400, the server does not compute prompts for others; 409, it cannot resume the
            request.
    """
    moves = MOVES_HEADER in headers and bool(token)
    if RESUMED_HEADER in headers:
        resumed = read_signed(headers[RESUMED_HEADER], Resumption, token)
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
    source = read_signed(ticket, PageSource, token)
    if source is None:
        log.warning(
            "%s of a request was not made with the kv_token of this server: its prompt is computed "
            "here; give all servers with a role the same one",
            SOURCE_HEADER,
        )
    return Transfer(source=source, token=token, moves=moves)


def cannot_resume(reason: str) -> HttpError:
    """Return the error for a request that cannot be resumed."""
    return HttpError(409, f"{RESUMED_HEADER} {reason}", code="cannot_resume")


# What headers hold -> what their signatures cover as well, and characters of a header.
_SIGNED: Mapping[type, tuple[bytes, int]] = {
    PageSource: (b"ticket", 2048),
    Resumption: (b"resumed", MAX_RESUMPTION),
}


def signed(value: PageSource | Resumption, token: bytes) -> str:
    """Return the header for another server that has the same token."""
    data = zlib.compress(msgspec.msgpack.encode(value))
    return base64.urlsafe_b64encode(_signature(type(value), data, token) + data).decode()


def read_signed(text: str, kind: type[T], token: bytes) -> T | None:
    """Return the value in a header; None: it was not signed with this token."""
    try:
        data = base64.urlsafe_b64decode(text[: _SIGNED[kind][1]].encode())
        signature, data = data[:_SIGNATURE], data[_SIGNATURE:]
        if token and hmac.compare_digest(signature, _signature(kind, data, token)):
            return msgspec.msgpack.decode(zlib.decompress(data), type=kind)
    except (binascii.Error, ValueError, zlib.error, msgspec.MsgspecError):
        pass
    return None


def _signature(kind: type, data: bytes, token: bytes) -> bytes:
    return hmac.digest(token, _SIGNED[kind][0] + data, "sha256")
