"""JSON in pieces: the same bytes, and the event loop has its turn meanwhile."""

from __future__ import annotations

import msgspec
import pytest
from helpers.stalls import assert_turns
from msgspec import UNSET

from kvik.core.types import TokenLogprobs
from kvik.server.openai.answers import TokenNames, Usage
from kvik.server.openai.chat import AnswerMessage as Message
from kvik.server.openai.chat import ChatChoice, ChatCompletion, Delta
from kvik.server.openai.completions import Completion, CompletionChoice, CompletionLogprobs
from kvik.server.responses import CHUNK_ITEMS, LazyList, encode_in_chunks

NAMES = TokenNames(None)


def logprobs(count: int, top: int) -> list[TokenLogprobs | None]:
    likely = tuple((token, -0.5 * token - 0.1) for token in range(top))
    return [None, *(TokenLogprobs(i, -1.5, 3, likely) for i in range(1, count))]


def completion(count: int, top: int, choices: int = 1) -> Completion:
    shown = CompletionLogprobs(
        list(range(count)), [None, -0.25] * count, ["a", 'b"\n é'] * count, None
    )
    read = [NAMES._prompt_token(one) for one in logprobs(count, top)]
    return Completion(
        id="c",
        created=1,
        model="m",
        choices=[
            CompletionChoice(i, "text", shown, prompt_logprobs=read if i else UNSET)
            for i in range(choices)
        ],
        usage=Usage(1, 2, 3),
        system_fingerprint="f",
    )


ANSWERS = [
    completion(3, 2),
    completion(CHUNK_ITEMS, 1, 2),
    completion(CHUNK_ITEMS + 1, 0, CHUNK_ITEMS + 1),
    completion(200, 3, 3),
    ChatCompletion(
        id="c",
        created=1,
        model="m",
        choices=[ChatChoice(0, Message("é"), NAMES.chat(logprobs(40, 2)[1:]), "stop")],  # type: ignore[arg-type]
        usage=Usage(1, 2, 3),
        system_fingerprint="f",
    ),
    Delta(),
    [],
    {"a": [1]},
    "text",
    None,
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_the_bytes_are_those_of_msgspec(answer: object) -> None:
    assert encode_in_chunks(answer) == msgspec.json.encode(answer)


@pytest.mark.parametrize("count", [0, 1, CHUNK_ITEMS, 3 * CHUNK_ITEMS + 1])
def test_what_is_made_on_the_way_is_a_list(count: int) -> None:
    assert encode_in_chunks(LazyList(range(count), str)) == msgspec.json.encode(
        [str(i) for i in range(count)]
    )


@pytest.mark.full
def test_others_have_their_turn() -> None:
    """While some 25 MB are made and written."""
    rows = logprobs(4000, 100)
    assert len(encode_in_chunks(NAMES.prompt(rows))) > 20 << 20
    assert_turns(lambda: encode_in_chunks(NAMES.prompt(rows)))
