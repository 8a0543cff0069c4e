"""Windows: every token is scored once, with as much before it as promised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from kvik.errors import ConfigError
from kvik.evaluate.windows import Window, choose_window, count_scored, cut, prompt_prefix
from kvik.text.tokenizer import Tokenizer

BOS = 99


def windows(count: int, prefix: tuple[int, ...], window: int, stride: int) -> list[Window]:
    return list(cut(range(count), prefix, window, stride))


def scored(found: list[Window]) -> list[int]:
    return [token for window in found for token in window.token_ids[window.first_scored :]]


def test_windows_beside_each_other_lose_their_first_tokens() -> None:
    assert windows(10, (), 4, 4) == [
        Window((0, 1, 2, 3), 1),
        Window((4, 5, 6, 7), 1),
        Window((8, 9), 1),
    ]


def test_windows_that_overlap_lose_one_token_of_the_text() -> None:
    assert windows(9, (), 4, 2) == [
        Window((0, 1, 2, 3), 1),
        Window((2, 3, 4, 5), 2),
        Window((4, 5, 6, 7), 2),
        Window((6, 7, 8), 2),
    ]


def test_bos_begins_every_window_and_nothing_is_lost() -> None:
    # the stride asked for would jump over a token, as BOS takes one's room
    assert windows(7, (BOS,), 4, 4) == [
        Window((BOS, 0, 1, 2), 1),
        Window((BOS, 3, 4, 5), 1),
        Window((BOS, 6), 1),
    ]


@pytest.mark.parametrize(
    ("count", "prefix", "expected"),
    [
        (0, (), []),
        (1, (), []),
        (0, (BOS,), []),
        (1, (BOS,), [Window((BOS, 0), 1)]),
        (3, (), [Window((0, 1, 2), 1)]),
        (5, (), [Window((0, 1, 2, 3, 4), 1)]),
        (6, (), [Window((0, 1, 2, 3, 4), 1)]),  # the last token has nothing before it
    ],
)
def test_short_texts(count: int, prefix: tuple[int, ...], expected: list[Window]) -> None:
    assert windows(count, prefix, 5, 5) == expected


@given(st.integers(0, 60), st.integers(0, 2), st.integers(2, 20), st.data())
def test_every_token_once_with_its_context(
    count: int, num_prefix: int, room: int, data: st.DataObject
) -> None:
    window = num_prefix + room
    stride = data.draw(st.integers(1, window))
    found = windows(count, (BOS,) * num_prefix, window, stride)
    assert all(len(one.token_ids) <= window for one in found)
    tokens = scored(found)
    assert len(tokens) == count_scored(count, num_prefix, window, stride)
    assert tokens == sorted(set(tokens))
    if num_prefix:
        assert tokens == list(range(count))
    elif stride < room:
        assert tokens == list(range(1, count))
    for one in found:  # what comes before a scored token is the text that comes before it
        text = [token for token in one.token_ids if token != BOS]
        assert text == list(range(text[0], text[0] + len(text)))
        if text[0] > 0 and num_prefix == 0:
            least = min(room - stride, one.first_scored)
            assert one.first_scored >= max(least, 1)


def test_defaults_and_limits() -> None:
    assert choose_window(1024, None, None) == (1024, 1024)
    assert choose_window(8192, None, None) == (2048, 2048)
    assert choose_window(8192, 8192, 512) == (8192, 512)
    with pytest.raises(ConfigError, match=r"window: must be 2 to 1024 \(the context\), not 1025"):
        choose_window(1024, 1025, None)
    with pytest.raises(ConfigError, match="window: must be 2 to 1024"):
        choose_window(1024, 1, None)
    with pytest.raises(ConfigError, match=r"stride: must be 1 to 16 \(the window\), not 17"):
        choose_window(1024, 16, 17)
    with pytest.raises(ConfigError, match="stride"):
        choose_window(1024, 16, 0)


@pytest.mark.parametrize(
    ("template", "prefix"),
    [("$A", ()), ("<s> $A", (1,)), ("<s> $A </s>", (1,)), ("$A </s>", ())],
)
def test_what_a_tokenizer_puts_before_a_prompt(template: str, prefix: tuple[int, ...]) -> None:
    library = Library(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "?": 3}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert prompt_prefix(Tokenizer(library)) == prefix
