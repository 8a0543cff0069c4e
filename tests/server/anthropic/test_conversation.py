"""Conversations as prompts, and the prefixes that their cache marks pin."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from helpers.generating import letters

from kvik.core.types import Pin
from kvik.server.anthropic_prompt import (
    CountRequest,
    Prompt,
    make_prompt,
    read_conversation,
)
from kvik.server.texts import Texts
from kvik.text.tokenizer import Tokenizer

# A token is one letter or digit; a role is a digit, and a turn ends with a dot.
PLAIN = (
    "{% for m in messages %}{{ {'system': '1', 'user': '2', 'assistant': '3'}[m.role] }}"
    "{{ m.content | replace('\n', '') | trim }}.{% endfor %}"
    "{% if add_generation_prompt %}3{% endif %}"
)
# Only the last turn shows the system text, as in some public templates.
LATE = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}2{% if loop.last %}{{ system }}0{% endif %}"
    "{{ m.content | replace('\n', '') }}.{% endfor %}"
)
# Requires a user message.
STRICT = "{% if messages[-1].role != 'user' %}{{ raise_exception('who asks?') }}{% endif %}" + PLAIN
MARK = {"type": "ephemeral"}


def block(text: str, marked: bool = False) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": MARK} if marked else {})


def prompt_of(template: str, **body: Any) -> tuple[Prompt, str]:
    """Return the prompt and its text."""
    library = letters().library
    texts = Texts(Tokenizer(library, chat_template=template), 1000)

    async def run() -> Prompt:
        request = msgspec.convert({"model": "m", **body}, CountRequest)
        try:
            return await make_prompt(texts, read_conversation(request))
        finally:
            await texts.close()

    made = asyncio.run(run())
    return made, texts.decode(made.token_ids)


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def lengths(prompt: Prompt) -> list[int]:
    return [pin.num_tokens for pin in prompt.pins]


def test_a_mark_is_after_its_block() -> None:
    prompt, text = prompt_of(
        PLAIN,
        system=[block("SYS", True), block("tem")],
        messages=[
            user(block("ab", True), block("cd")),
            assistant(block("ef", True)),
            user(block("gh")),
        ],
    )
    assert text == "1SYStem.2abcd.3ef.2gh.3"
    assert lengths(prompt) == [len("1SYS"), len("1SYStem.2ab"), len("1SYStem.2abcd.3ef.")]


def test_a_mark_of_the_last_system_block_reaches_the_users_text() -> None:
    """The next user text may begin differently."""
    for said in ("abc", "bcd", "a"):
        prompt, text = prompt_of(PLAIN, system=[block("S", True)], messages=[user(block(said))])
        assert text.startswith("1S.2")
        assert lengths(prompt) == [len("1S.2")]


def test_a_mark_of_the_system_may_precede_a_turn_without_text() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "d"}
    prompt, text = prompt_of(
        PLAIN.replace("3'}", "3', 'tool': '4'}"),
        system=[block("S", True)],
        messages=[assistant(call), user(result)],
    )
    assert text == "1S.3.4d.3"
    assert lengths(prompt) == [len("1S.3")]


def test_a_mark_at_the_top_level_is_after_the_last_block() -> None:
    prompt, text = prompt_of(PLAIN, messages=[user(block("ab"), block("cd"))], cache_control=MARK)
    assert text == "2abcd.3"
    assert lengths(prompt) == [len("2abcd.")]


def test_a_mark_has_a_lifetime() -> None:
    hour = {"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    prompt, _ = prompt_of(PLAIN, system=[hour], messages=[user(block("a", True))])
    assert prompt.pins == (Pin(4, 3600.0), Pin(6, 300.0))


def test_a_template_that_renders_prefixes_differently_pins_less() -> None:
    """The pinned length is what the next request will have in common, not the marked part."""
    messages = [user(block("ab", True)), assistant(block("cd")), user(block("ef"))]
    prompt, text = prompt_of(LATE, system=[block("S")], messages=messages)
    assert text == "2ab.2cd.2S0ef."
    assert lengths(prompt) == [1]  # alone it would be 2S0ab


def test_a_template_that_cannot_render_a_prefix_pins_nothing() -> None:
    messages = [user(block("ab", True)), assistant(block("cd", True)), user(block("ef"))]
    prompt, text = prompt_of(STRICT, messages=messages)
    assert text == "2ab.3cd.2ef.3"
    assert lengths(prompt) == [len("2ab.")]


def test_a_prefilled_answer_can_be_marked() -> None:
    prompt, text = prompt_of(PLAIN, messages=[user(block("ab")), assistant(block("cd", True))])
    assert text == "2ab.3cd"
    assert lengths(prompt) == [len(text)]


@pytest.mark.parametrize("begun", [".", "3.", "c.", "ab."])
def test_a_prefilled_answer_with_words_of_the_template(begun: str) -> None:
    """The text that the template adds after it is not part of it."""
    _, text = prompt_of(PLAIN, messages=[user(block("ab.")), assistant(block(begun))])
    assert text == f"2ab..3{begun}"
