"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import Pin, PromptUse
from kvik.engine.output import RequestOutput, TextDelta
from kvik.server.anthropic.conversation import (
    HOUR,
    CountRequest,
    MessageRequest,
    make_prompt,
    read_conversation,
)
from kvik.server.body import read_body
from kvik.server.errors import rename_fields
from kvik.server.exchange import caller_of, trace_parent_of
from kvik.server.generation import Generation, GenerationRequest
from kvik.server.responses import (
    StreamReply,
    Template,
    degraded_header,
    json_event,
    json_response,
    offload,
    wait_for_outputs,
)
from kvik.server.route import Route
from kvik.server.server import Server
from kvik.server.unhonoured import SAMPLING, STRUCTURED, TOOLS, Table, missing

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class CacheCreation(Struct, kw_only=True):
    """Tokens that were written and pinned, by how long they stay."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class Usage(Struct, kw_only=True):
    """The prompt is what was read from the cache, what was written into it and pinned, and
    `input_tokens`, the rest. null: not known yet, and the rest is all of it."""

    input_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    cache_creation: CacheCreation | None
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class TextBlock(Struct):
    text: str
    type: Literal["text"] = "text"


class MessageResponse(Struct, kw_only=True):
    """The assistant's message; at the start of a stream without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(Struct):
    input_tokens: int


_ELSEWHERE = "this route does not take it"
COUNT: Table = {
    "tools": (([],), TOOLS),
    "tool_choice": (({"type": "auto"}, {"type": "none"}), TOOLS),
    "mcp_servers": (([],), TOOLS),
    "thinking": (({"type": "disabled"},), "thinking is not supported yet"),
    "output_config": (({},), STRUCTURED),
    "output_format": ((), STRUCTURED),
    "context_management": (({},), "the context is not edited"),
}
MESSAGES: Table = {
    **SAMPLING,
    **missing(MessageRequest.__struct_fields__),
    **COUNT,
    "chat_template": ((), "the template is the model's own"),
    "chat_template_kwargs": (({},), _ELSEWHERE),
    "container": ((), "there are no containers"),
    "stop": (([], ""), "give stop_sequences"),
    "repeat_penalty": ((1,), _ELSEWHERE),
    "n_predict": ((), "give max_tokens"),
    "max_completion_tokens": ((), "give max_tokens"),
}


@dataclass(frozen=True, slots=True)
class UsageMeter:
    """Of one request.

    Attributes:
        num_prompt: tokens.
        pins: that were wanted.
        block_size: of the KV cache: what is pinned are full blocks.
    """

    num_prompt: int
    pins: Sequence[Pin]
    block_size: int

    def usage(self, used: PromptUse | None, num_output: int) -> Usage:
        """`used`: None if it is not known yet."""
        if used is None:
            return Usage(
                input_tokens=self.num_prompt,
                cache_creation_input_tokens=None,
                cache_read_input_tokens=None,
                cache_creation=None,
                output_tokens=num_output,
            )
        read, written = used.num_cached_tokens, used.num_pinned_tokens
        hour = self._for_an_hour(read, written)
        return Usage(
            input_tokens=self.num_prompt - read - written,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=read,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=written - hour, ephemeral_1h_input_tokens=hour
            ),
            output_tokens=num_output,
        )

    def _for_an_hour(self, read: int, written: int) -> int:
        """Of the tokens written and pinned, those up to the last mark of an hour that they reach:
        there may not have been room for a longer pin."""
        lengths = [
            min(pin.num_tokens, self.num_prompt) // self.block_size * self.block_size
            for pin in self.pins
            if pin.seconds == HOUR
        ]
        reached = [length for length in lengths if length <= read + written]
        return min(max(max(reached, default=0) - read, 0), written)


PING = json_event({"type": "ping"}, "ping")
_HOLE = "\ue000text\ue000"
_START = json_event(
    {"type": "content_block_start", "index": 0, "content_block": TextBlock("")},
    "content_block_start",
)
_TEXT = Template(
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": _HOLE},
    },
    [_HOLE],
    "content_block_delta",
)
_STOP = json_event({"type": "content_block_stop", "index": 0}, "content_block_stop")
_END = json_event({"type": "message_stop"}, "message_stop")


