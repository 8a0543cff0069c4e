"""POST /v1/responses, and the responses that the server keeps."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import MAX_INT32, SamplingParams
from kvik.core.structured import ANY_OBJECT, Constraint, JsonSchema
from kvik.core.types import TokenLogprobs
from kvik.engine.output import RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.errors import HttpError, rename_fields
from kvik.server.openai.answers import TokenNames, usage_of
from kvik.server.openai.chat import ChatRequest, Effort, effort_variables, own_limit
from kvik.server.openai.conversation import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    ToolCall,
    conversation_text,
)
from kvik.server.openai.requests import (
    Logprobs,
    Name,
    TreatmentFields,
    check_logprobs,
    check_output_fits,
    generation_request,
)
from kvik.server.responses import (
    CHUNK_ITEMS,
    ResponseFormat,
    generation_response,
    json_event,
    json_response,
    offload,
    start_all,
)
from kvik.server.route import caller_of, context_of, convert, get, post, routes_of
from kvik.server.server import Server
from kvik.server.stored_responses import StoredResponse, item_id, response_of
from kvik.server.texts import Texts
from kvik.server.tools import MAX_NAME, AnswerForm, Function, ToolUse
from kvik.server.unhonoured import RESPONSES_KEPT, SAMPLING, Table, limited_by, missing
from kvik.text.chat_template import MAX_MESSAGES
from kvik.text.tool_calls import AnswerDelta
from kvik.text.tool_grammar import ToolMode


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """A message, a tool call, its result, or a thought."""

    type: str | None = None  # "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None  # of a function, as JSON
    input: str | None = None  # of a custom tool
    output: str | list[ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    summary: Any = None
    encrypted_content: Any = None


class ResponseTool(Struct, kw_only=True):
    """A function, a custom tool, whose input is a text, or a namespace of both. Other tools are
    ignored."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None
    tools: list[ResponseTool] | UnsetType | None = UNSET  # of a namespace


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
    previous_response_id: Name | None = None
    store: bool | None = None
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    include: list[str] | None = None  # only `LOGPROBS` affects the answer
    top_logprobs: Logprobs | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None

    client_metadata: Any = None  # this and the following fields do not affect the answer
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    truncation: Any = None
    user: Any = None


UNHONOURED: Table = {
    **SAMPLING,
    **missing(ResponsesRequest.__struct_fields__, "text.format"),
    **limited_by("max_output_tokens"),
    **dict.fromkeys(
        ("reasoning_effort", "thinking", "enable_thinking", "chat_template_kwargs"),
        (({},), "give reasoning.effort"),
    ),
    "chat_template": ((), "the template is the model's own"),
    "system": (("", []), "give instructions"),
    "messages": (([],), "give input"),
    "conversation": ((), RESPONSES_KEPT),
    "background": ((False,), "a response ends when its client disconnects"),
    "prompt": ((), "the server keeps no prompts"),
    "max_tool_calls": ((), "the server calls no tools"),
}
LOGPROBS = "message.output_text.logprobs"


SUPPORTED = ("function", "custom", "namespace")
CUSTOM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def input_items(body: ResponsesRequest) -> list[InputItem]:
    """Return the input of a body as items."""
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    return body.input


