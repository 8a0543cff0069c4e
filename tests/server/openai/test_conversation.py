"""Conversations that somebody goes on with, under templates of any kind."""

from __future__ import annotations

import asyncio
import time

import pytest
from helpers.generating import letters

from kvik.errors import ParamError
from kvik.server.texts import Texts
from kvik.text.tokenizer import Tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>\n{% endfor %}"
FIRST = "{{ messages[0].content }}"


def text_of(template: str, *contents: str) -> str:
    texts = Texts(Tokenizer(letters().library, chat_template=template), 1000)

    async def run() -> str:
        try:
            return await texts.render_to_continue([{"role": "u", "content": c} for c in contents])
        finally:
            await texts.close()

    return asyncio.run(run())


@pytest.mark.parametrize("last", ["<", "<|", "end", "|>", "d|>", "a<|end|>"])
def test_the_end_of_the_template_is_not_taken_for_the_message(last: str) -> None:
    assert text_of(CHAT, "Hi", last) == f"<u>Hi<|end|>\n<u>{last}"


def test_white_space_at_its_end_is_left_out() -> None:
    assert text_of(CHAT, "Hi", "Well \n") == "<u>Hi<|end|>\n<u>Well"


@pytest.mark.parametrize(("template", "last"), [(FIRST, "a"), (CHAT, " ")])
def test_a_message_that_is_not_shown_cannot_be_gone_on_with(template: str, last: str) -> None:
    with pytest.raises(ParamError, match="does not show"):
        text_of(template, "Hi", last)


def test_looking_for_it_takes_no_longer_than_reading() -> None:
    """A text that nearly is the last message, everywhere."""
    began = time.monotonic()
    with pytest.raises(ParamError):
        text_of(FIRST, "a" * 1_000_000, "ab" + "a" * 500_000)
    assert time.monotonic() - began < 10
