"""What the endpoints that generate share: prompts, sampling parameters, checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvik.core.sampling_params import (
    BIAS,
    COUNT,
    MAX_INT32,
    MAX_LIST_ENTRIES,
    MAX_LOGPROBS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    PARAMETERS,
    TOKEN_ID,
    LogitBias,
    SamplingParams,
    StopList,
    TokenIds,
    Words,
)
from kvik.core.structured import Structure
from kvik.core.types import Pin
from kvik.errors import Overflow, ParamError
from kvik.options import Flag, Integer, Kind, Number, Text
from kvik.server.errors import rename_fields
from kvik.server.generation import GenerationRequest
from kvik.server.server import Server
from kvik.server.structured import FIELDS, constraint_of
from kvik.server.texts import Texts
from kvik.server.tools import PLAIN_ANSWER, AnswerForm
from kvik.text.pooled_inputs import WHATEVER_FITS, truncation

# Fields of requests. The decoder enforces their bounds, and the schema shows them. The bounds of
# sampling parameters come from `PARAMETERS`.

TO_THE_END = -1  # number of output tokens; the value is llama.cpp's

Name = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=COUNT.low, le=COUNT.high)]
Limit = Annotated[
    int, Meta(ge=TO_THE_END, le=MAX_INT32, description=f"{TO_THE_END}: to the end of the context")
]
Truncation = Annotated[
    int,
    Meta(
        ge=WHATEVER_FITS,
        le=MAX_INT32,
        description="tokens of the prompt to keep, from its end; "
        f"{WHATEVER_FITS}: what fits into the context before the answer",
    ),
]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=TOKEN_ID.low, le=TOKEN_ID.high)]
TokenIdList = Annotated[list[TokenId], Meta(max_length=MAX_LIST_ENTRIES)]
Word = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)]
Priority = Annotated[int, Meta(ge=-1000, le=1000, description="smaller is more urgent")]
# In Python "$" also matches before a trailing line feed.
CacheSalt = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:+/=-]{0,128}$(?!\n)")]
DeadlineMs = Annotated[int, Meta(ge=1, le=86_400_000)]
Prompt = Annotated[
    str | list[str | TokenId | list[TokenId]],
    Meta(description="a text, token ids, or a list of texts or of lists of token ids"),
]


def json_type(kind: Kind) -> Any:
    """Return the JSON type of a kind of parameter, for msgspec to decode."""
    match kind:
        case Integer(low=low, high=high):
            return Annotated[int, Meta(ge=low, le=high)]
        case Number(low=low, high=high, above=above):
            return Annotated[float, Meta(gt=low, le=high) if above else Meta(ge=low, le=high)]
        case Flag():
            return bool
        case Text():
            return str
        case TokenIds():
            return TokenIdList
        case LogitBias():  # JSON keys cannot be integers, so the ids are strings
            return dict[int, Annotated[float, Meta(ge=BIAS.low, le=BIAS.high)]]
        case Words():
            return Annotated[list[Word | TokenIdList], Meta(max_length=MAX_LIST_ENTRIES)]
        case Structure():
            return dict[str, Any]
        case StopList():
            return Word | Annotated[list[Word], Meta(max_length=MAX_STOP_STRINGS)]
    raise TypeError(kind)


# Parameters omitted by APIs whose response is a single text in its own format.
UNSHOWN = (
    *("n", "logprobs", "prompt_logprobs", "prompt_logprobs_start", "logit_bias"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "include_stop_str_in_output"),
)


def parameters_struct(left_out: Collection[str] = (), base: type[Struct] = Struct) -> Any:
    """Return a Struct with a field for each sampling parameter and its alias: null, or a value that
    `SamplingParams` accepts.

    Args:
        left_out: parameters to omit.
        base: base class of the Struct.
    """
    made: list[tuple[str, Any, None]] = []
    for param in PARAMETERS.values():
        if param.name not in left_out:
            names = [param.name, param.facts["alias"]] if param.facts["alias"] else [param.name]
            kind: Any = Annotated[json_type(param.kind), Meta(description=param.help)] | None
            made += [(name, kind, None) for name in names]
    made += [(name, kind | None, None) for name, (kind, _) in FIELDS.items()]
    return msgspec.defstruct("Parameters", made, bases=(base,), kw_only=True, module=__name__)


def parameters_of(body: Struct) -> dict[str, Any]:
    """Return the sampling parameters that a request sets; null sets nothing.

    Raises:
        ParamError: a parameter and its alias contradict each other.
    """
    params = {}
    for name, alias in _parameters_in(type(body)):
        value = aliased(body, name, alias) if alias else getattr(body, name)
        if value is not None:
            params[name] = value
    params.pop("structured", None)  # under this name or another
    constraint = constraint_of(body)
    return params if constraint is None else {**params, "structured": constraint}


def adapter_field(body: Struct) -> str:
    """Return the field of a request that chooses its adapter."""
    names = (name for name, _ in _parameters_in(type(body)) if getattr(body, name))
    return "adapter" if "adapter" in names else "model"


@cache
def _parameters_in(kind: type[Struct]) -> tuple[tuple[str, str], ...]:
    """Return the names and aliases of the parameters that are fields of a request."""
    fields = set(kind.__struct_fields__)
    return tuple(
        (param.name, param.facts["alias"]) for param in PARAMETERS.values() if param.name in fields
    )


def limit_of(limit: int) -> int | None:
    """Convert a `Limit` to the value that `SamplingParams` uses."""
    return None if limit == TO_THE_END else limit


class StreamOptions(Struct, kw_only=True):
    """How a stream reports its usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # only with include_usage
    include_obfuscation: bool | None = None  # without effect: there is no obfuscation


