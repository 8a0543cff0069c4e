"""Tokenizing and rendering outside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvik.config.config import EngineConfig
from kvik.errors import OverloadError, ParamError
from kvik.launch import resolve_config
from kvik.model_files import model_files
from kvik.server import texts as module
from kvik.server.texts import INLINE_CHARS, Templates, Texts
from kvik.text.chat_template import ChatTemplate
from kvik.text.tokenizer import Tokenizer

T = TypeVar("T")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    resolved = resolve_config(EngineConfig(device="cpu"))
    return model_files(Path(resolved.runner.model_path)).tokenizer()


def with_texts(
    tokenizer: Tokenizer | None, use: Callable[[Texts], Awaitable[T]], limit: int = 2048
) -> T:
    async def run() -> T:
        texts = Texts(tokenizer, limit)
        try:
            return await use(texts)
        finally:
            await texts.close()

    return asyncio.run(run())


def refusal(tokenizer: Tokenizer | None, text: str, limit: int = 2048) -> str:
    async def use(texts: Texts) -> str:
        with pytest.raises(ParamError) as caught:
            await texts.encode(text)
        return str(caught.value)

    return with_texts(tokenizer, use, limit)


@pytest.mark.parametrize("repeats", [1, 700])
def test_ids_are_the_tokenizers(tokenizer: Tokenizer, repeats: int) -> None:
    text = "The fox ran. " * repeats
    assert (len(text) > INLINE_CHARS) == (repeats > 1)
    found = with_texts(tokenizer, lambda texts: texts.encode(text), 100_000)
    assert found == tokenizer.encode(text)
    bare = with_texts(tokenizer, lambda texts: texts.encode(text, False), 100_000)
    assert bare == tokenizer.encode(text, False)


class Counted(Tokenizer):
    """Notes how much text is tokenised."""

    chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.chars += len(text)
        return super().encode(text, add_special_tokens)


def counted(tokenizer: Tokenizer) -> Counted:
    return Counted(tokenizer.library, tokenizer.bos_token, tokenizer.eos_token)


def test_what_no_context_holds_is_refused_unread(tokenizer: Tokenizer) -> None:
    counter = counted(tokenizer)
    message = refusal(counter, "fox " * 100_000, limit=512)
    assert message.startswith("prompt: has more than 3125 tokens")
    assert "512 (max_model_len)" in message
    assert counter.chars == 0


def test_the_beginning_of_a_long_text_tells(tokenizer: Tokenizer) -> None:
    counter = counted(tokenizer)
    message = refusal(counter, "fox and hen, " * 4000, limit=512)
    assert "prompt: has more than" in message
    assert counter.chars == 512 * 8


def test_a_text_of_few_long_tokens_is_read_to_its_end() -> None:
    library = Library(WordLevel({"[unk]": 0, "abcdefghijklmnop": 1}, "[unk]"))
    library.pre_tokenizer = Whitespace()
    text = "abcdefghijklmnop " * 200
    assert len(text) > 300 * 8
    assert with_texts(Counted(library), lambda texts: texts.encode(text), 300) == [1] * 200


def test_a_conversation_is_rendered_as_its_template_does(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "A story about a fox, please."}]
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    found = with_texts(tokenizer, lambda texts: texts.render(messages))
    assert found == template.render(messages)
    template.close()


def test_an_invalid_template_refuses_conversations(tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer(tokenizer.library, chat_template="{% if %}")

    async def use(texts: Texts) -> None:
        reason = "messages: cannot be rendered: chat_template: is not a valid template: "
        with pytest.raises(ParamError, match=reason):
            await texts.render(said())

    with_texts(tokenizer, use)


def test_without_a_tokenizer_prompts_must_be_ids() -> None:
    assert refusal(None, "hello") == "prompt: must be token ids: this model has no tokenizer"


def test_without_a_template_conversations_are_refused(tokenizer: Tokenizer) -> None:
    async def use(texts: Texts) -> None:
        with pytest.raises(ParamError, match="messages: cannot be rendered: chat_template"):
            await texts.render([{"role": "user", "content": "hi"}])

    with_texts(counted(tokenizer), use)


class Slow(Counted):
    """Takes until it is told to go on, a text at a time; notes whose text it was."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer.library, tokenizer.bos_token, tokenizer.eos_token)
        self.order: list[str] = []
        self.go = threading.Semaphore(0)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.go.acquire()
        self.order.append(text[0])
        return [1]


