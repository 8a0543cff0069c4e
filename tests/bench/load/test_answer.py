"""What of a stream counts as output, when, and how many tokens it is."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest
from helpers.fake_server import DONE, delta, event, text, usage
from hypothesis import given
from hypothesis import strategies as st

from kvik_bench.load.answer import AnswerReader, BrokenAnswer, Chunk
from kvik_bench.load.records import RequestRecord

END = event(choices=[], usage=usage(7, 3, prompt_tokens_details={"cached_tokens": 4}))


def read(*chunks: bytes, end: bool = True) -> tuple[RequestRecord, str]:
    """The record of a stream whose chunks arrive at 1.0, 2.0, 3.0 ..."""
    record = RequestRecord(prompt_tokens=5, due=0.0, sent=0.0)
    reader = AnswerReader(record, msgspec.json.Decoder(Chunk))
    for i, chunk in enumerate(chunks):
        reader.feed(chunk, 1.0 + i)
    if end:
        reader.end()
    return record, reader.text


def kind(*chunks: bytes) -> str:
    with pytest.raises(BrokenAnswer) as caught:
        read(*chunks)
    return caught.value.kind


def test_a_plain_answer() -> None:
    record, words = read(text("a"), text("b"), text("c", "length"), END + DONE)
    assert (list(record.times), list(record.tokens)) == ([1.0, 2.0, 3.0], [1, 1, 1])
    assert (record.finished, record.output_tokens, record.prompt_tokens) == (3.0, 3, 7)
    assert record.cached_tokens == 4
    assert not record.assumed and record.even and record.completed
    assert words == "abc"


def test_without_usage_a_chunk_is_assumed_to_be_a_token() -> None:
    record, _ = read(text("a"), text("b", "stop"), DONE)
    assert record.assumed and record.output_tokens is None
    assert record.num_output_tokens == 2
    assert record.prompt_tokens == 5  # as planned
    assert record.cached_tokens is None


def test_a_role_and_empty_chunks_are_no_output() -> None:
    record, words = read(
        delta("", role="assistant"), delta(None), event(choices=[]), delta("a"), delta("b", "stop"),
        DONE,
    )  # fmt: skip
    assert list(record.times) == [4.0, 5.0]
    assert words == "ab"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "refusal"])
def test_thoughts_and_refusals_are_output_but_not_the_answer(field: str) -> None:
    record, words = read(delta(None, **{field: "hm"}), delta("a", "stop"), DONE)
    assert list(record.times) == [1.0, 2.0]
    assert words == "a"


def test_tool_calls_are_output() -> None:
    call = [{"index": 0, "function": {"arguments": "{"}}]
    record, _ = read(delta(None, tool_calls=call), delta(None, "tool_calls"), DONE)
    assert list(record.times) == [1.0]
    assert record.finished == 2.0


def test_an_end_of_text_token_came_with_the_finish_reason() -> None:
    record, _ = read(text("a"), text("b"), text("", "stop"), END + DONE)
    assert (list(record.times), list(record.tokens)) == ([1.0, 2.0, 3.0], [1, 1, 1])
    assert record.even


def test_a_finish_reason_alone_is_no_token() -> None:
    record, _ = read(text("a"), text("b"), text("c"), text("", "length"), END + DONE)
    assert list(record.tokens) == [1, 1, 1]
    assert record.finished == 4.0


def test_chunks_of_several_tokens_without_running_counts() -> None:
    total = event(choices=[], usage=usage(7, 9))
    record, _ = read(text("a b c"), text("d e", "stop"), total + DONE)
    assert (list(record.tokens), record.output_tokens, record.even) == ([1, 1], 9, False)


def test_running_counts_say_how_many_tokens_a_chunk_has() -> None:
    record, _ = read(
        text("", usage=usage(7, 0)),
        text("a b c", usage=usage(7, 3)),
        text("", usage=usage(7, 4)),  # half of a character
        text("é", usage=usage(7, 5)),
        text("f", "stop", usage=usage(7, 6)),
        event(choices=[], usage=usage(7, 6)) + DONE,
    )
    assert (list(record.times), list(record.tokens)) == ([2.0, 4.0, 5.0], [3, 2, 1])
    assert record.even and record.output_tokens == 6


def test_running_counts_with_an_end_of_text_token() -> None:
    record, _ = read(text("a", usage=usage(7, 1)), text("", "stop", usage=usage(7, 2)), DONE)
    assert (list(record.times), list(record.tokens)) == ([1.0, 2.0], [1, 1])
    assert record.even


def test_text_that_was_held_back_is_no_new_token() -> None:
    record, words = read(
        text("a", usage=usage(7, 1)), text("b", usage=usage(7, 3)),
        text("c", "stop", usage=usage(7, 3)), DONE,
    )  # fmt: skip
    assert list(record.tokens) == [1, 2]
    assert words == "abc" and record.finished == 3.0


def test_counts_that_do_not_run_are_not_believed() -> None:
    nothing = {"prompt_tokens": 7, "completion_tokens": 0}
    record, _ = read(
        text("a", usage=nothing),
        text("b", usage={"prompt_tokens": 7}),
        text("c", "stop"),
        END,
        DONE,
    )
    assert (list(record.tokens), record.even) == ([1, 1, 1], True)


def test_counts_that_come_now_and_then() -> None:
    record, _ = read(
        text("a"), text("b", usage=usage(7, 2)), text("c"), text("d e", usage=usage(7, 5)),
        text("f", "stop", usage=usage(7, 6)), DONE,
    )  # fmt: skip
    assert (list(record.tokens), record.even) == ([1, 1, 1, 2, 1], True)


def test_usage_that_comes_with_the_finish_reason_only() -> None:
    record, _ = read(text("a"), text("b"), text("c", "stop", usage=usage(7, 3)), DONE)
    assert (list(record.tokens), record.even) == ([1, 1, 1], True)
    record, _ = read(text("a"), text("b"), text("", "stop", usage=usage(7, 2)), DONE)
    assert (list(record.tokens), record.even) == ([1, 1], True)
    record, _ = read(text("a b"), text("c d"), text("e f", "stop", usage=usage(7, 6)), DONE)
    assert (list(record.tokens), record.even) == ([1, 1, 1], False)
    record, _ = read(text("a b c", "stop", usage=usage(7, 3)), DONE)
    assert (list(record.tokens), record.even) == ([3], True)


def test_nothing_after_the_end_counts() -> None:
    record, words = read(text("a", "stop"), DONE + text("b") + b"data: rubbish\n\n")
    assert (list(record.times), words) == ([1.0], "a")


def test_an_answer_without_finish_reason_ends_with_its_last_output() -> None:
    record, _ = read(text("a"), text("b"), END, DONE)
    assert record.finished == 2.0


def test_broken_answers() -> None:
    assert kind(text("a"), text("b", "stop")) == "no [DONE]"
    assert kind() == "no [DONE]"
    assert kind(DONE) == "empty answer"
    assert kind(text("", "stop"), END + DONE) == "empty answer"
    assert kind(text("a"), b'data: {"choices": [\n\n') == "bad chunk"
    assert kind(b"data: hello\n\n") == "bad chunk"
    assert kind(b'data: {"choices": 3}\n\n') == "bad chunk"
    assert kind(b'data: {"choices": [{"text": "\xff"}]}\n\n') == "bad chunk"
    assert kind(b"data: " + b"[" * 100_000 + b"\n\n") == "bad chunk"
    assert kind(b'data: {"x": ' + b"[" * 100_000 + b"\n\n") == "bad chunk"  # is skipped
    assert kind(b'data: {"error": ' + b"[" * 100_000 + b"\n\n") == "bad chunk"
    assert kind(text("a"), event(error={"message": "out of memory"})) == "error event"
    assert kind(text("a"), b'event: error\ndata: "x"\n\n') == "error event"
    assert kind(b"data: " + b"x" * (17 << 20)) == "bad chunk"


def test_an_error_of_null_is_none() -> None:
    record, _ = read(event(choices=[{"text": "a"}], error=None), DONE)
    assert record.completed


STREAM = (
    b": hello\r\n\r\n"
    + delta("", role="assistant")
    + b"".join(
        b"data: " + json.dumps({"choices": [{"delta": {"content": piece}}]}, ensure_ascii=False)
        .encode() + b"\r\n\r\n"
        for piece in ("Größe", "漢", "字 🙂")
    )
    + delta(None, "stop")
    + END
    + DONE
)  # fmt: skip


@pytest.mark.full
@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
def test_cuts_anywhere_do_not_show(cuts: list[int]) -> None:
    places = sorted({0, len(STREAM), *cuts})
    pieces = [STREAM[a:b] for a, b in pairwise(places)]
    record, words = read(*pieces)
    assert words == "Größe漢字 🙂"
    assert (list(record.tokens), record.prompt_tokens) == ([1, 1, 1], 7)


def test_cuts_at_every_byte() -> None:
    record, words = read(*(STREAM[i : i + 1] for i in range(len(STREAM))))
    assert words == "Größe漢字 🙂"
    assert list(record.tokens) == [1, 1, 1]


@pytest.mark.parametrize("count", [-1, 1 << 31, 10**30, 2.5, "many"])
def test_counts_that_are_none(count: object) -> None:
    assert kind(text("a", usage={"completion_tokens": count})) == "bad chunk"
    assert kind(text("a"), event(choices=[], usage={"prompt_tokens": count})) == "bad chunk"


def test_choices_may_be_null() -> None:
    record, _ = read(text("a"), event(choices=None, usage=usage(1, 1)) + DONE)
    assert record.completed and record.output_tokens == 1