class TreatmentFields(Struct, kw_only=True):
    """How the engine treats a request."""

    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    deadline_ms: DeadlineMs | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_retention: str | None = None


_PARAMETERS: Any = parameters_struct(("logprobs", "max_tokens"), TreatmentFields)


class GenerationFields(_PARAMETERS, Struct, kw_only=True):  # type: ignore[misc]
    """The fields that chats and completions share. null means the same as absent."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    n_predict: Limit | None = None  # another name for max_tokens
    truncate_prompt_tokens: Truncation | None = None
    return_token_ids: (
        Annotated[bool, Meta(description="also return token ids of prompts and answers")] | None
    ) = None
    return_tokens_as_token_ids: (
        Annotated[bool, Meta(description="log probabilities name tokens by their ids")] | None
    ) = None
    add_special_tokens: bool | None = None

    user: str | None = None  # this and the following fields do not affect the answer
    safety_identifier: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prediction: Any = None  # a guess at the answer, for speed


def aliased(body: msgspec.Struct, name: str, other: str) -> Any:
    """Return the value of a field that has two names; None if it has none.

    Raises:
        ParamError: the two values contradict each other.
    """
    value, other_value = getattr(body, name), getattr(body, other)
    if None not in (value, other_value) and value != other_value:
        raise ParamError(other, f"must be left out, or be {value} as {name} is, not {other_value}")
    return other_value if value is None else value


PromptInput = str | Sequence[str | int | list[int]]
SinglePrompt = str | list[int]
MAX_CHOICES = 128  # prompts times n, in one request


def split_prompts(name: str, value: PromptInput) -> dict[str, SinglePrompt]:
    """Return prompts by their names in errors: `name` for one, else `name[0]`, `name[1]`, ...

    Raises:
        ParamError: a prompt is empty, or token ids and prompts are mixed.
    """
    is_ids = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    for i, entry in enumerate(value if isinstance(value, list) else ()):
        if isinstance(entry, int) != is_ids:
            kind = "a token id" if is_ids else "a text or a list of token ids"
            raise ParamError(f"{name}[{i}]", f"must be {kind}, as {name}[0] is")
    prompts: dict[str, SinglePrompt]
    if isinstance(value, str) or not value or is_ids:
        prompts = {name: value}  # type: ignore[dict-item]
    else:
        prompts = {f"{name}[{i}]": entry for i, entry in enumerate(value)}  # type: ignore[misc]
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
    texts: Texts,
    prompts: Mapping[str, SinglePrompt],
    add_special_tokens: bool | None,
    keep: int | None,
) -> dict[str, list[int]]:
    """Return the token ids of each prompt, by its name in errors; see `prompt_ids`."""
    ids = {}
    for field, prompt in prompts.items():
        with rename_fields(prompt=field):
            ids[field] = await prompt_ids(texts, prompt, add_special_tokens, keep)
    return ids


async def prompt_ids(
    texts: Texts,
    prompt: SinglePrompt,
    add_special_tokens: bool | None = None,
    keep: int | None = None,
) -> list[int]:
    """Return the token ids of a prompt. Special tokens are added to a text, unless disabled.

    Args:
        keep: tokens to keep, from the end; None: all.
    """
    if not isinstance(prompt, str):
        return prompt if keep is None else prompt[-keep:]
    return await texts.encode(prompt, add_special_tokens is not False, keep)


def kept_tokens(server: Server, requested: int | None, num_output: int | None) -> int | None:
    """Return how many tokens of a prompt `truncate_prompt_tokens` keeps; None: all.

    Args:
        num_output: tokens of the answer that must fit after the prompt; None, `TO_THE_END`: one.

    Raises:
        ParamError: it would keep no token, or more than fit into the context.
    """
    num_output = 1 if num_output in (None, TO_THE_END) else num_output
    return truncation(requested, server.max_model_len, num_output)


def asked_tokens(body: Any, newest: int | None = None) -> tuple[str, int | None]:
    """Return the field that limits the tokens of an answer, and its value.

    Args:
        body: has `max_tokens` and `n_predict`.
        newest: `max_completion_tokens`, which takes precedence.
    """
    if newest is not None:
        return "max_completion_tokens", newest
    max_tokens: int | None = aliased(body, "max_tokens", "n_predict")
    return "max_tokens" if body.n_predict is None else "n_predict", max_tokens


def sampling_changes(body: GenerationFields) -> dict[str, Any]:
    """Return the body's sampling parameters, except the output's limit and log probabilities."""
    changes = parameters_of(body)
    changes.pop("max_tokens", None)
    changes.pop("logprobs", None)
    return changes


def check_stream(body: GenerationFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise ParamError("stream_options", "needs stream to be true")


# How many seconds a pinned prompt is kept after each use.
RETENTION = {"in_memory": 300.0, "5m": 300.0, "1h": 3600.0, "24h": 3600.0}
_DEFAULT = "in_memory"
MAX_LOGPROB_VALUES = 1 << 19


def generation_request(
    body: TreatmentFields,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    field: str,
    form: AnswerForm = PLAIN_ANSWER,
) -> GenerationRequest:
    """Return the request to generate from one prompt, which errors call `field`."""
    return GenerationRequest(
        prompt_token_ids=prompt_ids,
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        deadline_ms=body.deadline_ms,
        pins=_pins(body, len(prompt_ids)),
        field=field,
        adapter_field=adapter_field(body),
        chat=form is not PLAIN_ANSWER,
        marks=form.marks,
        unenforced=() if form.use is None else form.use.unenforced,
    )


def _pins(body: TreatmentFields, num_tokens: int) -> tuple[Pin, ...]:
    """Return a pin of the whole prompt if the body sets a cache key or a long retention."""
    retention = body.prompt_cache_retention
    if retention is not None and retention not in RETENTION:
        raise ParamError("prompt_cache_retention", f"must be one of {', '.join(RETENTION)}")
    if body.prompt_cache_key is None and retention in (None, _DEFAULT):
        return ()
    return (Pin(num_tokens, RETENTION[retention or _DEFAULT]),)


def check_output_fits(server: Server, num_prompt: int, num_output: int | None, name: str) -> None:
    """Raise ParamError if the prompt fits and the output does not; the engine would shorten it."""
    limit = server.max_model_len
    if num_output is not None and num_prompt < limit < num_prompt + num_output:
        raise ParamError(
            name,
            f"{num_output} tokens do not fit after a prompt of {num_prompt} tokens in the context "
            f"of {limit}: at most {limit - num_prompt} do",
            overflow=Overflow(limit, num_prompt, num_output),
        )


def check_logprobs(
    server: Server,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    of_prompt: str,
    of: str,
) -> None:
    """Refuse a request for more log probabilities than a response may have.

    Args:
        of_prompt, of: names of the fields that request them for the prompts and for the output.

    Raises:
        ParamError: there would be too many.
    """
    limit = server.max_model_len
    max_tokens = limit if params.max_tokens is None else params.max_tokens
    for name, top, num_tokens in (
        (of_prompt, params.prompt_logprobs, sum(map(len, prompts))),
        (of, params.logprobs, sum(params.n * min(max_tokens, limit - len(ids)) for ids in prompts)),
    ):
        if top is not None and num_tokens * (1 + top) > MAX_LOGPROB_VALUES:
            raise ParamError(
                name,
                f"would be up to {num_tokens * (1 + top)} values of {num_tokens} tokens; a request "
                f"has at most {MAX_LOGPROB_VALUES}",
            )
