"""Renders a chat template in a process with limits: `python -m kvik.text.template_process`.

The sandbox of jinja2 isolates a template from the interpreter, and the process limits its time and
memory (`limited_process.py`). The first frame is the template; each later one has the variables of
one rendering.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvik.errors import brief
from kvik.text.limited_process import serve

MAX_TEXT = 32 << 20  # characters of one rendered conversation
MAX_MEMORY = 768 << 20
PROBE = "text of a message"


class TemplateSource(msgspec.Struct, frozen=True, array_like=True):
    """The first message to the process: a template, and the special tokens it may use."""

    source: str
    tokens: dict[str, str]


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The answer of the process: the text, or the invalid field and why."""

    text: str = ""
    field: str = ""
    error: str = ""


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose templates cannot modify values, except for appending to lists."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        appends = isinstance(obj, list) and attr == "append"
        return appends or super().is_safe_attribute(obj, attr, value)


class GenerationTag(Extension):
    """`{% generation %}`: marks what the assistant wrote; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

    def content(self, caller: Callable[[], str]) -> str:
        return caller()


def compiled(source: str) -> Template:
    """Compile a template with the settings of model authors' libraries.

    Raises:
        Exception: of any kind, because constant expressions are evaluated during compilation.
    """
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without HTML escapes, as in the model's training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    """Refuse the conversation, for the reason that the template gives."""
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def reads_parts(template: Template, tokens: dict[str, str]) -> bool:
    """Return whether a template writes only content that is a list of parts, as those of models
    with encoders may."""
    written = []
    for content in (PROBE, in_parts(PROBE)):
        messages = [{"role": "user", "content": content}]
        try:
            text = template.render(tokens, messages=messages, tools=None, documents=None)
        except Exception:
            text = ""
        written.append(PROBE in text)
    return written == [False, True]


def in_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def render(template: Template, data: bytes, parts: bool) -> Rendered:
    """Render with the variables in one frame.

    Args:
        parts: see `reads_parts`.
    """
    try:
        names = msgspec.msgpack.decode(data)
        for message in names["messages"] if parts else ():
            if isinstance(message.get("content"), str):
                message["content"] = in_parts(message["content"])
        text = template.render(names)
        if len(text) > MAX_TEXT:
            raise TemplateError(f"their text has more than {MAX_TEXT} characters")
        text.encode()
    except TemplateError as error:
        return failed("messages", "the chat template refuses them", error)
    except UnicodeEncodeError:  # half a surrogate pair
        return Rendered(field="messages", error="must be valid Unicode")
    except Exception as error:  # the template is an untrusted program: it may fail in any way
        return failed("messages", "the chat template fails on them", error)
    return Rendered(text)


def failed(field: str, summary: str, error: Exception) -> Rendered:
    return Rendered(field=field, error=f"{summary}: {brief(error) or type(error).__name__}")


def begin(first: bytes) -> Callable[[bytes], Rendered]:
    """Take the template in the first frame. Each later frame has the variables of one rendering."""
    source = msgspec.msgpack.decode(first, type=TemplateSource)
    template: Template | None = None
    parts = False

    def answer(data: bytes) -> Rendered:
        nonlocal template, parts
        try:
            if template is None:
                template = compiled(source.source)
                parts = reads_parts(template, source.tokens)
            return render(template, data, parts)
        except Exception as error:
            return failed("chat_template", "is not a valid template", error)

    return answer


if __name__ == "__main__":
    sys.exit(serve(begin, max_memory=MAX_MEMORY))