def response_messages(body: ResponsesRequest, earlier: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the messages of a body as chat messages.

    Args:
        earlier: items of the conversation that it continues.

    Raises:
        ParamError: an item has an unknown type or lacks a field.
    """
    messages = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
    for i, item in enumerate((*earlier, *input_items(body)), -len(earlier)):
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
                name = prompt_name(item.namespace, item.name)
                called = CalledFunction(name=name, arguments=arguments)
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
                continue  # thoughts of earlier turns are not shown to the model
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
    return "\n".join(part.text or part.refusal or "" for part in content)


def prompt_name(namespace: str | None, name: str | None) -> str:
    """Return the name by which the model knows a tool. Clients, such as Codex with the tools of an
    MCP server, give and expect the two parts."""
    if not namespace:
        return name or ""
    return f"{namespace.removesuffix('__')}__{name}"[-MAX_NAME:]


def named_tools(body: ResponsesRequest) -> Iterator[tuple[str | None, ResponseTool]]:
    """Yield the tools of a body, each with its namespace."""
    for tool in body.tools or ():
        if tool.type == "namespace":
            yield from ((tool.name, inner) for inner in tool.tools or ())
        else:
            yield None, tool


def response_tools(body: ResponsesRequest, texts: Texts) -> tuple[ToolUse | None, list[str]]:
    """Return the tools of a body (None without tools), and the names of ignored tool fields.

    Raises:
        ParamError: the tools cannot be used, or there is a choice without tools.
    """
    functions, ignored = [], []
    names = dict[str, str]()
    for namespace, tool in named_tools(body):
        name = prompt_name(namespace, tool.name)
        names[tool.name or ""] = name
        if tool.type == "function":
            strict = bool(tool.strict)
            function = Function(name, tool.description or "", tool.parameters, strict)
            functions.append(function)
        elif tool.type == "custom":
            functions.append(Function(name, tool.description or "", CUSTOM))
            if tool.format not in (None, {"type": "text"}):
                ignored.append(f"tools.{tool.name}.format")
        else:
            ignored.append(f"tools.{tool.type}")
    choice = body.tool_choice
    mode: ToolMode = choice if isinstance(choice, str) else "auto"
    allowed: list[str] | None = None
    one_call = body.parallel_tool_calls is False
    if isinstance(choice, ResponseToolChoice) and choice.type == "allowed_tools":
        mode = choice.mode or "auto"
        allowed = list(dict.fromkeys(str(tool.get("name")) for tool in choice.tools or ()))
    elif isinstance(choice, ResponseToolChoice):
        if not choice.name:
            raise ParamError("tool_choice", "must name a function or a custom tool")
        mode, allowed, one_call = "required", [choice.name], True
    if allowed is not None:
        allowed = [names.get(name, name) for name in allowed]
    use = ToolUse.of(texts.form, functions, choice=mode, allowed=allowed, single=one_call)
    return use, ignored


def answer_constraint(body: ResponsesRequest) -> Constraint | None:
    """Return the constraint on the output text; None without one.

    Raises:
        ParamError: the constraint cannot be used.
    """
    text_format = None if body.text is None else body.text.format
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_schema" and text_format.schema is None:
        raise ParamError("text.format", "needs a schema")
    schema: Any = ANY_OBJECT if text_format.schema is None else text_format.schema
    try:
        return JsonSchema(schema, strict=bool(text_format.strict)).called("text.format")
    except ValueError as error:
        raise ParamError("text.format", str(error)) from None


@dataclass(slots=True)
class OutputItem:
    """A part of an answer that is being generated."""

    kind: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    id: str
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)  # as JSON: several events have them

    def part(self, text: str) -> dict[str, Any]:
        """Return the content part of a message or a thought."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = _joined(self.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item in the API's format."""
        text = "".join(self.text)
        content = [self.part(text)] if text else []
        item: dict[str, Any] = {"type": self.kind, "id": self.id, "status": status}
        if self.kind == "message":
            return item | {"role": "assistant", "content": content}
        if self.kind == "reasoning":
            return item | {"summary": [], "content": content}
        called = {"call_id": self.call_id, "name": self.name}
        if self.namespace:
            called["namespace"] = self.namespace
        if self.kind == "custom_tool_call":
            return item | called | {"input": _custom_input(text)}
        return item | called | {"arguments": text}


def _joined(elements: Sequence[bytes]) -> msgspec.Raw:
    """Return a list of these elements, each one or more in JSON with commas in between."""
    return msgspec.Raw(b"[" + b",".join(elements) + b"]")


MAX_ESCAPE = 6  # characters of a JSON escape


def _custom_input(arguments: str) -> str:
    """Return the input of a custom tool, which the model gives as the only argument of a function.
    If the arguments were cut off, return the part of the input that was generated."""
    cut_off = (arguments[: len(arguments) - cut] + '"}' for cut in range(MAX_ESCAPE))
    for text in (arguments, *cut_off):
        try:
            value = str(json.loads(text)["input"])
        except (ValueError, KeyError):
            continue
        return value.encode("utf-8", "replace").decode()  # an escape may be half a character
    return ""


class ResponseObject(Struct, kw_only=True):
    """An answer."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any] | None
    error: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"] = "disabled"


@post("/v1/responses", UNHONOURED, answer=ResponseObject, note="Answer a conversation.")
async def responses(server: Server, request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation."""
    model, defaults = server.served(body.model)
    tenant = caller_of(request).tenant
    texts = server.texts.of(tenant)
    server.generations.check_capacity(tenant, 1)
    fields = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "structured": answer_constraint(body),
    }
    changes: dict[str, Any] = {k: value for k, value in fields.items() if value is not None}
    changes["max_tokens"] = body.max_output_tokens or own_limit(defaults)
    if LOGPROBS in (body.include or ()):
        changes["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ParamError("top_logprobs", f"needs {LOGPROBS!r} in include")
    params = defaults.with_changes(**changes)
    sent = body.input
    previous, use, prompt = await _prompt(server, request, body)
    if use is not None and params.logprobs is not None:
        raise ParamError("include", f"may not have {LOGPROBS!r} together with tools")
    stored, keep = StoredResponse(server.stored.new_id(), previous), None
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    if server.stored.max_bytes and body.store is not False:
        items = input_items(body)
        stored.input_items = await offload(len(items), partial(_encoded, items))

        def keep(response: ResponseObject) -> None:
            stored.response = msgspec.json.encode(response)
            if threading.get_ident() == thread:
                server.stored.add(tenant, stored)
            else:  # by the event loop, before it continues with the result of `offload`
                loop.call_soon_threadsafe(server.stored.add, tenant, stored)

    answer = AnswerForm.behind(prompt, texts.form, use, anew=True)
    params = answer.constrained(params)
    with rename_fields(prompt="input", max_tokens="max_output_tokens"):
        ids = await texts.encode(prompt, add_special_tokens=False)
        check_output_fits(server, len(ids), body.max_output_tokens, "max_output_tokens")
        check_logprobs(server, [ids], params, "prompt_logprobs", "include")
        prepared = generation_request(body, ids, params, "input", answer)
        # Other servers lack what it continues or refers to.
        prepared = replace(prepared, movable=previous is None and body.input is sent)
        (generation,) = await start_all(server, request, [prepared], stream=body.stream)
    names = TokenNames(server.texts.tokenizer)
    form = ResponseEvents(model, body, params, answer, names, stored.id, keep)
    return await generation_response(request, [generation], form, body.stream)


async def _prompt(
    server: Server, request: Request, body: ResponsesRequest
) -> tuple[StoredResponse | None, ToolUse | None, str]:
    """Return the response that a body continues, its tools and the text of its prompt; replace
    references in its input by what they refer to. A response header lists what is ignored."""
    tenant = caller_of(request).tenant
    texts = server.texts.of(tenant)
    if isinstance(body.input, list) and any(map(_refers, body.input)):
        body.input = [_referred(server, tenant, i, item) for i, item in enumerate(body.input)]
    previous, earlier = None, list[InputItem]()
    if body.previous_response_id is not None:
        previous = _stored(server, tenant, body.previous_response_id, "previous_response_id")
        earlier = await offload(previous.total_size >> 8, partial(_conversation, previous))
    use, ignored = response_tools(body, texts)
    context = context_of(request)
    context.ignore(ignored)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        context.ignore(["text.verbosity"])
    effort = None if body.reasoning is None else body.reasoning.effort
    chat = ChatRequest(messages=response_messages(body, earlier))
    if effort is not None and texts.form.thinks:
        chat.chat_template_kwargs = effort_variables(effort, texts.form, None)
    elif effort not in (None, "none"):  # agents send it to every model
        context.ignore(["reasoning.effort"])
    with rename_fields(messages="input"):
        return previous, use, await conversation_text(texts, chat.messages, chat, use)


class InputTokens(Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@post(
    "/v1/responses/input_tokens",
    UNHONOURED,
    answer=InputTokens,
    note="How many tokens a conversation has as a prompt.",
)
async def input_tokens(server: Server, request: Request, body: ResponsesRequest) -> Response:
    """Count the tokens that a conversation would have as a prompt."""
    server.served(body.model)
    texts = server.texts.of(caller_of(request).tenant)
    _, _, prompt = await _prompt(server, request, body)
    with rename_fields(prompt="input"):
        ids = await texts.encode(prompt, add_special_tokens=False)
    return json_response(InputTokens(input_tokens=len(ids)))


def _stored(server: Server, tenant: str, response_id: str, param: str) -> StoredResponse:
    response = server.stored.find(tenant, response_id)
    if response is None:
        previous = param == "previous_response_id"
        name = "Previous response" if previous else "Response"
        raise HttpError(
            400 if previous else 404,
            f"{name} with id {response_id[:80]!r} not found: the server has dropped it, or never "
            "kept it; send the whole conversation",
            param,
            "previous_response_not_found" if previous else "response_not_found",
        )
    return response


def _refers(item: InputItem) -> bool:
    """Return whether an item only names an item of the output of a response."""
    bare = item.type is None and item.role is None and item.id is not None
    return bare or item.type == "item_reference"


def _referred(server: Server, tenant: str, index: int, item: InputItem) -> InputItem:
    """Return the item that an item of the input refers to; itself if it is no reference."""
    if not _refers(item):
        return item
    param = f"input.{index}.id"
    if item.id is None:
        raise ParamError(param, "must be the id of an item of a response that the server keeps")
    response = server.stored.find(tenant, response_of(item.id))
    for stored in () if response is None else response.output():
        named = msgspec.json.decode(stored, type=InputItem)
        if named.id == item.id:
            return named
    raise HttpError(
        404,
        f"Item with id {item.id[:80]!r} not found: the server has dropped its response, or never "
        "kept it; send the item itself",
        param,
        "item_not_found",
    )


def _conversation(previous: StoredResponse) -> list[InputItem]:
    """Return the items of a conversation up to the output of a response."""
    items = (*previous.context(), *previous.output())
    return [msgspec.json.decode(item, type=InputItem) for item in items]


ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def _encoded(items: Sequence[InputItem]) -> bytes:
    """Return items of an input in the API's format, with new ids, as JSON."""
    encoded = []
    for item in items:
        kind = item.type or "message"
        shown = {"type": kind, "status": "completed", **msgspec.to_builtins(item)}
        shown["id"] = f"{ID_PREFIXES[kind]}_{secrets.token_hex(12)}"
        if kind == "message":
            shown["content"] = _content(item)
        encoded.append(msgspec.json.encode(shown))
    return b"[" + b",".join(encoded) + b"]"


def _content(message: InputItem) -> list[dict[str, Any]]:
    parts = message.content
    if not isinstance(parts, list):
        kind = "output_text" if message.role == "assistant" else "input_text"
        parts = [ContentPart(type=kind, text=parts or "")]
    shown: list[dict[str, Any]] = msgspec.to_builtins(parts)
    return [part | {"annotations": []} if part["type"] == "output_text" else part for part in shown]


class ItemPage(Struct, kw_only=True):
    """Some of the items that a response was generated from."""

    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ItemQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class _Identified(Struct):
    id: str


def _requested(server: Server, request: Request) -> StoredResponse:
    tenant, response_id = caller_of(request).tenant, request.path_params["response_id"]
    return _stored(server, tenant, response_id, "response_id")


STORED = "/v1/responses/{response_id}"


@get(STORED, answer=ResponseObject, note="A response that the server keeps.")
async def stored_response(server: Server, request: Request) -> Response:
    response = _requested(server, request)
    if request.query_params.get("stream", "false") != "false":
        raise ParamError("stream", "must be false: the response has ended")
    return Response(response.response, media_type="application/json")


@get(STORED, method="DELETE", note="Delete a response that the server keeps.")
async def deletion(server: Server, request: Request) -> Response:
    response = _requested(server, request)
    server.stored.delete(caller_of(request).tenant, response)
    return json_response({"id": response.id, "object": "response", "deleted": True})


@get(f"{STORED}/cancel", method="POST", note="")
async def cancellation(server: Server, request: Request) -> Response:
    _requested(server, request)
    raise ParamError("response_id", "has ended, and cannot be cancelled")


@get(f"{STORED}/input_items", answer=ItemPage, note="The items that a response was generated from.")
async def item_page(server: Server, request: Request) -> Response:
    response = _requested(server, request)
    query = convert(request.query_params, ItemQuery, strict=False)
    items = await offload(response.total_size >> 8, response.context)
    if query.order == "desc":
        items.reverse()
    ids = [msgspec.json.decode(item, type=_Identified).id for item in items]
    start = 0
    if query.after is not None:
        if query.after not in ids:
            raise ParamError("after", "must be the id of an item of this list")
        start = ids.index(query.after) + 1
    end = start + query.limit
    page = ids[start:end]
    first, last = (page[0], page[-1]) if page else (None, None)
    more = end < len(items)
    return json_response(
        ItemPage(data=items[start:end], first_id=first, last_id=last, has_more=more)
    )


class ResponseEvents(ResponseFormat):
    """The `ResponseFormat` of responses: items that are opened, extended and closed.

    Args:
        keep: stores the response when it has ended; None: it is not stored.
    """

    resumable = False  # its last events repeat the ids of all items

    def __init__(
        self,
        model: str,
        body: ResponsesRequest,
        params: SamplingParams,
        answer: AnswerForm,
        names: TokenNames,
        response_id: str,
        keep: Callable[[ResponseObject], None] | None,
    ) -> None:
        self._id, self._keep = response_id, keep
        self._created = int(time.time())
        self._model, self._body, self._params, self._answer = model, body, params, answer
        self._tools = {
            prompt_name(namespace, tool.name): (namespace, tool)
            for namespace, tool in named_tools(body)
        }
        self._parser = answer.parser()
        self._names = names
        self._logprobs: list[bytes] = []  # as JSON, those that belong to no item yet
        self._items: list[OutputItem] = []
        self._streamed = False  # its items come from the events
        self._number = 0

    def complete(self, outputs: Sequence[RequestOutput]) -> ResponseObject:
        (output,) = outputs
        if not self._streamed:
            self._add_logprobs(output.outputs[0].logprobs)
            for delta in self._parser.push(output.text, ends=True):
                for _ in self._item_events(delta):
                    pass
            self._take_logprobs()
        status = _status(output)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._ended(self._object(status, self._shown(status), details, self._usage(output)))

    def begin(self) -> bytes:
        self._streamed = True
        start = self._object("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event({"type": kind, "response": start}) for kind in kinds)

    def events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        self._add_logprobs(delta.logprobs)
        for part in self._parser.push(delta.text, ends=delta.finish_reason is not None):
            for event in self._item_events(part):
                yield self._event(event)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        closing = [self._event(event) for event in self._close_item(_status(outputs[0]))]
        response = self.complete(outputs)
        last = self._event({"type": f"response.{response.status}", "response": response})
        return b"".join([*closing, last])

    def failed(self, error: HttpError) -> bytes:
        # The client raises an `error`, others read the event's own fields.
        fields = msgspec.to_builtins(error.body())["error"]
        reason = {"code": "server_error", "message": fields["message"]}
        self._ended(self._object("failed", self._shown("incomplete"), error=reason))
        return self._event({**fields, "type": "error", "error": fields})

    def _item_events(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Add a delta to the items; yield the stream events for it."""
        if delta.thought:
            yield from self._open("reasoning")
            yield from self._add("response.reasoning_text.delta", delta.thought)
        elif delta.text:
            yield from self._open("message")
            yield from self._add("response.output_text.delta", delta.text)
        elif delta.name:
            namespace, tool = self._tools[delta.name]
            custom = tool.type == "custom"
            kind: Literal["custom_tool_call", "function_call"]
            kind = "custom_tool_call" if custom else "function_call"
            item = OutputItem(kind, self._new_id(kind))
            item.call_id, item.name, item.namespace = delta.id, tool.name or "", namespace
            yield from self._begin_item(item)
        elif delta.arguments and self._items[-1].kind == "function_call":
            yield from self._add("response.function_call_arguments.delta", delta.arguments)
        elif delta.arguments:  # the input of a custom tool is known only when its JSON is complete
            self._items[-1].text.append(delta.arguments)

    def _new_id(self, kind: str) -> str:
        return item_id(ID_PREFIXES[kind], self._id, len(self._items))

    def _open(self, kind: Literal["message", "reasoning"]) -> Iterator[dict[str, Any]]:
        if self._items and self._items[-1].kind == kind:
            return
        item = OutputItem(kind, self._new_id(kind))
        yield from self._begin_item(item)
        yield self._of_item("response.content_part.added", part=item.part(""))

    def _begin_item(self, item: OutputItem) -> Iterator[dict[str, Any]]:
        yield from self._close_item()
        self._items.append(item)
        shown = item.shown("in_progress")
        index = len(self._items) - 1
        yield {"type": "response.output_item.added", "output_index": index, "item": shown}

    def _add(self, event: str, text: str) -> Iterator[dict[str, Any]]:
        self._items[-1].text.append(text)
        yield self._of_item(event, delta=text)

    def _close_item(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if not self._items:
            return
        item = self._items[-1]
        text = "".join(item.text)
        if item.kind == "function_call":
            done = "response.function_call_arguments.done"
            yield self._of_item(done, arguments=text, name=item.name)
        elif item.kind == "custom_tool_call":
            tool_input = _custom_input(text)
            yield self._of_item("response.custom_tool_call_input.delta", delta=tool_input)
            yield self._of_item("response.custom_tool_call_input.done", input=tool_input)
        else:
            named = "reasoning_text" if item.kind == "reasoning" else "output_text"
            yield self._of_item(f"response.{named}.done", text=text)
            yield self._of_item("response.content_part.done", part=item.part(text))
        shown = item.shown(status)
        index = len(self._items) - 1
        yield {"type": "response.output_item.done", "output_index": index, "item": shown}

    def _of_item(self, kind: str, **fields: object) -> dict[str, Any]:
        item = self._items[-1]
        event = {"type": kind, "item_id": item.id, "output_index": len(self._items) - 1}
        if item.kind in ("message", "reasoning"):
            event["content_index"] = 0
        if kind.startswith("response.output_text"):
            taken = self._take_logprobs()
            event["logprobs"] = _joined(item.logprobs if kind.endswith(".done") else taken)
        return event | fields

    def _add_logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> None:
        if logprobs is None or self._params.logprobs is None:
            return
        for first in range(0, len(logprobs), CHUNK_ITEMS):  # other threads run in between
            chunk = self._names.chat(logprobs[first : first + CHUNK_ITEMS]).content
            self._logprobs.append(msgspec.json.encode(chunk)[1:-1])

    def _take_logprobs(self) -> list[bytes]:
        """Return the log probabilities that belong to no item, and add them to the current one if
        it is a message."""
        taken: list[bytes] = []
        if self._items and self._items[-1].kind == "message":
            taken, self._logprobs = self._logprobs, taken
            self._items[-1].logprobs += taken
        return taken

    def _event(self, event: dict[str, Any]) -> bytes:
        event = event | {"sequence_number": self._number}
        self._number += 1
        return json_event(event, event["type"])

    def _shown(self, status: str) -> list[dict[str, Any]]:
        """Return all items, the last one with this status."""
        shown = [item.shown("completed") for item in self._items]
        if shown:
            shown[-1]["status"] = status
        return shown

    def _ended(self, response: ResponseObject) -> ResponseObject:
        if self._keep is not None:
            self._keep(response)
        return response

    def _object(
        self,
        status: str,
        output: list[dict[str, Any]],
        details: dict[str, str] | None = None,
        usage: dict[str, Any] | None = None,
        error: dict[str, str] | None = None,
    ) -> ResponseObject:
        body = self._body
        effort = None if body.reasoning is None else body.reasoning.effort
        text = TextFormat(type="text") if body.text is None else body.text.format
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            status=status,
            model=self._model,
            output=output,
            incomplete_details=details,
            usage=usage,
            error=error,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": effort, "summary": None},
            store=self._keep is not None,
            temperature=self._params.temperature,
            text={"format": {"type": "text"} if text is None else text},
            tool_choice=body.tool_choice or "auto",
            tools=[tool for tool in body.tools or () if tool.type in SUPPORTED],
            top_p=self._params.top_p,
        )

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        usage = usage_of([output], self._answer.count_thoughts)
        details = usage.completion_tokens_details
        thought = 0 if isinstance(details, UnsetType) else details.reasoning_tokens or 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage.total_tokens,
        }


def _status(output: RequestOutput) -> str:
    return "incomplete" if output.outputs[0].finish_reason == "length" else "completed"


routes = routes_of(responses, input_tokens, stored_response, deletion, cancellation, item_page)
