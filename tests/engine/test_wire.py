"""FrameReader reassembles frames from any pieces, and messages survive a round trip."""

from __future__ import annotations

import socket
import tracemalloc
from dataclasses import fields, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import (
    DraftCounts,
    EngineRequest,
    FinishReason,
    Pin,
    RequestDelta,
    RequestReport,
    RequestSpeculation,
    TokenLogprobs,
)
from kvik.engine import wire
from kvik.engine.wire import Add, End, FrameReader, Ready, SendBuffer, WireError, stepped

REPORT = RequestReport(1.0, 2.0, None, 3.0, 4, 5)
GUESSED = RequestSpeculation(DraftCounts(2, 5, 3, [2, 2, 1], [2, 1, 0]), 0.5, 0.75)


def framed(bodies: list[bytes]) -> bytes:
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30), max_size=60))
def test_frames_are_found_however_the_bytes_are_split(bodies, cuts):
    data, found, frames = framed(bodies), [], FrameReader()
    for cut in cuts:
        found += frames.feed(data[:cut])
        data = data[cut:]
    found += frames.feed(data)
    assert found == bodies


def test_a_frame_that_is_too_long_is_refused_at_its_header():
    with pytest.raises(WireError, match="101 bytes; at most 100"):
        FrameReader(limit=100).feed((101).to_bytes(4, "little"))
    with pytest.raises(WireError):
        FrameReader(limit=100).feed(framed([b"x"]) + (2**32 - 1).to_bytes(4, "little"))


