"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import SamplingParams
from kvik.server.anthropic.conversation import read_conversation
from kvik.server.anthropic.message_answer import TokenCount
from kvik.server.anthropic.message_events import PING, Heading, MessageStream
from kvik.server.anthropic.message_request import CountRequest, MessageRequest
from kvik.server.anthropic.prompt import make_prompt
from kvik.server.anthropic.unhonoured import COUNT, MESSAGES
from kvik.server.anthropic.usage import Meter
from kvik.server.asking import check_model, json_response
from kvik.server.beside import beside
from kvik.server.body import read_body
from kvik.server.errors import called
from kvik.server.exchange import caller_of, trace_parent_of
from kvik.server.intake import GenerationRequest
from kvik.server.parts import Parts
from kvik.server.reply import StreamReply, degraded_header, outputs


async def messages(parts: Parts, request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, MessageRequest, MESSAGES)
    check_model(parts, body.model)
    params = _params(body, parts.default_params)
    tenant = caller_of(request).tenant
    parts.generations.check_room(tenant, params.n)
    conversation = await beside(len(body.messages), lambda: read_conversation(body))
    prompt = await make_prompt(parts.texts.of(tenant), conversation)
    wish = GenerationRequest(
        prompt=prompt.token_ids, params=params, pins=prompt.pins, field="messages"
    )
    with called(stop="stop_sequences"):
        generation = await parts.generations.start(
            wish, tenant, streaming=bool(body.stream), trace_parent=trace_parent_of(request)
        )
    config = parts.engine.config
    heading = Heading(
        id=f"msg_{secrets.token_hex(12)}",
        model=parts.model_name,
        meter=Meter(len(prompt.token_ids), prompt.pins, config.cache.block_size),
        stop_sequences=body.stop_sequences or (),
        max_model_len=config.scheduler.max_model_len,
        silent=body.max_tokens == 0,
    )
    if body.stream:
        events = MessageStream(heading, generation)
        return StreamReply([generation], events, anthropic=True, heartbeat=PING)
    (output,) = await outputs(request, [generation])
    answer = json_response(heading.whole(output))
    answer.headers.update(degraded_header([generation]))
    return answer


async def count_tokens(parts: Parts, request: Request) -> Response:
    """How many tokens a conversation would have as a prompt."""
    body = await read_body(request, CountRequest, COUNT)
    check_model(parts, body.model)
    conversation = await beside(len(body.messages), lambda: read_conversation(body))
    conversation.marks.clear()  # where they stand is not asked
    prompt = await make_prompt(parts.texts.of(caller_of(request).tenant), conversation)
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
    with called(stop="stop_sequences"):
        return defaults.with_changes(**{k: v for k, v in given.items() if v is not None})
