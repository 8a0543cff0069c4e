"""Chat templates: render messages as the text of a prompt.

A template is a jinja2 program that comes with the model (`chat_template` in Hugging Face folders).
It writes BOS and the other special tokens itself, so its text is encoded without adding any. It is
untrusted, so `kvik.text.template_process` runs it in a process with limits. This file validates the
input of the template, and kills the process if rendering takes too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvik.child_process import python_command
from kvik.errors import ModelError, ParamError
from kvik.text.limited_process import LimitedProcess, framed
from kvik.text.template_process import MAX_TEXT, Rendered, TemplateSource

MAX_TEMPLATE_CHARS = 256 << 10  # the largest public ones have about 20,000
MAX_MESSAGES = 65_536
SECONDS = 3.0  # for one rendering; the first one compiles the template
MAX_ANSWER = 4 * MAX_TEXT + (1 << 10)  # bytes
COMMAND = python_command("kvik.text.template_process")


class ChatTemplate:
    """The chat template of one model, rendered in a separate process; threads may share it.

    The process starts with the first rendering and lives until `close`. If it takes too long or
    ends, the next rendering starts a new one.

    Args:
        source: the template, or None if the model has none.
        seconds: limit of one rendering.
        command: starts the process.

    Raises:
        ModelError: the model has no template, or it is too long.
    """

    def __init__(
        self,
        source: str | None,
        bos_token: str | None,
        eos_token: str | None,
        *,
        seconds: float = SECONDS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        if source is None:
            raise ModelError(
                "chat_template",
                "the model has none; give a plain prompt, or a template: --chat-template FILE, or "
                "chat_template.jinja in the model's folder",
            )
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError("chat_template", f"must have at most {MAX_TEMPLATE_CHARS} characters")
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._source = TemplateSource(source, {k: v for k, v in tokens.items() if v is not None})
        self._seconds = seconds
        self.process = LimitedProcess(
            command, lambda: self._source, seconds=seconds, max_answer=MAX_ANSWER
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render the prompt of a conversation.

        Args:
            messages: each has a `role` and a `content`: a string or a list of text parts, or
                nothing if it has `tool_calls`. Other fields are passed to the template unchanged.
            add_generation_prompt: end with the header of the assistant's answer.
            tools: JSON schemas of functions the model may call.
            variables: further names for the template, such as `enable_thinking`.

        Raises:
            ParamError: the messages are malformed, or the template refuses them, fails, or takes
                too much time or memory.
            ModelError: the template is not valid jinja2.
        """
        names = {**self._source.tokens, **_plain_mapping("variables", variables or {})}
        names["messages"] = check_messages(messages)
        names["tools"] = None if tools is None else _check_tools(tools)
        names["documents"] = names.get("documents")
        names["add_generation_prompt"] = add_generation_prompt
        try:
            frame = framed(names)
        except (RecursionError, UnicodeEncodeError, OverflowError):
            raise ParamError("messages", "must be JSON values of valid Unicode") from None
        try:
            rendered = msgspec.msgpack.decode(self.process.ask(frame), type=Rendered)
        except TimeoutError:
            reason = f"rendering them takes more than {self._seconds:g} seconds"
            raise ParamError("messages", reason) from None
        except (EOFError, OSError, msgspec.DecodeError):
            raise ParamError("messages", "the chat template fails on them") from None
        if rendered.field == "chat_template":
            raise ModelError(rendered.field, rendered.error)
        if rendered.error:
            raise ParamError(rendered.field, rendered.error)
        return rendered.text

    def close(self) -> None:
        """End the process. Renderings in other threads fail at once, and so do all later ones."""
        self.process.close()


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages of a conversation as plain values; raises `ParamError` if they are
    invalid."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ParamError("messages", "must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise ParamError("messages", f"at most {MAX_MESSAGES} messages, not {len(messages)}")
    return [_check_message(f"message {i}", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParamError("messages", f"{where} must be an object with role and content")
    plain = _plain_mapping("messages", message)
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise ParamError("messages", f"{where} needs a role, a string that is not empty")
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_part_text(where, part) for part in content)
    elif not isinstance(content, str) and not (content is None and plain.get("tool_calls")):
        raise ParamError("messages", f"{where} needs a content, a string or a list of text parts")
    return plain


def _part_text(where: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ParamError("messages", f'{where} may only have content parts of type "text"')
    if not isinstance(part.get("text"), str):
        raise ParamError("messages", f"{where} has a content part whose text is not a string")
    return str(part["text"])


def _check_tools(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, (list, tuple)) or not all(isinstance(t, Mapping) for t in tools):
        raise ParamError("tools", "must be a list of objects")
    return [_plain_mapping("tools", tool) for tool in tools]


def _plain_mapping(field: str, value: Mapping[Any, object]) -> dict[str, Any]:
    try:
        return {_plain_key(field, key): _plain(field, item) for key, item in value.items()}
    except RecursionError:
        raise ParamError(field, "are nested too deeply") from None


def _plain(field: str, value: object) -> object:
    """Copy plain JSON data: a template must not receive objects with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain_key(field, key): _plain(field, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(field, item) for item in value]
    raise ParamError(field, f"must be made of JSON values, not {type(value).__name__}")


def _plain_key(field: str, key: object) -> str:
    if type(key) is not str:
        raise ParamError(field, f"must have strings as names, not {type(key).__name__}")
    return key
