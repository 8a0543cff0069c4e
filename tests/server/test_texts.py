"""Tokenizing and rendering outside the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from helpers.generating import letters
from helpers.waiting import eventually
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvik.config.config import EngineConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import Regex
from kvik.errors import OverloadError, ParamError
from kvik.launch import resolve_config
from kvik.model_files import model_files
from kvik.server import texts as module
from kvik.server.texts import INLINE_CHARS, Templates, Texts
from kvik.text.chat_template import ChatTemplate
from kvik.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    resolved = resolve_config(EngineConfig(device="cpu"))
    return model_files(Path(resolved.runner.model_path)).tokenizer()


@asynccontextmanager
async def texts_of(tokenizer: Tokenizer | None, limit: int = 2048) -> AsyncIterator[Texts]:
    texts = Texts(tokenizer, limit)
    try:
        yield texts
    finally:
        await texts.close()


@pytest.mark.parametrize("repeats", [1, 700])
async def test_ids_are_the_tokenizers(tokenizer: Tokenizer, repeats: int) -> None:
    text = "The fox ran. " * repeats
    assert (len(text) > INLINE_CHARS) == (repeats > 1)
    async with texts_of(tokenizer, 100_000) as texts:
        assert await texts.encode(text) == tokenizer.encode(text)
        assert await texts.encode(text, False) == tokenizer.encode(text, False)


class Counted(Tokenizer):
    """Counts the tokenised text."""

    chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.chars += len(text)
        return super().encode(text, add_special_tokens)


def counted(tokenizer: Tokenizer) -> Counted:
    return Counted(tokenizer.library, tokenizer.bos_token, tokenizer.eos_token)


@pytest.mark.parametrize(
    ("text", "message", "read"),
    [
        ("fox " * 100_000, "prompt: has more than 3125 tokens.* 512 .max_model_len", 0),
        ("fox and hen, " * 4000, "prompt: has more than", 512 * 8),
    ],
    ids=["unread", "by its beginning"],
)
async def test_texts_beyond_the_context_are_refused(
    tokenizer: Tokenizer, text: str, message: str, read: int
) -> None:
    counter = counted(tokenizer)
    async with texts_of(counter, 512) as texts:
        with pytest.raises(ParamError, match=f"^{message}"):
            await texts.encode(text)
    assert counter.chars == read


async def test_a_text_of_few_long_tokens_is_read_to_its_end() -> None:
    library = Library(WordLevel({"[unk]": 0, "abcdefghijklmnop": 1}, "[unk]"))
    library.pre_tokenizer = Whitespace()
    text = "abcdefghijklmnop " * 200
    assert len(text) > 300 * 8
    async with texts_of(Counted(library), 300) as texts:
        assert await texts.encode(text) == [1] * 200


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "the model has none"), ("{% if %}", "is not a valid template: ")],
)
async def test_without_a_valid_template_conversations_are_refused(
    tokenizer: Tokenizer, template: str | None, reason: str
) -> None:
    async with texts_of(Tokenizer(tokenizer.library, chat_template=template)) as texts:
        reason = f"^messages: cannot be rendered: chat_template: {reason}"
        with pytest.raises(ParamError, match=reason):
            await texts.render(said())


async def test_without_a_tokenizer_prompts_must_be_ids() -> None:
    regex = SamplingParams(structured=Regex("a").called("guided_regex"))
    async with texts_of(None) as texts:
        reason = "^prompt: must be token ids: this model has no tokenizer$"
        with pytest.raises(ParamError, match=reason):
            await texts.encode("hello")
        with pytest.raises(ParamError, match="^messages: .*: this model has no tokenizer$"):
            await texts.render(said())
        with pytest.raises(ParamError, match="^guided_regex: needs a tokenizer"):
            await texts.checked(regex)
        with pytest.raises(ParamError, match="^tokens: needs a tokenizer"):
            texts.decode([5])


class Slow(Counted):
    """Blocks one text at a time until released, and records their tenants."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer.library, tokenizer.bos_token, tokenizer.eos_token)
        self.order: list[str] = []
        self.go = threading.Semaphore(0)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.order.append(text[0])
        self.go.acquire()
        return [1]

    async def begun(self, count: int) -> None:
        await eventually(lambda: len(self.order) >= count)


