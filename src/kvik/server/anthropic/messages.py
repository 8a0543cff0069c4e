"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import Struct
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
from kvik.server.body import post
from kvik.server.errors import rename_fields
from kvik.server.generation import Generation, GenerationRequest
from kvik.server.responses import (
    HOLE,
    Template,
    generation_response,
    json_event,
    json_response,
    offload,
)
from kvik.server.route import Route, caller_of, trace_parent_of
from kvik.server.server import Server
from kvik.server.unhonoured import SAMPLING, STRUCTURED, TOOLS, Table, missing

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class CacheCreation(Struct, kw_only=True):
    """Tokens that were written and pinned, by how long they stay."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Struct, kw_only=True):
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
    usage: MessageUsage


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

    def usage(self, used: PromptUse | None, num_output: int) -> MessageUsage:
        """`used`: None if it is not known yet."""
        if used is None:
            return MessageUsage(
                input_tokens=self.num_prompt,
                cache_creation_input_tokens=None,
                cache_read_input_tokens=None,
                cache_creation=None,
                output_tokens=num_output,
            )
        read, written = used.num_cached_tokens, used.num_pinned_tokens
        hour = self._for_an_hour(read, written)
        return MessageUsage(
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
_START = json_event(
    {"type": "content_block_start", "index": 0, "content_block": TextBlock("")},
    "content_block_start",
)
_TEXT = Template(
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": HOLE},
    },
    "content_block_delta",
)
_STOP = json_event({"type": "content_block_stop", "index": 0}, "content_block_stop")
_END = json_event({"type": "message_stop"}, "message_stop")


class MessageFormat:
    """A message as a `ResponseFormat`: one block of text.

    Args:
        max_model_len: of prompt and answer together.
    """

    heartbeat = PING

    def __init__(
        self,
        model: str,
        body: MessageRequest,
        generation: Generation,
        usage: UsageMeter,
        max_model_len: int,
    ) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._generation = generation
        self._usage = usage
        self._stop_sequences = body.stop_sequences or ()
        self._max_model_len = max_model_len
        self._silent = body.max_tokens == 0  # the prompt is computed for the cache alone

    def whole(self, outputs: Sequence[RequestOutput]) -> MessageResponse:
        (output,) = outputs
        used = PromptUse(output.num_cached_tokens, output.num_pinned_tokens)
        if self._silent:
            return self._message(used, stop_reason="max_tokens")
        reason, sequence = self._stop(output)
        return self._message(
            used, output.num_output_tokens, [TextBlock(output.text)], reason, sequence
        )

    def begin(self) -> bytes:
        message = self._message(self._generation.prompt_use)
        start = json_event({"type": "message_start", "message": message}, "message_start")
        return start + (PING if self._silent else _START + PING)

    def grow(self, position: int, deltas: Sequence[TextDelta]) -> bytes:
        if self._silent:
            return b""
        return b"".join(_TEXT.fill(delta.text) for delta in deltas if delta.text)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        message = self.whole(outputs)
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence},
            "usage": message.usage,
        }
        stop = b"" if self._silent else _STOP
        return stop + json_event(delta, "message_delta") + _END

    def _message(
        self,
        used: PromptUse | None,
        num_output: int = 0,
        content: Sequence[TextBlock] = (),
        stop_reason: StopReason | None = None,
        stop_sequence: str | None = None,
    ) -> MessageResponse:
        return MessageResponse(
            id=self._id,
            model=self._model,
            content=list(content),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._usage.usage(used, num_output),
        )

    def _stop(self, output: RequestOutput) -> tuple[StopReason, str | None]:
        end = output.outputs[0]
        if isinstance(end.stop_reason, str) and end.stop_reason in self._stop_sequences:
            return "stop_sequence", end.stop_reason
        if end.finish_reason != "length":
            return "end_turn", None
        num_tokens = len(output.prompt_token_ids) + output.num_output_tokens
        if num_tokens >= self._max_model_len:
            return "model_context_window_exceeded", None
        return "max_tokens", None


async def messages(server: Server, request: Request, body: MessageRequest) -> Response:
    """Answer a conversation."""
    server.check_model(body.model)
    params = _params(body, server.default_params)
    tenant = caller_of(request).tenant
    server.generations.check_room(tenant, params.n)
    conversation = await offload(len(body.messages), lambda: read_conversation(body))
    prompt = await make_prompt(server.texts.of(tenant), conversation)
    with rename_fields(stop="stop_sequences"):
        generation = await server.generations.start(
            GenerationRequest(prompt.token_ids, params, pins=prompt.pins, field="messages"),
            tenant,
            streaming=bool(body.stream),
            trace_parent=trace_parent_of(request),
        )
    block_size = server.engine.config.cache.block_size
    usage = UsageMeter(len(prompt.token_ids), prompt.pins, block_size)
    form = MessageFormat(server.model_name, body, generation, usage, server.max_model_len)
    return await generation_response(request, [generation], form, stream=bool(body.stream))


async def count_tokens(server: Server, request: Request, body: CountRequest) -> Response:
    """How many tokens a conversation would have as a prompt."""
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
        post(
            "/v1/messages",
            partial(messages, server),
            MessageRequest,
            MESSAGES,
            answer=MessageResponse,
            note="Answer a conversation, in one piece or as a stream of events.",
        ),
        post(
            "/v1/messages/count_tokens",
            partial(count_tokens, server),
            CountRequest,
            COUNT,
            answer=TokenCount,
            note="How many tokens a conversation has as a prompt.",
        ),
    ]
