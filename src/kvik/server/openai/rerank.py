"""POST /v1/rerank and /v1/score: how relevant texts are to each other, by a reranker."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import SCORE
from kvik.engine.output import activated
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.generation import GenerationRequest
from kvik.server.openai.embeddings import MAX_INPUTS, EmbeddingUsage
from kvik.server.openai.requests import DeadlineMs, Name, Priority, Truncation, kept_tokens
from kvik.server.responses import encode_in_chunks, offload, start_all, wait_for_outputs
from kvik.server.route import caller_of, post, routes_of
from kvik.server.server import Server
from kvik.server.texts import Texts
from kvik.server.unhonoured import Table
from kvik.text.pooled_inputs import PooledInput, pair_input, paired, scoring

NUMBERS_EACH = 64  # what a result weighs when it is written, in numbers


class PairFields(Struct, kw_only=True):
    """The optional fields of every body with pairs of texts."""

    model: Name | None = None
    instruction: (
        Annotated[str, Meta(description="what makes a pair good, if the model reads it")] | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[
            Truncation,
            Meta(description="tokens of a pair to keep, the longer text cut first; -1: what fits"),
        ]
        | None
    ) = None
    priority: Priority | None = None
    deadline_ms: DeadlineMs | None = None

    user: str | None = None
    metadata: Any = None


class Document(Struct):
    text: str


class RerankRequest(PairFields, kw_only=True):
    """A query and the documents to rank."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1, le=1 << 31, description="how many results; default all")] | (
        None
    ) = None
    return_documents: bool | None = None


class ScoreRequest(PairFields, kw_only=True):
    """Texts to score: one text with each of the others, or two lists pairwise."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankResult(Struct):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(Struct, kw_only=True):
    """The results, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class ScoreItem(Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage


UNHONOURED: Table = {
    "max_tokens_per_doc": ((), "give truncate_prompt_tokens"),
    "max_chunks_per_doc": ((1,), "documents are not divided"),
    **dict.fromkeys(("activation", "use_activation"), ((True,), "the model's files say which")),
}


@post("/v1/rerank", UNHONOURED, answer=RerankAnswer, note="Documents by how well they fit a query.")
async def rerank(server: Server, request: Request, body: RerankRequest) -> Response:
    """Return the documents most relevant to a query, each with its score."""
    texts = [
        document if isinstance(document, str) else document.text for document in body.documents
    ]
    pairs = {f"documents[{i}]": (body.query, text) for i, text in enumerate(texts)}
    model, defaults = server.served(body.model)
    scores, usage = await _scores(server, request, body, pairs, "documents", defaults.adapter)
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
    shown = body.return_documents is not False
    results = [RerankResult(i, scores[i], Document(texts[i]) if shown else None) for i in best]
    answer = RerankAnswer(
        id=f"rerank-{secrets.token_hex(16)}", model=model, results=results, usage=usage
    )
    return await written(answer, len(results))


rerank_v2 = replace(rerank, path="/v2/rerank", note="As /v1/rerank.")


@post("/v1/score", UNHONOURED, answer=ScoreList, note="Scores of pairs of texts.")
async def score(server: Server, request: Request, body: ScoreRequest) -> Response:
    """Return a score for each pair of texts."""
    first, second = (
        [texts] if isinstance(texts, str) else texts for texts in (body.text_1, body.text_2)
    )
    field = "text_2" if len(second) >= len(first) else "text_1"
    pairs = {f"{field}[{i}]": pair for i, pair in enumerate(paired(first, second))}
    model, defaults = server.served(body.model)
    scores, usage = await _scores(server, request, body, pairs, field, defaults.adapter)
    answer = ScoreList(
        id=f"score-{secrets.token_hex(16)}",
        model=model,
        data=[ScoreItem(i, value) for i, value in enumerate(scores)],
        usage=usage,
    )
    return await written(answer, len(scores))


async def _scores(
    server: Server,
    request: Request,
    body: PairFields,
    pairs: Mapping[str, tuple[str, str]],
    pairs_field: str,
    adapter: str,
) -> tuple[list[float], EmbeddingUsage]:
    """Return the score of each pair.

    Args:
        pairs: by their names in error messages.
        pairs_field: the field that holds them.
    """
    pooling = scoring(server.engine.config.model.pooling)
    tenant = check_number(server, request, pairs_field, len(pairs))
    keep = kept_tokens(server, body.truncate_prompt_tokens, num_output=0)
    make = partial(pair_input, pooling=pooling, instruction=body.instruction, limit=keep)
    inputs = await pair_inputs(server.texts.of(tenant), pairs, make, keep)
    outputs = await head_outputs(server, request, body, inputs, adapter)
    scores = [activated(output, pooling.function)[0] for output in outputs]
    return scores, usage_of(inputs)


def check_number(server: Server, request: Request, field: str, count: int) -> str:
    """Return the tenant of a request; raise if a body has no texts, or too many now or ever."""
    if not count:
        raise ParamError(field, "must not be empty")
    if count > MAX_INPUTS:
        raise ParamError(field, f"at most {MAX_INPUTS} texts, not {count}")
    tenant = caller_of(request).tenant
    server.generations.check_capacity(tenant, count, field)
    return tenant


async def pair_inputs(
    texts: Texts,
    pairs: Mapping[str, tuple[str, str]],
    make: Callable[..., PooledInput],
    keep: int | None,
) -> dict[str, PooledInput]:
    """Return the model's input for each pair of texts, by its name in error messages; for the other
    arguments see `Texts.input`."""
    inputs = {}
    for field, pair in pairs.items():
        with rename_fields(prompt=field):
            inputs[field] = await texts.input(make, pair, keep)
    return inputs


class HeadFields(Protocol):
    """Fields of a body that say when its texts are computed."""

    priority: int | None
    deadline_ms: int | None


async def head_outputs(
    server: Server,
    request: Request,
    body: HeadFields,
    inputs: Mapping[str, PooledInput],
    adapter: str,
) -> list[list[float]]:
    """Return what the head of the model returns for each input, in order."""
    requests = [
        GenerationRequest(
            prompt_token_ids=encoded.ids,
            params=SamplingParams(max_tokens=None, adapter=adapter),
            priority=body.priority or 0,
            deadline_ms=body.deadline_ms,
            pooling=SCORE,
            second_text=encoded.second_text,
            field=field,
        )
        for field, encoded in inputs.items()
    ]
    generations = await start_all(server, request, requests)
    return [output.embedding or [0.0] for output in await wait_for_outputs(request, generations)]


def usage_of(inputs: Mapping[str, PooledInput]) -> EmbeddingUsage:
    num_tokens = sum(len(encoded.ids) for encoded in inputs.values())
    return EmbeddingUsage(num_tokens, num_tokens)


async def written(answer: Struct, count: int) -> Response:
    """Return an answer with this number of results."""
    data = await offload(NUMBERS_EACH * count, lambda: encode_in_chunks(answer))
    return Response(data, media_type="application/json")


routes = routes_of(rerank, rerank_v2, score)
