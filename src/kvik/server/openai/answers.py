"""The bodies of answers, field by field as clients of the OpenAI API read them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from kvik.server.speculation import Speculation


class PromptDetails(Struct):
    cached_tokens: int  # found in the prefix cache


class CompletionDetails(Struct):
    """Of the tokens guessed ahead, by speculation."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """`speculation` is no field of OpenAI's: it is there where the engine guesses ahead."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    speculation: Speculation | UnsetType = UNSET


class TopLogprob(Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, gc=False):
    """`bytes` is what the token adds to the text; `token` the same, escaped if it is no UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """One entry for each token; the first of a prompt has no log probability."""

    text_offset: list[int]  # where in `text` each token begins, in characters
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class PromptLogprob(Struct, gc=False):
    logprob: float
    rank: int | None  # 1 is the most likely
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id


class AnswerMessage(Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None  # the stop string or stop id that ended it


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Struct, kw_only=True):
    """`usage`: absent unless it was asked for; null then, but in chunks that have it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # in the first chunk


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """An answer, or a chunk of a stream of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


class Embedding(Struct):
    index: int
    embedding: list[float] | str  # or base64 of little-endian fp32
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Model(Struct, kw_only=True):
    """A served model, in the fields of OpenAI's API and of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: int  # seconds since 1970
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # RFC 3339
    owned_by: str = "kvik"
    root: str
    parent: None = None
    max_model_len: int


class Models(Struct, kw_only=True):
    """All served models: one page, in the fields of both APIs."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool = False
    first_id: str
    last_id: str


class Tokenized(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    prompt: str


class TokenizerInfo(Struct, kw_only=True):
    """What a client needs to count and to render as this server does."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    vocab_size: int
    max_model_len: int
    special_tokens: list[str]