def test_tenants_take_turns(tokenizer: Tokenizer) -> None:
    """A flood by one delays a text of another by what is being tokenised, and by no more."""
    slow, length = Slow(tokenizer), INLINE_CHARS + 1

    async def use(texts: Texts) -> list[str]:
        flood = [asyncio.ensure_future(texts.of("a").encode("a" * length)) for _ in range(20)]
        await asyncio.sleep(0.01)  # two of them have the threads
        gone = asyncio.ensure_future(texts.of("c").encode("c" * length))
        late = [asyncio.ensure_future(texts.of(name).encode(name * length)) for name in "bbd"]
        await asyncio.sleep(0.01)
        gone.cancel()  # who is gone takes no turn
        for _ in range(23):
            slow.go.release()
            await asyncio.sleep(0.005)
        assert await asyncio.gather(*flood, *late) == [[1]] * 23
        return slow.order

    order = "".join(with_texts(slow, use, 100_000))
    assert order == "aa" + "abdab" + "a" * 16


def test_a_tenant_has_bounded_room(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANT_CHARS", 10_000)
    long = "a " * 2000

    async def use(texts: Texts) -> None:
        found = await asyncio.gather(
            *(texts.of(tenant).encode(long) for tenant in "aaabbb"), return_exceptions=True
        )
        refused = [isinstance(one, OverloadError) and one.own for one in found]
        assert refused == [False, False, True] * 2

    with_texts(tokenizer, use, 16_000)


def test_texts_that_wait_have_bounded_room(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_CHARS", 10_000)
    long, talk = "a " * 2000, [{"role": "user", "content": "a " * 4000}]

    async def use(texts: Texts) -> None:
        found = await asyncio.gather(
            *(texts.encode(long) for _ in range(4)), return_exceptions=True
        )
        assert [isinstance(one, OverloadError) for one in found] == [False, False, True, True]
        first = asyncio.ensure_future(texts.encode(long))
        await asyncio.sleep(0)
        with pytest.raises(OverloadError):
            await texts.render(talk)
        await first
        for _ in range(2):  # all is given back, and one alone may be of any length
            await texts.encode("a " * 5500)
        await texts.encode(long)

    with_texts(tokenizer, use, 16_000)


SOURCE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood or '' }}"
)


def said(text: str = "hello") -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def with_templates(
    use: Callable[[Templates], Awaitable[T]], source: str = SOURCE, workers: int = 2
) -> T:
    async def run() -> T:
        templates = Templates(lambda: ChatTemplate(source, "<s>", None), workers)
        try:
            return await use(templates)
        finally:
            await templates.close()
            assert all(one._process is None for one in templates._live)

    return asyncio.run(run())


def test_conversations_are_rendered_as_by_the_template() -> None:
    async def use(templates: Templates) -> list[str]:
        return [
            await templates.render(said()),
            await templates.render(said("é 😀"), add_generation_prompt=False),
            await templates.render(said(), variables={"mood": "!"}),
        ]

    assert with_templates(use) == [
        "<s><user>hello\n<assistant>",
        "<s><user>é 😀\n",
        "<s><user>hello\n<assistant>!",
    ]


def test_one_process_serves_many_in_turn_and_two_at_once() -> None:
    async def use(templates: Templates) -> tuple[int, int]:
        for _ in range(5):
            await templates.render(said())
        alone = len(templates._live)
        await asyncio.gather(*(templates.render(said(str(i))) for i in range(8)))
        return alone, len(templates._live)

    assert with_templates(use) == (1, 2)


def test_refusals_come_back_by_name() -> None:
    async def use(templates: Templates) -> None:
        with pytest.raises(ParamError, match="messages: message 0 needs a role"):
            await templates.render([{"content": "x"}])
        with pytest.raises(ParamError, match="messages: the chat template refuses them: no cats"):
            await templates.render(said("cat"))
        assert await templates.render(said("dog"))  # it goes on

    with_templates(
        use,
        "{% if 'cat' in messages[0].content %}{{ raise_exception('no cats') }}{% endif %}dog",
    )


def test_nesting_without_end_is_refused() -> None:
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"x": deep}

    async def use(templates: Templates) -> None:
        with pytest.raises(ParamError, match="messages"):
            await templates.render([{"role": "user", "content": "x", "more": deep}])

    with_templates(use)
    while deep:  # a deep chain of dicts is freed by hand: its destructor would recurse
        deep = deep.pop("x", {})  # type: ignore[assignment]


def test_a_cancelled_rendering_ends_its_process() -> None:
    async def use(templates: Templates) -> str:
        endless = asyncio.create_task(templates.render(said("cat")))
        await asyncio.sleep(0.5)
        (template,) = templates._live
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert template not in templates._live and template._process is None
        return await templates.render(said("second"))

    source = (
        "{% if 'cat' in messages[0].content %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    assert with_templates(use, source, workers=1) == "second"
