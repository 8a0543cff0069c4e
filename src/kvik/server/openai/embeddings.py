"""POST /v1/embeddings."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from kvik.config.errors import ParamError
from kvik.core.sampling_params import SamplingParams
from kvik.engine.embedding import normalise
from kvik.server.body import read_body
from kvik.server.exchange import caller_of
from kvik.server.intake import GenerationRequest
from kvik.server.openai.answers import Embedding, Embeddings, EmbeddingUsage
from kvik.server.openai.asking import called, check_model, json_response
from kvik.server.openai.embedding_request import MAX_INPUTS, EmbeddingRequest
from kvik.server.openai.prompts import prompt_ids, split
from kvik.server.openai.unhonoured import EMBEDDING, refuse
from kvik.server.parts import Parts
from kvik.server.reply import outputs

DEFAULT_POOLING = "mean"


async def embeddings(parts: Parts, request: Request) -> Response:
    """A vector of length 1 for each input, pooled from the last layer's hidden states."""
    body = await read_body(request, EmbeddingRequest)
    check_model(parts, body.model)
    refuse(body, EMBEDDING)
    hidden = parts.engine.config.model.hidden_size
    if body.dimensions not in (None, hidden):
        raise ParamError("dimensions", f"must be {hidden}: this model's vectors cannot be cut")
    given = split("input", body.input)
    if len(given) > MAX_INPUTS:
        raise ParamError("input", f"at most {MAX_INPUTS} inputs, not {len(given)}")
    tenant = caller_of(request).tenant
    parts.generations.check_room(tenant, len(given))
    with called(prompt="input"):
        inputs = [await prompt_ids(parts.texts, one, body.add_special_tokens) for one in given]
        wishes = [
            GenerationRequest(
                prompt=ids,
                params=SamplingParams(),
                priority=body.priority or 0,
                deadline_ms=body.deadline_ms,
                pooling=body.pooling or DEFAULT_POOLING,
            )
            for ids in inputs
        ]
        generations = await parts.generations.start_all(wishes, tenant, streaming=False)
    vectors = [normalise(output.embedding or []) for output in await outputs(request, generations)]
    as_text = body.encoding_format == "base64"
    shown = [_base64(vector) if as_text else vector for vector in vectors]
    num_tokens = sum(len(ids) for ids in inputs)
    answer = Embeddings(
        data=[Embedding(index, vector) for index, vector in enumerate(shown)],
        model=body.model or parts.model_name,
        usage=EmbeddingUsage(num_tokens, num_tokens),
    )
    return json_response(answer)


def _base64(vector: Sequence[float]) -> str:
    """Little-endian fp32, as clients unpack it."""
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
