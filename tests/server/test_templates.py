"""Chat templates rendered in processes: the same text, bounded time, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop

from kvik.errors import ParamError
from kvik.server.texts import Templates
from kvik.text.chat_template import ChatTemplate
from kvik.text.template_process import TemplateSource

SOURCE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood or '' }}"
)
# Answers nothing, ever.
DEAF = (sys.executable, "-c", "import time; time.sleep(60)")
# Ends before it has answered.
MORTAL = (sys.executable, "-c", "import sys; sys.stdin.buffer.read(4)")
BABBLER = (sys.executable, "-c", "import sys; sys.stdout.buffer.write(b'\\xff' * 99)")

T = TypeVar("T")


def said(text: str = "hello") -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def with_templates(
    use: Callable[[Templates], Awaitable[T]],
    source: str = SOURCE,
    *,
    workers: int = 2,
    seconds: float = 10.0,
    command: tuple[str, ...] | None = None,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    async def run() -> T:
        made = TemplateSource(source, "<s>", None)
        if command is None:
            templates = Templates(made, workers=workers, seconds=seconds)
        else:
            templates = Templates(made, workers=workers, seconds=seconds, command=command)
        try:
            return await use(templates)
        finally:
            await templates.close()
            assert not templates._live

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(run())


def test_a_process_renders_as_the_template_does() -> None:
    async def use(templates: Templates) -> list[str]:
        return [
            await templates.render(said()),
            await templates.render(said("é 😀"), add_generation_prompt=False),
            await templates.render(said(), variables={"mood": "!"}),
        ]

    here = ChatTemplate(SOURCE, "<s>", None)
    assert with_templates(use) == [
        here.render(said()),
        here.render(said("é 😀"), add_generation_prompt=False),
        here.render(said(), variables={"mood": "!"}),
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


@pytest.mark.parametrize("text", ["\ud800", "a" * 3 + "\udfff"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    async def use(templates: Templates) -> None:
        with pytest.raises(ParamError, match="messages: must be JSON values of valid Unicode"):
            await templates.render(said(text))

    with_templates(use)


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


def test_what_takes_too_long_is_killed_and_the_next_one_is_served() -> None:
    async def use(templates: Templates) -> float:
        before = time.monotonic()
        with pytest.raises(ParamError, match=r"rendering them takes more than 0\.2 seconds"):
            await templates.render(said())
        assert not templates._live
        return time.monotonic() - before

    assert with_templates(use, seconds=0.2, command=DEAF) < 10


@pytest.mark.parametrize("command", [MORTAL, BABBLER])
def test_a_process_that_dies_or_babbles_fails_one_rendering(command: tuple[str, ...]) -> None:
    async def use(templates: Templates) -> None:
        for _ in range(3):
            with pytest.raises(ParamError, match="the chat template fails on them"):
                await templates.render(said())

    with_templates(use, command=command)


def test_a_rendering_that_is_cancelled_leaves_no_answer_for_the_next_one() -> None:
    async def use(templates: Templates) -> str:
        first = asyncio.create_task(templates.render(said("first")))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await templates.render(said("second"))

    assert "second" in with_templates(use, workers=1)


@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop])
@pytest.mark.parametrize("noticed", [False, True])
def test_a_process_that_was_killed_while_idle_is_replaced(
    noticed: bool, loop: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    async def use(templates: Templates) -> list[str]:
        texts = [await templates.render(said())]
        (worker,) = templates._live
        os.kill(worker._process.pid, signal.SIGKILL)
        if noticed:
            await worker._process.wait()
            await asyncio.sleep(0.05)  # for its pipes
        texts.append(await templates.render(said()))
        assert worker not in templates._live
        return texts

    first, second = with_templates(use, loop=loop)
    assert first == second


@pytest.mark.parametrize("module", ["resource", "jinja2", "kvik"])
def test_no_code_of_the_current_folder_is_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit(1)")
    monkeypatch.chdir(tmp_path)

    async def use(templates: Templates) -> str:
        return await templates.render(said())

    assert with_templates(use)
    assert not ran.exists()
