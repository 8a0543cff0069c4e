"""POST /v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kvik.server.asking import check_model, large_response
from kvik.server.beside import beside
from kvik.server.body import read_body
from kvik.server.errors import called
from kvik.server.exchange import caller_of, trace_parent_of
from kvik.server.openai.asking import check_logprobs, check_room, generation_request, num_logprobs
from kvik.server.openai.completion_answer import CompletionShape, CompletionStream
from kvik.server.openai.completion_request import CompletionRequest
from kvik.server.openai.heading import Heading
from kvik.server.openai.prompts import One, all_prompt_ids, check_choices, split
from kvik.server.openai.sampling import asked_tokens, completion_params
from kvik.server.openai.tokens import TokenNames
from kvik.server.openai.unhonoured import COMPLETION
from kvik.server.parts import Parts
from kvik.server.reply import StreamReply, degraded_header, outputs


async def completions(parts: Parts, request: Request) -> Response:
    """Go on with one text or many."""
    body = await read_body(request, CompletionRequest, COMPLETION)
    return await answer_completions(parts, request, body)


async def answer_completions(parts: Parts, request: Request, body: CompletionRequest) -> Response:
    """The same, once the body is read."""
    check_model(parts, body.model)
    params = completion_params(body, parts.default_params)
    given = split("prompt", body.prompt)
    check_choices("n" if len(given) == 1 else "prompt", len(given), params.n)
    tenant = caller_of(request).tenant
    parts.generations.check_room(tenant, len(given) * params.n)
    ids = await all_prompt_ids(parts.texts.of(tenant), given, body.add_special_tokens)
    prompts = list(ids.values())
    name, asked = asked_tokens(body)
    for field in ids:
        with called(prompt=field):
            check_room(parts, len(ids[field]), asked, name)
    of_prompt = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_logprobs(parts, prompts, params, of_prompt, "logprobs")
    with called(tokens="echo"):
        num_echoed = sum(map(len, prompts)) if body.echo else 0
        echoes = await beside(
            num_echoed, lambda: [_echo(parts, body, one) for one in given.values()]
        )
    wishes = [generation_request(body, ids[field], params, field) for field in ids]
    streaming = bool(body.stream)
    with called(max_tokens=name):
        generations = await parts.generations.start_all(
            wishes, tenant, streaming=streaming, trace_parent=trace_parent_of(request)
        )
    shape = CompletionShape(
        Heading(f"cmpl-{generations[0].request_id}", parts.model_name),
        body,
        TokenNames(parts.texts.tokenizer),
        prompts,
        echoes,
    )
    if streaming:
        return StreamReply(generations, CompletionStream(shape, body))
    finished = await outputs(request, generations)
    answer = await large_response(sum(map(num_logprobs, finished)), lambda: shape.whole(finished))
    answer.headers.update(degraded_header(generations))
    return answer


def _echo(parts: Parts, body: CompletionRequest, prompt: One) -> str:
    """What stands before the completions of a prompt."""
    if not body.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return parts.texts.decode(prompt, body.skip_special_tokens is not False)
