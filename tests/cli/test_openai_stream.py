from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvik.cli.openai_stream import MAX_EVENT_BYTES, EventTooLarge, SseParser, error_message

TEXT = 'data: {"text": "Größe 漢字 🙂"}'

# (bytes from a server, their events)
STREAMS = [
    (b"data: a\n\n", [(b"", b"a")]),
    (b"data: a\r\n\r\ndata: b\r\n\r\n", [(b"", b"a"), (b"", b"b")]),
    (b"data: a\r\rdata: b\r\r", [(b"", b"a"), (b"", b"b")]),
    (b"data: a\rdata: b\n\r\n", [(b"", b"a\nb")]),
    (b"data: a\r\ndata\n\n", [(b"", b"a\n")]),
    (b": keep-alive\n\n:\n\ndata: a\n: in between\ndata: b\n\n", [(b"", b"a\nb")]),
    (b"event: error\ndata: {}\n\ndata: a\n\n", [(b"error", b"{}"), (b"", b"a")]),
    (b"event: ping\n\ndata: a\n\n", [(b"", b"a")]),
    (b"id: 7\nretry: 10\nnonsense\ndata: a\n\n", [(b"", b"a")]),
    (b"\xef\xbb\xbfdata: a\n\n", [(b"", b"a")]),
    (b"data: a\n\ndata: never ended\n", [(b"", b"a")]),
    (f"{TEXT}\n\n".encode(), [(b"", TEXT.removeprefix("data: ").encode())]),
    ("data: a\u2028b\x0b\x85\n\n".encode(), [(b"", "a\u2028b\x0b\x85".encode())]),
]  # fmt: skip


@pytest.mark.parametrize(("stream", "events"), STREAMS)
def test_a_stream_at_once_and_byte_by_byte(stream: bytes, events: list) -> None:
    assert SseParser().feed(stream) == events
    parser = SseParser()
    single = [event for i in range(len(stream)) for event in parser.feed(stream[i : i + 1])]
    assert single == events


LINES = st.sampled_from([b"data: a", b"data:", b": x", b"event: e", b"", b"data: \xc3\xa9", b"id"])


@given(
    st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=12),
    st.lists(st.integers(0, 100), max_size=6),
)
def test_line_ends_may_be_mixed_in_any_chunks(lines: list, cuts: list[int]) -> None:
    data = b"".join(line + end for line, end in lines)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parser = SseParser()
    pieces = [parser.feed(data[a:b]) for a, b in pairwise(places)]
    # "\r" and then an empty line ended by "\n" is one line end, in any chunks.
    normal = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert list(chain.from_iterable(pieces)) == SseParser().feed(normal)


def test_an_event_without_end_is_refused() -> None:
    parser = SseParser()
    parser.feed(b"data: ")
    with pytest.raises(EventTooLarge):
        for _ in range(MAX_EVENT_BYTES // (1 << 20) + 1):
            parser.feed(b"x" * (1 << 20))
    parser = SseParser()
    for _ in range(40):  # many events of 1 MiB are accepted
        assert len(parser.feed(b"data: " + b"x" * (1 << 20) + b"\n\n")) == 1


def test_messages_of_errors() -> None:
    assert error_message(b'{"error": {"message": "a"}}') == "a"
    assert error_message(b'{"error": {"message": "a:\\n  b"}}') == "a: b"  # on one line
    assert error_message(b'{"error": "a"}') == "a"
    assert error_message(b"\xff <html>\n") == "\ufffd <html>"
    assert error_message(b"[" * 4096) == "[" * 4096
