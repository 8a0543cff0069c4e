"""Fields of requests. Their bounds are what the decoder enforces and what the schema says; those of
sampling parameters come from `PARAMETERS`."""

from __future__ import annotations

from collections.abc import Collection
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
    StopList,
    TokenIds,
    Words,
)
from kvik.errors import ParamError
from kvik.options import Flag, Integer, Kind, Number

TO_THE_END = -1  # tokens of output, as llama.cpp counts them

Name = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=COUNT.low, le=COUNT.high)]
Limit = Annotated[
    int, Meta(ge=TO_THE_END, le=MAX_INT32, description=f"{TO_THE_END}: to the end of the context")
]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=TOKEN_ID.low, le=TOKEN_ID.high)]
TokenIdList = Annotated[list[TokenId], Meta(max_length=MAX_LIST_ENTRIES)]
Word = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)]
Priority = Annotated[int, Meta(ge=-1000, le=1000, description="smaller is more urgent")]
# In Python "$" also matches before a line feed at the end.
CacheSalt = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:+/=-]{0,128}$(?!\n)")]
DeadlineMs = Annotated[int, Meta(ge=1, le=86_400_000)]
Prompt = Annotated[
    str | list[str | TokenId | list[TokenId]],
    Meta(description="a text, token ids, or a list of texts or of lists of token ids"),
]


def json_type(kind: Kind) -> Any:
    """What JSON has for a kind of parameter, as msgspec decodes it."""
    match kind:
        case Integer(low=low, high=high):
            return Annotated[int, Meta(ge=low, le=high)]
        case Number(low=low, high=high, above=above):
            return Annotated[float, Meta(gt=low, le=high) if above else Meta(ge=low, le=high)]
        case Flag():
            return bool
        case TokenIds():
            return TokenIdList
        case LogitBias():  # JSON has no integers as keys: the ids are strings there
            return dict[int, Annotated[float, Meta(ge=BIAS.low, le=BIAS.high)]]
        case Words():
            return Annotated[list[Word | TokenIdList], Meta(max_length=MAX_LIST_ENTRIES)]
        case StopList():
            return Word | Annotated[list[Word], Meta(max_length=MAX_STOP_STRINGS)]
    raise TypeError(kind)


def parameters_struct(left_out: Collection[str] = ()) -> Any:
    """A Struct with a field for each sampling parameter and its alias, null or as `SamplingParams`
    takes it.

    Args:
        left_out: parameters that it lacks.
    """
    made: list[tuple[str, Any, None]] = []
    for one in PARAMETERS.values():
        if one.name not in left_out:
            names = [one.name, one.facts["alias"]] if one.facts["alias"] else [one.name]
            kind: Any = Annotated[json_type(one.kind), Meta(description=one.help)] | None
            made += [(name, kind, None) for name in names]
    return msgspec.defstruct("Parameters", made, kw_only=True, module=__name__)


def parameters_of(body: Struct) -> dict[str, Any]:
    """The sampling parameters that a request gives; null gives none.

    Raises:
        ParamError: a parameter and its alias contradict each other.
    """
    found = {}
    for name, alias in _parameters_in(type(body)):
        value = aliased(body, name, alias) if alias else getattr(body, name)
        if value is not None:
            found[name] = value
    return found


@cache
def _parameters_in(kind: type[Struct]) -> tuple[tuple[str, str], ...]:
    """Names and aliases of the parameters that are fields of a request."""
    known = set(kind.__struct_fields__)
    return tuple((one.name, one.facts["alias"]) for one in PARAMETERS.values() if one.name in known)


def limit_of(asked: int) -> int | None:
    """A `Limit` as `SamplingParams` has it."""
    return None if asked == TO_THE_END else asked


class StreamOptions(Struct, kw_only=True):
    """How a stream tells of its usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage alone
    include_obfuscation: bool | None = None  # there is none, with either value


_PARAMETERS: Any = parameters_struct(left_out=("logprobs",))


class GenerationFields(_PARAMETERS, Struct, kw_only=True):  # type: ignore[misc]
    """What chats and completions have in common. null is as good as absent."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n_predict: Limit | None = None  # another name of max_tokens
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    deadline_ms: DeadlineMs | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_retention: str | None = None

    user: str | None = None  # these change nothing in the answer
    safety_identifier: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prediction: Any = None  # a guess at the answer, for speed


def aliased(body: msgspec.Struct, name: str, other: str) -> Any:
    """The value of a field that has two names; None if it has none.

    Raises:
        ParamError: they contradict each other.
    """
    value, same = getattr(body, name), getattr(body, other)
    if None not in (value, same) and value != same:
        raise ParamError(other, f"must be left out, or be {value} as {name} is, not {same}")
    return same if value is None else value
