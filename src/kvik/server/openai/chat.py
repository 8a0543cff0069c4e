"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kvik.server.asking import check_model, large_response
from kvik.server.body import read_body
from kvik.server.errors import called
from kvik.server.exchange import caller_of, trace_parent_of
from kvik.server.openai.asking import check_logprobs, check_room, generation_request, num_logprobs
from kvik.server.openai.chat_answer import ChatStream, whole
from kvik.server.openai.chat_request import ChatRequest
from kvik.server.openai.conversation import conversation_ids
from kvik.server.openai.heading import Heading
from kvik.server.openai.sampling import asked_tokens, chat_params
from kvik.server.openai.tokens import TokenNames
from kvik.server.openai.unhonoured import CHAT
from kvik.server.parts import Parts
from kvik.server.reply import StreamReply, degraded_header, outputs


async def chat(parts: Parts, request: Request) -> Response:
    """Answer a conversation."""
    return await answer_chat(parts, request, await read_body(request, ChatRequest, CHAT))


async def answer_chat(parts: Parts, request: Request, body: ChatRequest) -> Response:
    """The same, once the body is read."""
    check_model(parts, body.model)
    params = chat_params(body, parts.default_params)
    tenant = caller_of(request).tenant
    parts.generations.check_room(tenant, params.n)
    ids = await conversation_ids(
        parts.texts.of(tenant),
        body.messages,
        body.chat_template_kwargs,
        body.add_generation_prompt,
        body.continue_final_message,
        body.add_special_tokens,
    )
    name, asked = asked_tokens(body)
    with called(prompt="messages", max_tokens=name):
        check_room(parts, len(ids), asked, name)
        check_logprobs(parts, [ids], params, "prompt_logprobs", "top_logprobs")
        wish = generation_request(body, ids, params, "messages")
        generation = await parts.generations.start(
            wish, tenant, streaming=bool(body.stream), trace_parent=trace_parent_of(request)
        )
    heading = Heading(f"chatcmpl-{generation.request_id}", parts.model_name)
    names = TokenNames(parts.texts.tokenizer)
    if body.stream:
        return StreamReply([generation], ChatStream(heading, body, names, len(ids)))
    (output,) = await outputs(request, [generation])
    answer = await large_response(num_logprobs(output), lambda: whole(heading, body, names, output))
    answer.headers.update(degraded_header([generation]))
    return answer
