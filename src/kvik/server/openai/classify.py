"""POST /v1/classify: how likely each label of a classifier is, in vLLM's format."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from kvik.engine.output import activated, likeliest
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.openai.conversation import Messages, Variable, conversation_text
from kvik.server.openai.embeddings import EmbeddingUsage, pooled_inputs
from kvik.server.openai.requests import (
    DeadlineMs,
    Name,
    Priority,
    Prompt,
    SinglePrompt,
    Truncation,
    kept_tokens,
    split_prompts,
)
from kvik.server.openai.rerank import (
    NUMBERS_EACH,
    check_number,
    head_outputs,
    pair_inputs,
    usage_of,
    written,
)
from kvik.server.responses import LazyList
from kvik.server.route import post, routes_of
from kvik.server.server import Server
from kvik.server.unhonoured import Table
from kvik.text.pooled_inputs import check_text, classifying, pair_input, paired, prompt_before


class ClassificationRequest(Struct, kw_only=True):
    """Texts to classify, or one conversation, as for reward models."""

    input: Prompt | None = None
    text_pair: (
        Annotated[
            str | list[str],
            Meta(description="the second texts of pairs, such as hypotheses; input has the first"),
        ]
        | None
    ) = None
    messages: Messages | None = None
    model: Name | None = None
    use_activation: (
        Annotated[
            bool,
            Meta(description="true: probabilities; false: the model's outputs, such as rewards"),
        ]
        | None
    ) = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Variable] | None = None
    priority: Priority | None = None
    deadline_ms: DeadlineMs | None = None

    user: str | None = None
    metadata: Any = None


class Classification(Struct):
    index: int
    label: str  # the likeliest
    probs: list[float]  # for each label, in the order of `id2label` in config.json
    num_classes: int


class ClassificationList(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


UNHONOURED: Table = {
    "activation": ((), "give use_activation"),
    "softmax": ((True,), "give use_activation"),
}


@post("/v1/classify", UNHONOURED, answer=ClassificationList, note="The classes of texts.")
async def classify(server: Server, request: Request, body: ClassificationRequest) -> Response:
    """Return how likely each label is for each text, pair of texts or conversation."""
    pooling = classifying(server.engine.config.model.pooling)
    if (body.input is None) == (body.messages is None):
        raise ParamError("input", "must be given, or messages, and not both")
    if body.messages is not None and body.text_pair is not None:
        raise ParamError("text_pair", "needs input, not messages")
    field = "input" if body.messages is None else "messages"
    prompts = {field: ""} if body.input is None else split_prompts("input", body.input)
    pairs = None if body.text_pair is None else _pairs(prompts, body.text_pair)
    several = (field, prompts) if pairs is None else ("text_pair", pairs)
    tenant = check_number(server, request, several[0], len(several[1]))
    model, defaults = server.served(body.model)
    keep = kept_tokens(server, body.truncate_prompt_tokens, num_output=0)
    texts, special = server.texts.of(tenant), body.add_special_tokens is not False
    if pairs is not None:
        make = partial(pair_input, pooling=pooling, instruction=None, limit=keep)
        inputs = await pair_inputs(texts, pairs, make, keep)
    else:
        before = prompt_before(pooling, None)
        if body.messages is not None:  # the template writes special tokens
            before, special = "", False
            options = replace(body, add_generation_prompt=body.add_generation_prompt is True)
            prompts = {field: await conversation_text(texts, body.messages, options)}
        inputs = await pooled_inputs(texts, prompts, pooling, keep, before, special=special)
    outputs = await head_outputs(server, request, body, inputs, defaults.adapter)
    function = pooling.function if body.use_activation is not False else "none"

    def classified(index: int) -> Classification:
        probs = activated(outputs[index], function)
        return Classification(index, likeliest(probs, pooling.labels), probs, len(probs))

    answer = ClassificationList(
        id=f"classify-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=model,
        data=cast(list[Classification], LazyList(range(len(outputs)), classified, chunk=1)),
        usage=usage_of(inputs),
    )
    return await written(answer, len(outputs) * (1 + len(pooling.labels) // NUMBERS_EACH))


def _pairs(
    firsts: Mapping[str, SinglePrompt], second: str | list[str]
) -> dict[str, tuple[str, str]]:
    """Return pairs of texts, by their names in error messages."""
    seconds = [second] if isinstance(second, str) else second
    with rename_fields(prompt="input", text_1="input", text_2="text_pair"):
        pairs = paired([check_text(first) for first in firsts.values()], seconds)
    return {f"text_pair[{i}]": pair for i, pair in enumerate(pairs)}


routes = routes_of(classify)
