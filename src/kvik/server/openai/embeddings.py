"""POST /v1/embeddings."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import SamplingParams
from kvik.engine.output import normalise
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.generation import GenerationRequest
from kvik.server.openai.requests import (
    DeadlineMs,
    Name,
    Priority,
    Prompt,
    SinglePrompt,
    Truncation,
    all_prompt_ids,
    kept_tokens,
    split_prompts,
)
from kvik.server.responses import LazyList, encode_in_chunks, offload, start_all, wait_for_outputs
from kvik.server.route import caller_of, post, routes_of
from kvik.server.server import Server
from kvik.server.texts import Texts
from kvik.server.unhonoured import Table
from kvik.spec.pooling import PoolingSpec
from kvik.text.pooled_inputs import (
    PooledInput,
    check_dimensions,
    default_pooling,
    ids_input,
    prompt_before,
    text_input,
)

MAX_INPUTS = 2048
_UNIT = "vectors have length 1"


class EmbeddingRequest(Struct, kw_only=True):
    """Texts to embed."""

    input: Prompt
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    pooling: (
        Annotated[
            Literal["mean", "last", "cls", "max"],
            Meta(description="of the final hidden states; default: the model's own, else mean"),
        ]
        | None
    ) = None
    prompt_name: (
        Annotated[str, Meta(description="of the model's prompts, which is put before texts")] | None
    ) = None
    priority: Priority | None = None
    deadline_ms: DeadlineMs | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None

    user: str | None = None
    metadata: Any = None


# Fields of vLLM, llama.cpp, TEI, Jina, Voyage and Cohere.
EMBEDDING: Table = {
    "messages": ((), "give input"),
    **dict.fromkeys(("normalize", "use_activation"), ((True,), _UNIT)),
    "embd_normalize": ((2,), _UNIT),
    **dict.fromkeys(("input_type", "task"), (("",), "give prompt_name")),
    "output_dimension": ((), "give dimensions"),
    **dict.fromkeys(("embedding_type", "output_dtype"), (("float",), "give encoding_format")),
    "embed_dtype": (("float32",), "numbers have 32 bits"),
    "endianness": (("native", "little"), "bytes are in little-endian order"),
    "late_chunking": ((False,), "inputs are embedded one by one"),
    "truncate": ((False, "NONE"), "give truncate_prompt_tokens"),
}


class EmbeddingItem(Struct):
    index: int
    embedding: list[float] | str  # or base64 of little-endian fp32
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


@post(
    "/v1/embeddings",
    EMBEDDING,
    answer=EmbeddingList,
    note="A vector for each text, pooled from hidden states.",
)
async def embeddings(server: Server, request: Request, body: EmbeddingRequest) -> Response:
    """Return a vector of length 1 for each input, pooled from the last layer's hidden states."""
    model, defaults = server.served(body.model)
    facts = server.engine.config.model
    hidden, pooling = facts.hidden_size, facts.pooling
    check_dimensions(pooling, hidden, body.dimensions)
    before = prompt_before(pooling, body.prompt_name)
    prompts = split_prompts("input", body.input)
    if len(prompts) > MAX_INPUTS:
        raise ParamError("input", f"at most {MAX_INPUTS} inputs, not {len(prompts)}")
    tenant = caller_of(request).tenant
    server.generations.check_capacity(tenant, len(prompts), "input")
    keep = kept_tokens(server, body.truncate_prompt_tokens, num_output=0)
    texts = server.texts.of(tenant)
    if pooling is None:
        inputs = await all_prompt_ids(texts, prompts, body.add_special_tokens, keep)
    else:
        special = body.add_special_tokens is not False
        pooled = await pooled_inputs(texts, prompts, pooling, keep, before, special=special)
        inputs = {field: pooled_input.ids for field, pooled_input in pooled.items()}
    requests = [
        GenerationRequest(
            prompt_token_ids=ids,
            params=SamplingParams(max_tokens=None, adapter=defaults.adapter),
            priority=body.priority or 0,
            deadline_ms=body.deadline_ms,
            pooling=body.pooling or default_pooling(pooling),
            field=field,
        )
        for field, ids in inputs.items()
    ]
    generations = await start_all(server, request, requests)
    vectors = [output.embedding or [] for output in await wait_for_outputs(request, generations)]
    num_tokens = sum(map(len, inputs.values()))
    as_text = body.encoding_format == "base64"

    def embedding(index: int) -> EmbeddingItem:
        vector = normalise(vectors[index][: body.dimensions])
        return EmbeddingItem(index, _base64(vector) if as_text else vector)

    answer = EmbeddingList(
        data=cast(list[EmbeddingItem], LazyList(range(len(vectors)), embedding, chunk=1)),
        model=model,
        usage=EmbeddingUsage(num_tokens, num_tokens),
    )
    data = await offload(hidden * len(vectors), lambda: encode_in_chunks(answer))
    return Response(data, media_type="application/json")


async def pooled_inputs(
    texts: Texts,
    prompts: Mapping[str, SinglePrompt],
    pooling: PoolingSpec,
    keep: int | None,
    before: str,
    *,
    special: bool,
) -> dict[str, PooledInput]:
    """Return the model's input for each prompt, by its name in errors; see `text_input`.

    Args:
        before: text to put before texts.
    """
    make = partial(text_input, pooling=pooling, limit=keep, special=special)
    inputs = {}
    for field, prompt in prompts.items():
        with rename_fields(prompt=field):
            if isinstance(prompt, str):
                inputs[field] = await texts.input(make, (before + prompt,), keep)
            else:
                inputs[field] = ids_input(pooling, prompt, keep)
    return inputs


def _base64(vector: Sequence[float]) -> str:
    """Return the vector as little-endian fp32, which clients expect."""
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


routes = routes_of(embeddings)
