"""Chat templates render the same text as transformers, with clear errors and limits."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.http_server import until

from kvik.errors import KvikError, ModelError, ParamError
from kvik.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from kvik.text.template_process import compiled

HERE = Path(__file__).parent / "templates"
GOLDEN = json.loads((HERE / "golden.json").read_text("utf-8"))
USER = [{"role": "user", "content": "hi"}]


Make = Callable[..., ChatTemplate]


@pytest.fixture
def template() -> Iterator[Make]:
    """Return a function that makes chat templates, whose processes end with the test."""
    made: list[ChatTemplate] = []

    def make(
        source: str, bos: str | None = "<s>", eos: str | None = "</s>", **options: Any
    ) -> ChatTemplate:
        made.append(ChatTemplate(source, bos, eos, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("conversation", ["simple", "system", "tool_use"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", GOLDEN)
def test_real_templates(
    name: str, conversation: str, add_generation_prompt: bool, template: Make
) -> None:
    context = json.loads((HERE / f"{conversation}.json").read_text("utf-8"))
    source = (HERE / f"{name}.jinja").read_text("utf-8")
    chat = template(source, context["bos_token"], context["eos_token"])
    expected = GOLDEN[name][conversation + ("+prompt" if add_generation_prompt else "")]
    if "error" in expected:
        with pytest.raises(ParamError) as caught:
            chat.render(context["messages"], add_generation_prompt, context.get("tools"))
        assert expected["error"] in str(caught.value)
    else:
        text = chat.render(context["messages"], add_generation_prompt, context.get("tools"))
        assert text == expected["text"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{% if true %}\n  x\n{% endif %}\ny", "  x\ny"),  # trim_blocks
        ("a\n  {% if true %}b{% endif %}", "a\nb"),  # lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in 'abc' %}{% if i == 'b' %}{% continue %}{% endif %}{{ i }}{% endfor %}", "ac"),
        ("{% generation %}answer{% endgeneration %}!", "answer!"),
        ("{{ {'b': '<é>&', 'a': 1} | tojson }}", '{"b": "<é>&", "a": 1}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ '<b>' }}", "<b>"),  # no escaping
        ("{{ nothing }}|{{ tools is none }}|{{ documents is none }}", "|True|True"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1234567890123) }}", "[1234567890123]"),
        ("{{ '{{\"y\": {0}}} 2024'.format(5) }}{{ 'in %s 20240101' % 'a' }}",
         '{"y": 5} 2024in a 20240101'),
        ("{{ messages[0].get('x', 1000000000) }}", "1000000000"),
        ("{% if add_generation_prompt %}>{% endif %}", ">"),
    ],
)  # fmt: skip
def test_language(source: str, expected: str) -> None:
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "messages": USER,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    assert compiled(source).render(names) == expected


def test_missing_special_tokens_are_undefined(template: Make) -> None:
    chat = template("{{ bos_token }}{{ bos_token is defined }}", None, None)
    assert chat.render(USER) == "False"


def test_variables_and_tools(template: Make) -> None:
    chat = template("{{ enable_thinking }}{{ tools[0].function.name }}{{ add_generation_prompt }}")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat.render(USER, False, tools, {"enable_thinking": False}) == "FalsefFalse"
    with pytest.raises(ParamError, match="tools: must be a list of objects"):
        chat.render(USER, tools=["f"])
    with pytest.raises(ParamError, match="variables: must be made of JSON values, not object"):
        chat.render(USER, variables={"x": [object()]})


def test_tool_messages_pass_through(template: Make) -> None:
    chat = template("{{ messages | tojson }}")
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"n": 1}}]},
        {"role": "assistant", "tool_calls": [{"id": "2"}]},
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "f", "extra": [1.5, None]},
    ]
    assert json.loads(chat.render(messages)) == messages


def test_text_parts_become_one_text(template: Make) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert template("{{ messages[0].content }}").render(messages) == "a\nb"
    assert messages[0]["content"] is parts


def test_templates_that_read_parts_get_parts(template: Make) -> None:
    loop = "{% for part in messages[0].content %}{{ part.text if part.type == 'text' }}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, expected in (("hi", "hi"), (parts, "a\nb"), ("", "")):
        assert template(loop).render([{"role": "user", "content": content}]) == expected
    either = "{% set c = messages[0].content %}{% if c is string %}{{ c }}{% else %}"
    assert template(f"{either}{loop}!{{% endif %}}").render(USER) == USER[0]["content"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must be a list of at least one message"),
        ("hi", "must be a list of at least one message"),
        (["hi"], "message 0 must be an object"),
        ([*USER, {"content": "x"}], "message 1 needs a role"),
        ([{"role": 5, "content": "x"}], "message 0 needs a role"),
        ([{"role": "user"}], "message 0 needs a content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 may only have content"),
        ([{"role": "user", "content": ["x"]}], "message 0 may only have content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "whose text is not a string"),
        ([{"role": "user", "content": "x", "y": object()}], "JSON values, not object"),
        ([{"role": "user", "content": "x", 5: 5}], "strings as names, not int"),
    ],
)
def test_malformed_messages(messages: object, message: str, template: Make) -> None:
    with pytest.raises(ParamError, match="^messages: .*" + message):
        template("{{ messages }}").render(messages)


def test_nesting_is_bounded(template: Make) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ParamError, match="messages: are nested too deeply"):
        template("x").render([{"role": "user", "content": "x", "deep": deep}])


def test_errors_of_the_template_are_one_short_line(template: Make) -> None:
    chat = template("{{ raise_exception('roles must\n alternate' + 'x' * 1000) }}")
    with pytest.raises(ParamError) as caught:
        chat.render(USER)
    text = str(caught.value)
    assert text.startswith("messages: the chat template refuses them: roles must alternatexxx")
    assert len(text) < 400 and "\n" not in text
    with pytest.raises(ParamError, match="messages: the chat template fails on them: "):
        template("{{ 1 // 0 }}{{ messages[0].nothing() }}").render(USER)


def test_model_without_a_template() -> None:
    with pytest.raises(ModelError, match="chat_template: the model has none"):
        ChatTemplate(None, None, None)


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ x | no_such_filter }}", "{% for x in y %}", "{{ " + "(" * 5000, "{{ 'a' }"],
)
def test_invalid_templates(source: str, template: Make) -> None:
    with pytest.raises(ModelError, match="^chat_template: is not a valid template: "):
        template(source).render(USER)


def test_template_size_is_bounded(template: Make) -> None:
    with pytest.raises(ModelError, match="chat_template: must have at most"):
        template("x" * (MAX_TEMPLATE_CHARS + 1))


def test_a_template_may_append_to_its_own_lists(template: Make) -> None:
    source = "{% set ns = namespace(ids=[]) %}{% set _ = ns.ids.append('a') %}{{ ns.ids | length }}"
    one = template(source)
    assert [one.render(USER) for _ in range(3)] == ["1", "1", "1"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.extend([1]) }}",
        "{{ namespace().__init__.__globals__ }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% import '/etc/passwd' as x %}",
    ],
)
def test_the_sandbox_cannot_be_left(source: str, template: Make) -> None:
    try:
        text = template(source).render(USER)
    except KvikError:
        return
    assert "class" not in text and text.strip() in ("", "{}")


NESTED = "".join("{% for a" + str(i) + " in x %}" for i in range(6)) + "{% endfor %}" * 6

BOMBS = {
    "product": "{{ 'a' * 10**9 }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "loops": "{% set x = range(99999) %}" + NESTED,
    "output": "{% for i in range(99999) %}{% for j in range(999) %}aaaaaaa{% endfor %}{% endfor %}",
    "output of a macro": "{% macro m() %}{% for i in range(99999) %}" + "a" * 9999
    + "{% endfor %}{% endmacro %}{% set x = m() %}",
    "output of a block": "{% set x %}{% for i in range(99999) %}" + "a" * 9999
    + "{% endfor %}{% endset %}",
    "doubling": "{% set n = namespace(s='aaaa') %}{% for i in range(99) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "power": "{{ 9 ** 99999999 }}",
    "squares": "{% set n = namespace(s=9) %}{% for i in range(99) %}"
    "{% set n.s = n.s * n.s %}{% endfor %}",
    "tabs": "{{ ('\t' * 9999).expandtabs(4000).expandtabs(4000) }}",
    "indent filter with text": "{{ ('a\n' * 99999) | indent('a' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'a' * 99999) }}",
    "json indent": "{{ [1] | tojson(indent=1000000000) }}",
    "nested format width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "double recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "filters": "{% set s = 'a' * 999999 %}{% for i in range(99999) %}"
    "{% set x = s | upper | lower %}{% endfor %}",
}  # fmt: skip


# One of each kind: a huge value, a long loop, much output, deep recursion.
FAST_BOMBS = ("product", "loops", "output", "double recursion")


@pytest.mark.parametrize(
    "name",
    [n if n in FAST_BOMBS else pytest.param(n, marks=pytest.mark.full) for n in BOMBS],
)
def test_bombs(name: str, template: Make) -> None:
    with pytest.raises(ParamError, match="^messages: "):
        template(BOMBS[name], seconds=0.05).render(USER)


# Processes that end without an answer, send garbage, or send no frames.
MORTAL = "sys.stdin.buffer.read(4)"
DEAF = "sys.stdout.buffer.write(bytes(4)); sys.stdout.flush(); time.sleep(60)"
BABBLER = "sys.stdout.buffer.write(b'\\xff' * 99)"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (MORTAL, "the chat template fails on them"),
        (BABBLER, "the chat template fails on them"),
        (DEAF, r"rendering them takes more than 0\.2 seconds"),
    ],
)
def test_a_process_that_does_not_answer_is_replaced(
    program: str, reason: str, template: Make
) -> None:
    command = (sys.executable, "-c", f"import sys, time; {program}")
    chat = template("x", seconds=0.2, command=command)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(ParamError, match=reason):
            chat.render(USER)
        assert chat.process.pid is None
    assert time.monotonic() - start < 10


def test_a_bomb_leaves_the_template_usable(template: Make) -> None:
    chat = template(
        "{% for a in range(messages[0].content | int) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}ok",
        seconds=0.5,
    )
    quick, endless = ([{"role": "user", "content": text}] for text in ("1", "99999"))

    def answers() -> bool:  # at once, except if its process has just begun on a busy machine
        with suppress(ParamError):
            return chat.render(quick) == "ok"
        return False

    until(answers)
    with pytest.raises(ParamError, match=r"takes more than 0\.5 seconds"):
        chat.render(endless)
    until(answers)


def test_the_process_stays_until_close(template: Make) -> None:
    chat = template("{{ messages[0].content }}")
    assert chat.process.pid is None
    assert chat.render(USER) == chat.render(USER) == "hi"
    first = chat.process.pid
    os.kill(first, signal.SIGKILL)  # while it is idle
    assert chat.render(USER) == "hi"
    second = chat.process.pid
    assert second is not None and second != first
    chat.close()
    chat.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    with pytest.raises(RuntimeError, match="closed"):
        chat.render(USER)


@pytest.mark.parametrize("text", ["\ud800", "a" * 3 + "\udfff"])
def test_half_a_surrogate_pair_is_refused(text: str, template: Make) -> None:
    with pytest.raises(ParamError, match="messages: must be JSON values of valid Unicode"):
        template("x").render([{"role": "user", "content": text}])
    with pytest.raises(ParamError, match="messages: must be valid Unicode"):
        template(f"{{{{ {json.dumps(text)} }}}}").render(USER)


@pytest.mark.parametrize("module", ["resource", "jinja2", "kvik"])
def test_no_code_of_the_current_folder_is_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: Make
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert template("x").render(USER) == "x"
    assert not ran.exists()


def test_long_conversations_are_within_limits(template: Make) -> None:
    source = (HERE / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text("utf-8")
    messages = [{"role": role, "content": "word " * 200} for role in ("user", "assistant")] * 500
    text = template(source).render(messages)
    assert text.count("<|im_start|>") == 1002  # system, and the start of the answer


def test_threads_share_a_template(template: Make) -> None:
    chat = template("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}")
    words = [*"abcd"] * 5
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(chat.render, [[{"role": "user", "content": word}] for word in words])
        assert list(results) == [word * 2000 for word in words]
