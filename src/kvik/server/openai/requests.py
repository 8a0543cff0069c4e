"""What the endpoints that generate share: prompts, sampling parameters, checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import Pin
from kvik.errors import Overflow, ParamError
from kvik.server.errors import rename_fields
from kvik.server.generation import GenerationRequest
from kvik.server.openai.fields import GenerationFields, aliased, parameters_of
from kvik.server.server import Server
from kvik.server.texts import Texts

PromptInput = str | Sequence[str | int | list[int]]
SinglePrompt = str | list[int]
MAX_CHOICES = 128  # prompts times n, in one request
_KINDS = {str: "a text", int: "a token id", list: "a list of token ids"}


def split_prompts(name: str, given: PromptInput) -> dict[str, SinglePrompt]:
    """Prompts by their names in errors: `name` alone, or `name[0]`, `name[1]`, ... of many.

    Raises:
        ParamError: one is empty, or they are of mixed kinds.
    """
    if isinstance(given, list) and len(set(map(type, given))) > 1:
        first = type(given[0])
        i = next(i for i, one in enumerate(given) if type(one) is not first)
        raise ParamError(f"{name}[{i}]", f"must be {_KINDS[first]}, as {name}[0] is")
    prompts: dict[str, SinglePrompt]
    if isinstance(given, str) or not given or isinstance(given[0], int):
        prompts = {name: given}  # type: ignore[dict-item]
    else:
        prompts = {f"{name}[{i}]": one for i, one in enumerate(given)}  # type: ignore[misc]
    for field, prompt in prompts.items():
        if not prompt:
            raise ParamError(field, "must not be empty")
    return prompts


def check_choices(name: str, num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise ParamError(
            name,
            f"{num_prompts} prompts with {n} choices each are {num_prompts * n} choices; a request "
            f"has at most {MAX_CHOICES}",
        )


async def all_prompt_ids(
    texts: Texts, prompts: Mapping[str, SinglePrompt], add_special_tokens: bool | None
) -> dict[str, list[int]]:
    """Token ids of each prompt, by its name in errors."""
    found = {}
    for field, prompt in prompts.items():
        with rename_fields(prompt=field):
            found[field] = await prompt_ids(texts, prompt, add_special_tokens)
    return found


async def prompt_ids(
    texts: Texts, prompt: SinglePrompt, add_special_tokens: bool | None = None
) -> list[int]:
    """Token ids of one prompt; to a text, special tokens are added unless that is not wanted."""
    if not isinstance(prompt, str):
        return prompt
    return await texts.encode(prompt, add_special_tokens is not False)


def asked_tokens(body: GenerationFields, newest: int | None = None) -> tuple[str, int | None]:
    """The field that limits the tokens of an answer, and its value.

    Args:
        newest: `max_completion_tokens`, which takes precedence.
    """
    if newest is not None:
        return "max_completion_tokens", newest
    asked: int | None = aliased(body, "max_tokens", "n_predict")
    return "max_tokens" if body.n_predict is None else "n_predict", asked


def sampling_changes(body: GenerationFields) -> dict[str, Any]:
    """What the body says of sampling, but for limits and log probabilities of the output."""
    changes = parameters_of(body)
    changes.pop("max_tokens", None)
    changes.pop("logprobs", None)
    return changes


def check_stream(body: GenerationFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise ParamError("stream_options", "needs stream to be true")


# Seconds for which a pinned prompt is kept after each use.
RETENTION = {"in_memory": 300.0, "5m": 300.0, "1h": 3600.0, "24h": 3600.0}
_DEFAULT = "in_memory"
MAX_LOGPROB_VALUES = 1 << 19


def generation_request(
    body: GenerationFields, prompt_ids: Sequence[int], params: SamplingParams, field: str
) -> GenerationRequest:
    """The request to generate from one prompt, which errors call `field`."""
    return GenerationRequest(
        prompt_token_ids=prompt_ids,
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        deadline_ms=body.deadline_ms,
        pins=_pins(body, len(prompt_ids)),
        field=field,
    )


def _pins(body: GenerationFields, num_tokens: int) -> tuple[Pin, ...]:
    """The whole prompt is pinned if the body names a cache key or a long retention."""
    retention = body.prompt_cache_retention
    if retention is not None and retention not in RETENTION:
        raise ParamError("prompt_cache_retention", f"must be one of {', '.join(RETENTION)}")
    if body.prompt_cache_key is None and retention in (None, _DEFAULT):
        return ()
    return (Pin(num_tokens, RETENTION[retention or _DEFAULT]),)


def check_output_fits(server: Server, num_prompt: int, asked: int | None, name: str) -> None:
    """Refuse output that does not fit behind the prompt, where the engine would give less.

    Raises:
        ParamError: it does not, though the prompt itself fits.
    """
    limit = server.max_model_len
    if asked is not None and num_prompt < limit < num_prompt + asked:
        raise ParamError(
            name,
            f"{asked} tokens do not fit behind a prompt of {num_prompt} tokens in the context of "
            f"{limit}: at most {limit - num_prompt} do",
            overflow=Overflow(limit, num_prompt, asked),
        )


def check_logprobs(
    server: Server,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    of_prompt: str,
    of: str,
) -> None:
    """Refuse more log probabilities than a response may have.

    Args:
        of_prompt, of: fields that ask for those of the prompts and of the output.

    Raises:
        ParamError: they are too many.
    """
    limit = server.max_model_len
    most = limit if params.max_tokens is None else params.max_tokens
    for name, top, num_tokens in (
        (of_prompt, params.prompt_logprobs, sum(map(len, prompts))),
        (of, params.logprobs, sum(params.n * min(most, limit - len(ids)) for ids in prompts)),
    ):
        if top is not None and num_tokens * (1 + top) > MAX_LOGPROB_VALUES:
            raise ParamError(
                name,
                f"would be up to {num_tokens * (1 + top)} values of {num_tokens} tokens; a request "
                f"has at most {MAX_LOGPROB_VALUES}",
            )
