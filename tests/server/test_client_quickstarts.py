"""Quickstart scripts of OpenAI's and Anthropic's clients run with only the base URL and the model's
name changed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from anthropic import Anthropic
from helpers.story_site import NAMES, Site, site_fixture
from openai import OpenAI

# The scripts never close their clients, whose sockets the collector finds.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

MODEL = NAMES[0]


site = site_fixture()


@pytest.fixture(autouse=True)
def addresses(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{site.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", site.url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
    yield
    gc.collect()  # here, not in a test of another file


def test_openai_chat() -> None:
    client = OpenAI(base_url=os.environ["OPENAI_BASE_URL"])

    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "You tell short stories."},
            {"role": "user", "content": "Tell me of a little fox."},
        ],
        max_completion_tokens=8,
    )
    assert completion.object == "chat.completion" and completion.model == MODEL
    (choice,) = completion.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert completion.usage is not None
    assert 0 < completion.usage.completion_tokens <= 8


def test_openai_stream() -> None:
    client = OpenAI()

    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say this is a test"}],
        "max_completion_tokens": 8,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    text = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].delta.content is not None:
            text += chunk.choices[0].delta.content
    assert text == whole.choices[0].message.content != ""


def test_anthropic_message() -> None:
    client = Anthropic()

    message = client.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=[{"role": "user", "content": "Hello, Claude"}],
    )
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.content[0].type == "text" and message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 8 and message.usage.input_tokens > 0


def test_anthropic_stream() -> None:
    client = Anthropic()

    with client.messages.stream(
        model=MODEL,
        max_tokens=8,
        messages=[{"role": "user", "content": "Hello"}],
    ) as stream:
        text = "".join(stream.text_stream)
    (block,) = stream.get_final_message().content
    assert block.type == "text" and block.text == text != ""