def test_a_short_frame_takes_little_memory():
    """Larger blocks, cut to the size of a frame, would leave holes in the heap."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    frames = FrameReader()
    theirs.send(framed([b"a"]))
    tracemalloc.start()
    assert frames.receive(ours) == ([b"a"], True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 14
    ours.close()
    theirs.close()


def test_receiving_distinguishes_no_data_from_the_end():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    frames = FrameReader()
    assert frames.receive(ours) == ([], True)
    theirs.send(framed([b"a"]) + b"\1")
    assert frames.receive(ours) == ([b"a"], True)
    theirs.send(b"\0\0\0b")
    theirs.close()
    assert frames.receive(ours) == ([b"b"], False)
    assert frames.receive(ours) == ([], False)
    ours.close()


def test_bytes_that_a_full_socket_refuses_are_sent_later_in_order():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    outbox, frames, found = SendBuffer(), FrameReader(), []
    bodies = [i.to_bytes(2, "big") * 5000 for i in range(100)]
    for body in bodies:
        outbox.send(ours, framed([body]))
    assert len(outbox) > 0
    while len(found) < len(bodies):
        found += frames.receive(theirs)[0]
        outbox.flush(ours)
    assert found == bodies
    assert len(outbox) == 0
    theirs.close()
    with pytest.raises(OSError):
        outbox.send(ours, b"x")
    ours.close()


DELTAS = [
    RequestDelta("a", 0, [1]),
    RequestDelta("b", 3, [1, 2, 3]),
    RequestDelta("c", 0, []),
    RequestDelta("d", 0, [5], logprobs=[TokenLogprobs(5, -1.5, 2, ((7, -0.5), (5, -1.5)))]),
    RequestDelta("e", 0, [5], FinishReason.STOP, stop_reason=5, report=REPORT),
    RequestDelta("e", 1, [5], FinishReason.STOP, stop_reason="end", report=REPORT),
    RequestDelta("e", 2, [5], FinishReason.STOP, report=replace(REPORT, speculation=GUESSED)),
    RequestDelta("f", 0, [], FinishReason.ERROR, error="é\0", report=REPORT, refused="limit"),
    RequestDelta("g", 0, [], FinishReason.LENGTH, report=REPORT, embedding=[0.5, -2.0]),
]


def through(message: msgspec.Struct, decoder: msgspec.msgpack.Decoder) -> object:
    (body,) = FrameReader().feed(wire.frame(message))
    return decoder.decode(body)


@given(st.lists(st.sampled_from(DELTAS), max_size=6))
def test_deltas_survive_a_round_trip(deltas):
    message = through(stepped(17, True, deltas), wire.from_engine)
    assert (message.plans, message.waits) == (17, True)
    arrived = message.deltas()
    assert sorted(map(repr, arrived)) == sorted(map(repr, deltas))
    for request_id in {delta.request_id for delta in deltas}:
        mine = [d for d in deltas if d.request_id == request_id]
        assert [d for d in arrived if d.request_id == request_id] == mine


# Fields that only the last delta has, which is never one of tokens alone.
AT_THE_END = {
    "stop_reason",
    "error",
    "report",
    "embedding",
    "refused",
    "resendable",
    "complete",
    "page_source",
    "handed",
}


@pytest.mark.parametrize(
    "name", [f.name for f in fields(RequestDelta)[3:] if f.name not in AT_THE_END]
)
def test_no_field_is_lost_in_the_columns(name):
    delta = replace(RequestDelta("a", 0, [1]), **{name: "something"})
    assert stepped(1, False, [delta]).deltas() == [delta]


def test_plain_tokens_travel_as_columns_and_before_an_end():
    message = stepped(1, False, [DELTAS[4], DELTAS[0]])
    assert message.ids == ["a"]
    assert message.deltas() == [DELTAS[0], DELTAS[4]]


def test_logprobs_of_a_prompt_come_before_its_first_token():
    prompt = RequestDelta("a", 0, [], prompt_logprobs=[TokenLogprobs(1, -1.0, 1)])
    deltas = [prompt, RequestDelta("a", 0, [1])]
    message = through(stepped(1, False, deltas), wire.from_engine)
    assert message.deltas() == deltas


REQUEST = EngineRequest(
    "r",
    [1, 2, 3],
    SamplingParams(
        n=2,
        logit_bias={3: -1.5},
        allowed_token_ids=(1, 2),
        bad_words=((1, 2), (3,)),
        stop=("end",),
        stop_token_ids=(4,),
        seed=-(2**63),
        prompt_logprobs=0,
    ),
    priority=-3,
    cache_salt="salt",
    deadline=12.5,
    tenant="somebody",
    pins=(Pin(2, 300.0),),
)


def test_requests_survive_a_round_trip():
    add = through(Add("r", 2, msgspec.Raw(wire.encode(REQUEST))), wire.to_engine)
    assert wire.engine_request.decode(add.request) == REQUEST
    end = End("r", None, FinishReason.ABORT, None)
    assert through(end, wire.to_engine) == end
    assert through(Ready(), wire.from_engine) == Ready()


def test_parameters_are_checked_again_on_arrival():
    bad = msgspec.to_builtins(REQUEST.params) | {"temperature": -1.0}
    whole = msgspec.to_builtins(REQUEST) | {"params": bad}
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        wire.engine_request.decode(wire.encode(whole))


def test_a_frame_that_is_too_long_is_not_sent(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME", 10)
    with pytest.raises(WireError, match="at most 10 can be sent"):
        wire.frame(End("a" * 20, None, FinishReason.ABORT, None))


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_of_a_long_prompt_are_split_into_messages(top):
    row = TokenLogprobs(7, -1.0, 2, tuple((token, -0.5) for token in range(top)))
    delta = RequestDelta("a", 0, [5], FinishReason.LENGTH, prompt_logprobs=[row] * 20_001)
    *pieces, rest = wire.split_logprobs(delta)
    assert pieces
    assert all(len(piece.prompt_logprobs) * (1 + top) <= wire.MAX_VALUES for piece in pieces)
    assert not any(piece.token_ids or piece.finish_reason for piece in pieces)
    joined = [one for piece in [*pieces, rest] for one in piece.prompt_logprobs]
    assert replace(rest, prompt_logprobs=joined) == delta
    assert list(wire.split_logprobs(DELTAS[0])) == [DELTAS[0]]
