"""What a request of /v1/responses holds: a conversation, tools and the form of the answer."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvik.core.sampling_params import MAX_INT32
from kvik.core.structured import ANY_OBJECT, Constraint, JsonSchema
from kvik.errors import ParamError
from kvik.server.openai.chat import Effort
from kvik.server.openai.conversation import CalledFunction, ChatMessage, ContentPart, ToolCall
from kvik.server.openai.requests import Name, TreatmentFields
from kvik.server.texts import Texts
from kvik.server.tools import Function, ToolUse
from kvik.server.unhonoured import SAMPLING, Table, missing
from kvik.text.chat_template import MAX_MESSAGES
from kvik.text.tool_grammar import ToolMode


class InputItem(Struct, kw_only=True):
    """A message, a call of a tool, its result, or a thought."""

    type: str | None = None  # "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None  # of a function, as JSON
    input: str | None = None  # of a custom tool
    output: str | list[ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    summary: Any = None
    encrypted_content: Any = None


class ResponseTool(Struct, kw_only=True):
    """A function, or a custom tool, whose input is a text. Others are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None


class ResponseToolChoice(Struct, kw_only=True):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    name: str | None = None
    description: str | None = None


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, kw_only=True):
    effort: Effort | None = None
    summary: Any = None


class ResponsesRequest(TreatmentFields, kw_only=True):
    """A conversation to answer."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None

    client_metadata: Any = None  # these change nothing in the answer
    include: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    truncation: Any = None
    user: Any = None


_STATE = "the server keeps no conversations: send all of it"
UNHONOURED: Table = {
    **SAMPLING,
    **missing(ResponsesRequest.__struct_fields__),
    "previous_response_id": ((), _STATE),
    "conversation": ((), _STATE),
    "background": ((False,), "answers are not kept"),
    "prompt": ((), "the server keeps no prompts"),
    "max_tool_calls": ((), "the server calls no tools"),
    "top_logprobs": ((0,), "log probabilities are for /v1/chat/completions"),
}


CUSTOM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def response_messages(body: ResponsesRequest) -> list[ChatMessage]:
    """Return the messages of a body, as those of a chat.

    Raises:
        ParamError: an item is not known, or lacks something.
    """
    messages = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    for i, item in enumerate(body.input):
        place = f"input.{i}"
        match item.type:
            case None | "message" if item.role is not None:
                text = _text(place, item.content)
                messages.append(ChatMessage(role=item.role, content=text))
            case "function_call" | "custom_tool_call":
                if item.call_id is None or item.name is None:
                    raise ParamError(place, "needs a call_id and a name")
                arguments = item.arguments or ""
                if item.type == "custom_tool_call":
                    arguments = json.dumps({"input": item.input or ""})
                called = CalledFunction(name=item.name, arguments=arguments)
                call = ToolCall(id=item.call_id, function=called)
                if messages and messages[-1].role == "assistant":
                    messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
                else:
                    messages.append(ChatMessage(role="assistant", tool_calls=[call]))
            case "function_call_output" | "custom_tool_call_output":
                if item.call_id is None:
                    raise ParamError(place, "needs a call_id")
                text = _text(place, item.output)
                messages.append(ChatMessage(role="tool", content=text, tool_call_id=item.call_id))
            case "reasoning":
                continue  # thoughts of earlier turns are not for the model
            case _:
                raise ParamError(f"{place}.type", f"{str(item.type)[:40]!r} is not supported")
    return messages


def _text(place: str, content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("input_text", "output_text", "text", "refusal"):
            kind = repr(part.type[:40])
            raise ParamError(place, f"has a part of type {kind}; only text is supported")
    return "\n".join(part.text or "" for part in content)


def response_tools(body: ResponsesRequest, texts: Texts) -> tuple[ToolUse | None, list[str]]:
    """Return the tools of a body, None if it has none; and the fields of them that are ignored.

    Raises:
        ParamError: they cannot be used, or there is a choice without tools.
    """
    functions, others = [], []
    for tool in body.tools or ():
        if tool.type == "function":
            strict = bool(tool.strict)
            one = Function(tool.name or "", tool.description or "", tool.parameters, strict)
            functions.append(one)
        elif tool.type == "custom":
            functions.append(Function(tool.name or "", tool.description or "", CUSTOM))
            if tool.format not in (None, {"type": "text"}):
                others.append(f"tools.{tool.name}.format")
        else:
            others.append(f"tools.{tool.type}")
    asked = body.tool_choice
    if not functions:
        if asked not in (None, "none", "auto"):
            raise ParamError("tool_choice", "needs tools")
        return None, others
    mode: ToolMode = asked if isinstance(asked, str) else "auto"
    allowed: list[str] | None = None
    one_call = body.parallel_tool_calls is False
    if isinstance(asked, ResponseToolChoice) and asked.type == "allowed_tools":
        mode = asked.mode or "auto"
        allowed = list(dict.fromkeys(str(one.get("name")) for one in asked.tools or ()))
    elif isinstance(asked, ResponseToolChoice):
        mode, allowed, one_call = "required", [asked.name or ""], True
    use = ToolUse.of(texts.form, functions, choice=mode, allowed=allowed, one=one_call)
    return use, others


def answer_constraint(body: ResponsesRequest) -> Constraint | None:
    """Return what the text must be.

    Raises:
        ParamError: it cannot be used.
    """
    asked = None if body.text is None else body.text.format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_schema" and asked.schema is None:
        raise ParamError("text.format", "needs a schema")
    schema: Any = ANY_OBJECT if asked.schema is None else asked.schema
    try:
        return JsonSchema(schema, strict=bool(asked.strict)).called("text.format")
    except ValueError as error:
        raise ParamError("text.format", str(error)) from None