async def test_tenants_are_served_alternately(tokenizer: Tokenizer) -> None:
    """A flood by one tenant delays a text of another only by what is being tokenised."""
    slow, length = Slow(tokenizer), INLINE_CHARS + 1
    async with texts_of(slow, 100_000) as texts:
        flood = [asyncio.ensure_future(texts.of("a").encode("a" * length)) for _ in range(20)]
        await slow.begun(2)  # they use the threads
        gone = asyncio.ensure_future(texts.of("c").encode("c" * length))
        late = [asyncio.ensure_future(texts.of(name).encode(name * length)) for name in "bbd"]
        await asyncio.sleep(0.01)
        gone.cancel()  # a cancelled text uses no thread
        for i in range(23):
            slow.go.release()
            await slow.begun(min(23, i + 3))
        assert await asyncio.gather(*flood, *late) == [[1]] * 23
    assert "".join(slow.order) == "aa" + "abdab" + "a" * 16


async def test_the_text_of_a_tenant_is_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TENANT_CHARS", 10_000)
    async with texts_of(tokenizer, 16_000) as texts:
        work = [texts.of(tenant).encode("a " * 2000) for tenant in "aaabbb"]
        found = await asyncio.gather(*work, return_exceptions=True)
    refused = [isinstance(one, OverloadError) and one.of_caller for one in found]
    assert refused == [False, False, True] * 2


async def test_texts_that_wait_are_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_CHARS", 10_000)
    long = "a " * 2000
    async with texts_of(tokenizer, 16_000) as texts:
        work = [texts.encode(long) for _ in range(4)]
        found = await asyncio.gather(*work, return_exceptions=True)
        assert [isinstance(one, OverloadError) for one in found] == [False, False, True, True]
        first = asyncio.ensure_future(texts.encode(long))
        await asyncio.sleep(0)
        with pytest.raises(OverloadError):
            await texts.render(said("a " * 4000))
        await first
        for _ in range(2):  # all is freed, and a single text may be of any length
            await texts.encode("a " * 5500)
        await texts.encode(long)


SOURCE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood or '' }}"
)


def said(text: str = "hello") -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


@asynccontextmanager
async def templates_of(source: str = SOURCE, workers: int = 2) -> AsyncIterator[Templates]:
    templates = Templates(lambda: ChatTemplate(source, "<s>", None), workers)
    try:
        yield templates
    finally:
        await templates.close()
        assert all(one.process.pid is None for one in templates._live)


def rendering(text: str = "hello") -> Callable[[ChatTemplate], str]:
    return lambda template: template.render(said(text))


async def test_one_process_renders_many_one_by_one_and_two_processes_at_once() -> None:
    async with templates_of() as templates:
        for _ in range(5):
            await templates.render(rendering())
        assert len(templates._live) == 1
        await asyncio.gather(*(templates.render(rendering(str(i))) for i in range(8)))
        assert len(templates._live) == 2


async def test_a_cancelled_rendering_ends_its_process() -> None:
    source = (
        "{% if 'cat' in messages[0].content %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    async with templates_of(source, workers=1) as templates:
        endless = asyncio.create_task(templates.render(rendering("cat")))
        await asyncio.sleep(0.5)
        (template,) = templates._live
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert template not in templates._live and template.process.pid is None
        assert await templates.render(rendering("second")) == "second"


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>\n{% endfor %}"
FIRST = "{{ messages[0].content }}"


async def begun(template: str, *contents: str) -> str:
    """Return the prompt to continue the last of these messages."""
    async with texts_of(Tokenizer(letters().library, chat_template=template), 1000) as texts:
        return await texts.render_to_continue([{"role": "u", "content": c} for c in contents])


@pytest.mark.parametrize("last", ["<", "<|", "end", "|>", "d|>", "a<|end|>"])
async def test_the_end_of_the_template_is_not_taken_for_the_message(last: str) -> None:
    assert await begun(CHAT, "Hi", last) == f"<u>Hi<|end|>\n<u>{last}"


async def test_white_space_at_its_end_is_left_out() -> None:
    assert await begun(CHAT, "Hi", "Well \n") == "<u>Hi<|end|>\n<u>Well"


@pytest.mark.parametrize(("template", "last"), [(FIRST, "a"), (CHAT, " ")])
async def test_a_message_that_is_not_shown_cannot_be_continued(template: str, last: str) -> None:
    with pytest.raises(ParamError, match="does not show"):
        await begun(template, "Hi", last)


async def test_searching_the_last_message_takes_linear_time() -> None:
    """A text that nearly matches the last message everywhere."""
    began = time.monotonic()
    with pytest.raises(ParamError):
        await begun(FIRST, "a" * 1_000_000, "ab" + "a" * 500_000)
    assert time.monotonic() - began < 10
