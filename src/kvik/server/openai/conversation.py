"""The messages and tools of a chat, and the prompt that the chat template renders from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from kvik.errors import ParamError
from kvik.server.responses import offload
from kvik.server.route import DEFAULT_LIMITS, check_size
from kvik.server.texts import Texts
from kvik.server.tools import Function, ToolUse, call_arguments, check_results
from kvik.server.unhonoured import Table, refuse
from kvik.text.chat_template import MAX_MESSAGES
from kvik.text.tool_grammar import ToolMode


class FunctionParam(Struct, kw_only=True):
    """A function that the model may call. `parameters`: JSON Schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(Struct, kw_only=True):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionParam


class NamedFunction(Struct, kw_only=True):
    name: str


class NamedTool(Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(Struct, kw_only=True):
    """One function that must be called, or several that may be."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


Choices = Literal["none", "auto", "required"] | ToolChoice


def tool_use(
    tools: Sequence[ToolParam] | None, tool_choice: Choices | None, *, single: bool, texts: Texts
) -> ToolUse | None:
    """Return the tools of a request; None without tools.

    Args:
        single: allow at most one call per answer.

    Raises:
        ParamError: the tools cannot be used, or there is a choice without tools.
    """
    functions = [
        Function(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters,
            bool(tool.function.strict),
        )
        for tool in tools or ()
    ]
    choice: ToolMode = tool_choice if isinstance(tool_choice, str) else "auto"
    allowed: list[str] | None = None
    named = False
    if isinstance(tool_choice, ToolChoice) and tool_choice.type == "function":
        if tool_choice.function is None:
            raise ParamError("tool_choice", "needs the name of a function")
        choice, allowed, named = "required", [tool_choice.function.name], True
    elif isinstance(tool_choice, ToolChoice):
        if tool_choice.allowed_tools is None or not tool_choice.allowed_tools.tools:
            raise ParamError("tool_choice", "needs allowed_tools with at least one tool")
        choice = tool_choice.allowed_tools.mode
        allowed = list(dict.fromkeys(t.function.name for t in tool_choice.allowed_tools.tools))
    return ToolUse.of(
        texts.form, functions, choice=choice, allowed=allowed, single=named or single, named=named
    )


MEDIA = "only text is supported"
CALL_CHARS = 64  # of arguments that are parsed in the time of one message
Variable = str | int | float | bool | None


class ContentPart(Struct, kw_only=True, omit_defaults=True):
    """A part of a message's content; only text is supported, also that of a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct, kw_only=True):
    """A function and its arguments. `arguments`: a JSON object as text."""

    name: str
    arguments: str = ""


class ToolCall(Struct, kw_only=True):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Struct, kw_only=True):
    """A message. The template determines the permitted order of roles."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None  # in place of a content
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its other name
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    prefix: Any = None
    partial: Any = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


MESSAGE: Table = {
    "function_call": ((), "give tool_calls"),
    "audio": ((), MEDIA),
    "prefix": ((False,), "give continue_final_message"),  # DeepSeek's and Mistral's name
    "partial": ((False,), "give continue_final_message"),  # Kimi's
}


# Variables that a template gets anyway, or that would replace the template.
_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
_TEMPLATE_ROLES = {"developer": "system"}  # a newer name, which few templates know


class RenderOptions(Protocol):
    """Fields of a body that control how its conversation is rendered as a prompt."""

    chat_template_kwargs: dict[str, Variable] | None  # variables for the template
    add_generation_prompt: bool | None  # None means true, unless the final message is continued
    # End the prompt where the last message ends, to continue that message.
    continue_final_message: bool | None


def begins_anew(options: RenderOptions) -> bool:
    """Return whether a new answer begins after the prompt."""
    return options.add_generation_prompt is not False and not options.continue_final_message


async def conversation_text(
    texts: Texts,
    messages: Sequence[ChatMessage],
    options: RenderOptions,
    use: ToolUse | None = None,
) -> str:
    """Return the prompt that the chat template renders from a conversation.

    Raises:
        ParamError: the messages are malformed, or the template refuses them.
    """
    variables, continues = options.chat_template_kwargs, options.continue_final_message
    if continues and options.add_generation_prompt:
        raise ParamError("continue_final_message", "cannot be combined with add_generation_prompt")
    for name in variables or ():
        if name in _RESERVED_VARIABLES:
            raise ParamError("chat_template_kwargs", f"must not set {name}")
    calls = [call for message in messages for call in message.tool_calls or ()]
    num_items = len(messages) + sum(len(call.function.arguments) for call in calls) // CALL_CHARS
    plain = await offload(num_items, lambda: _all_plain(messages, calls))
    answered = [m.tool_call_id for m in messages if m.tool_call_id is not None]
    check_results([call.id for call in calls], answered)
    tools = None if use is None else use.described()
    if continues:
        return await texts.render_to_continue(plain, tools=tools, variables=variables)
    answers = options.add_generation_prompt is not False
    return await texts.render(
        plain, add_generation_prompt=answers, tools=tools, variables=variables
    )


def _all_plain(
    messages: Sequence[ChatMessage], calls: Sequence[ToolCall]
) -> list[dict[str, object]]:
    # The arguments are JSON inside strings, whose values the limits of the body do not count.
    check_size([call.function.arguments.encode() for call in calls], DEFAULT_LIMITS)
    return [_plain(message) for message in messages]


def _plain(message: ChatMessage) -> dict[str, object]:
    refuse({name: getattr(message, name) for name in MESSAGE}, MESSAGE, "messages")
    if message.role == "tool" and message.tool_call_id is None:
        raise ParamError("messages", "of role 'tool' need a tool_call_id")
    if message.tool_calls and message.role != "assistant":
        raise ParamError("messages", "may have tool_calls only in those of role 'assistant'")
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    content = message.refusal if message.content is None else message.content
    if content is None and (message.tool_calls or thought is not None):
        content = ""  # other servers give null for an answer that was cut off in its thought
    plain: dict[str, object] = {
        "role": _TEMPLATE_ROLES.get(message.role, message.role),
        "content": _text(content),
    }
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    optional = {
        "name": message.name,
        "reasoning_content": thought,
        "tool_call_id": message.tool_call_id,
    }
    return plain | {name: value for name, value in optional.items() if value is not None}


def _plain_call(call: ToolCall) -> dict[str, object]:
    arguments = call_arguments(call.function.arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None:
        raise ParamError("messages", "need a content, a string or a list of text parts")
    if isinstance(content, str):
        return content
    texts = list[str]()
    for part in content:
        if part.type not in ("text", "refusal"):
            raise ParamError(
                "messages", f"have a part of type {part.type[:40]!r}; only text is supported"
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise ParamError("messages", f"have a {part.type} part without its text")
        texts.append(text)
    return "\n".join(texts)
