"""Types of request fields. Their bounds are what the decoder enforces and what the schema says."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvik.core.sampling_params import (
    MAX_LIST_ENTRIES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
)
from kvik.errors import ParamError

MAX_INT32 = 2**31 - 1
TO_THE_END = -1  # tokens of output, as llama.cpp counts them
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LIST_ENTRIES)]
Name = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Limit = Annotated[
    int, Meta(ge=TO_THE_END, le=MAX_INT32, description=f"{TO_THE_END}: to the end of the context")
]
Temperature = Annotated[float, Meta(ge=0, le=100, description="0 is greedy; at least 0.001 else")]
Share = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]

# JSON has no integers as keys: the ids are strings there.
LogitBias = Annotated[
    dict[int, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(description=f"token id -> added to its logit; at most {MAX_LIST_ENTRIES}"),
]
BadWords = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)] | TokenIds],
    Meta(max_length=MAX_LIST_ENTRIES, description="words, or sequences of token ids"),
]
Number = Annotated[int, Meta(ge=1, le=MAX_N)]
Priority = Annotated[int, Meta(ge=-1000, le=1000, description="smaller is more urgent")]
# In Python "$" also matches before a line feed at the end.
CacheSalt = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:+/=-]{0,128}$(?!\n)")]
DeadlineMs = Annotated[int, Meta(ge=1, le=86_400_000)]
Prompt = Annotated[
    str | list[str | TokenId | list[TokenId]],
    Meta(description="a text, token ids, or a list of texts or of lists of token ids"),
]


def limit_of(asked: int) -> int | None:
    """A `Limit` as `SamplingParams` has it."""
    return None if asked == TO_THE_END else asked


class StreamOptions(Struct, kw_only=True):
    """How a stream tells of its usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage alone
    include_obfuscation: bool | None = None  # there is none, with either value


class Generating(Struct, kw_only=True):
    """What chats and completions have in common. null is as good as absent."""

    model: Name | None = None
    n: Number | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n_predict: Limit | None = None  # another name of it
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None  # another name of it
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    prompt_logprobs: Logprobs | None = None
    speculation: bool | None = None
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
