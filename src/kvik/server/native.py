"""POST /v1/generate: text from a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import SamplingParams
from kvik.engine.output import RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.generation import Generation, GenerationRequest
from kvik.server.openai.answers import Speculation, speculation_of
from kvik.server.openai.requests import (
    UNSHOWN,
    CacheSalt,
    DeadlineMs,
    Limit,
    Priority,
    asked_tokens,
    limit_of,
    parameters_of,
    parameters_struct,
    prompt_ids,
    split_prompts,
)
from kvik.server.responses import (
    HOLE,
    ResponseFormat,
    Template,
    generation_response,
    json_event,
    start_all,
)
from kvik.server.route import caller_of, post, routes_of
from kvik.server.server import Server
from kvik.server.unhonoured import SAMPLING, Table, missing

# Parameters of other routes for output that this one does not return.
_PARAMETERS: Any = parameters_struct(("typical_p", *UNSHOWN))


class GenerateRequest(_PARAMETERS, Struct, kw_only=True):  # type: ignore[misc]
    """A prompt to continue. null means absent: the model's own default."""

    prompt: Annotated[str | list[int], Meta(description="a text, or token ids")]
    stream: bool = False
    max_tokens: Limit | None = None
    n_predict: Limit | None = None  # another name of max_tokens
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    deadline_ms: DeadlineMs | None = None


class Generated(Struct, kw_only=True):
    """A finished text.

    Attributes:
        latency_ms: time from the request's arrival to its last token.
        tokens_per_second: output tokens divided by that time.
        speculation: present if the engine speculates.
    """

    text: str | UnsetType = UNSET  # absent in the last event of a stream
    tokens_generated: int
    prompt_tokens: int
    cached_tokens: int
    latency_ms: float
    tokens_per_second: float
    finish_reason: str
    request_id: str
    speculation: Speculation | UnsetType = UNSET


class TextPiece(Struct):
    """An event of a stream."""

    text: str


UNHONOURED: Table = {**SAMPLING, **missing(GenerateRequest.__struct_fields__)}


@post("/v1/generate", UNHONOURED, answer=Generated, note="Continue a text.")
async def generate(server: Server, request: Request, body: GenerateRequest) -> Response:
    """Continue a prompt. A stream has `TextPiece` events and ends with a `Generated`."""
    params = _params(body, server.default_params)
    tenant = caller_of(request).tenant
    server.generations.check_capacity(tenant, params.n)
    (prompt,) = split_prompts("prompt", body.prompt).values()
    generation_request = GenerationRequest(
        await prompt_ids(server.texts.of(tenant), prompt),
        params,
        priority=body.priority,
        cache_salt=body.cache_salt,
        deadline_ms=body.deadline_ms,
        adapter_field="adapter",
    )
    (generation,) = await start_all(server, request, [generation_request], stream=body.stream)
    form = GenerateFormat(generation)
    return await generation_response(request, [generation], form, body.stream)


class GenerateFormat(ResponseFormat):
    """The `ResponseFormat` of a plain text."""

    _text = Template(TextPiece(HOLE))

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def complete(self, outputs: Sequence[RequestOutput]) -> Generated:
        generated = self._without_text(outputs)
        generated.text = outputs[0].text
        return generated

    def events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        if delta.text:
            yield self._text.fill(delta.text)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        return json_event(self._without_text(outputs))

    def _without_text(self, outputs: Sequence[RequestOutput]) -> Generated:
        (output,) = outputs
        (completion,) = output.outputs
        seconds = time.monotonic() - self._generation.record.arrived
        count = len(completion.token_ids)
        return Generated(
            tokens_generated=count,
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            latency_ms=round(seconds * 1e3, 3),
            tokens_per_second=round(count / seconds, 3),
            finish_reason=completion.finish_reason,
            request_id=output.request_id,
            speculation=speculation_of(outputs),
        )


def _params(body: GenerateRequest, defaults: SamplingParams) -> SamplingParams:
    changes = parameters_of(body)
    name, limit = asked_tokens(body)
    if limit == 0:
        raise ParamError(name, "must be at least 1")
    if limit is not None:
        changes["max_tokens"] = limit_of(limit)
    return defaults.with_changes(**changes)


routes = routes_of(generate)