@dataclass(frozen=True, slots=True)
class MessageBuilder:
    """What an answer needs beside its text.

    Attributes:
        stop_sequences: that the caller named.
        max_model_len: of prompt and answer together.
        silent: the prompt is computed for the cache, and nobody wants an answer.
    """

    id: str
    model: str
    meter: UsageMeter
    stop_sequences: Sequence[str]
    max_model_len: int
    silent: bool = False

    def whole(self, output: RequestOutput) -> MessageResponse:
        """Of a finished request."""
        used = PromptUse(output.num_cached_tokens, output.num_pinned_tokens)
        if self.silent:
            return replace(self.begun(used), stop_reason="max_tokens")
        reason, sequence = self._stop(output)
        return MessageResponse(
            id=self.id,
            model=self.model,
            content=[TextBlock(output.text)],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self.meter.usage(used, output.num_output_tokens),
        )

    def begun(self, used: PromptUse | None) -> MessageResponse:
        """Of one that has no text yet."""
        return MessageResponse(
            id=self.id,
            model=self.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self.meter.usage(used, 0),
        )

    def _stop(self, output: RequestOutput) -> tuple[StopReason, str | None]:
        end = output.completions[0]
        if isinstance(end.stop_reason, str) and end.stop_reason in self.stop_sequences:
            return "stop_sequence", end.stop_reason
        if end.finish_reason != "length":
            return "end_turn", None
        if self.meter.num_prompt + output.num_output_tokens >= self.max_model_len:
            return "model_context_window_exceeded", None
        return "max_tokens", None


class MessageStream:
    """Deltas -> events: one block of text, between the beginning and the end of a message."""

    def __init__(self, heading: MessageBuilder, generation: Generation) -> None:
        self._heading = heading
        self._generation = generation

    def begin(self) -> bytes:
        message = self._heading.begun(self._generation.prompt_use)
        start = json_event({"type": "message_start", "message": message}, "message_start")
        return start + (PING if self._heading.silent else _START + PING)

    def grow(self, position: int, deltas: Sequence[TextDelta]) -> bytes:
        """`position` is 0, and there is one completion."""
        if self._heading.silent:
            return b""
        return b"".join(_TEXT.fill(delta.text) for delta in deltas if delta.text)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        answer = self._heading.whole(outputs[0])
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence},
            "usage": answer.usage,
        }
        stop = b"" if self._heading.silent else _STOP
        return stop + json_event(delta, "message_delta") + _END


async def messages(server: Server, request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, MessageRequest, MESSAGES)
    server.check_model(body.model)
    params = _params(body, server.default_params)
    tenant = caller_of(request).tenant
    server.generations.check_room(tenant, params.n)
    conversation = await offload(len(body.messages), lambda: read_conversation(body))
    prompt = await make_prompt(server.texts.of(tenant), conversation)
    wish = GenerationRequest(
        prompt_token_ids=prompt.token_ids, params=params, pins=prompt.pins, field="messages"
    )
    with rename_fields(stop="stop_sequences"):
        generation = await server.generations.start(
            wish, tenant, streaming=bool(body.stream), trace_parent=trace_parent_of(request)
        )
    config = server.engine.config
    heading = MessageBuilder(
        id=f"msg_{secrets.token_hex(12)}",
        model=server.model_name,
        meter=UsageMeter(len(prompt.token_ids), prompt.pins, config.cache.block_size),
        stop_sequences=body.stop_sequences or (),
        max_model_len=config.scheduler.max_model_len,
        silent=body.max_tokens == 0,
    )
    if body.stream:
        events = MessageStream(heading, generation)
        return StreamReply([generation], events, anthropic=True, heartbeat=PING)
    (output,) = await wait_for_outputs(request, [generation])
    answer = json_response(heading.whole(output))
    answer.headers.update(degraded_header([generation]))
    return answer


async def count_tokens(server: Server, request: Request) -> Response:
    """How many tokens a conversation would have as a prompt."""
    body = await read_body(request, CountRequest, COUNT)
    server.check_model(body.model)
    conversation = await offload(len(body.messages), lambda: read_conversation(body))
    conversation.marks.clear()  # where they stand is not asked
    prompt = await make_prompt(server.texts.of(caller_of(request).tenant), conversation)
    return json_response(TokenCount(len(prompt.token_ids)))


def _params(body: MessageRequest, defaults: SamplingParams) -> SamplingParams:
    """What is silent takes the model's own defaults."""
    given = {
        "max_tokens": max(1, body.max_tokens),  # of 0 the one token is not shown
        "stop": tuple(body.stop_sequences) if body.stop_sequences else None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    with rename_fields(stop="stop_sequences"):
        return defaults.with_changes(**{k: v for k, v in given.items() if v is not None})


def routes(server: Server) -> list[Route]:
    return [
        Route(
            "/v1/messages",
            partial(messages, server),
            body=MessageRequest,
            answer=MessageResponse,
            note="Answer a conversation, in one piece or as a stream of events.",
        ),
        Route(
            "/v1/messages/count_tokens",
            partial(count_tokens, server),
            body=CountRequest,
            answer=TokenCount,
            note="How many tokens a conversation has as a prompt.",
        ),
    ]
