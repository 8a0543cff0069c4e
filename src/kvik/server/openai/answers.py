"""Parts that all responses share: head, usage, tokens and log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, cast

from msgspec import UNSET, Struct, UnsetType

from kvik import __version__
from kvik.core.types import TokenLogprobs
from kvik.engine.output import RequestOutput
from kvik.server.openai.requests import StreamOptions
from kvik.server.responses import DONE, LazyList, json_event
from kvik.text.tokenizer import Tokenizer

FINGERPRINT = f"kvik-{__version__}"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """`id`, `model` and creation time (in whole seconds since 1970) of a response."""

    id: str
    model: str
    created: int


class Speculation(Struct, kw_only=True):
    """Statistics of speculation for an answer, over all its choices.

    A check is a step that verified drafts of a choice. The position of a draft is the number of
    drafts before it, or in a tree its depth.

    Attributes:
        checks: number of checks.
        drafted_per_position: [i] number of checks with a draft at position i.
        accepted_per_position: [i] number of checks that accepted that draft and all before it.
        mean_accepted_length: tokens per check, including the model's own. null: there was no check.
        speedup: how much faster the tokens came than without speculation, estimated from the
            times of steps with and without drafts. null: not known.
    """

    checks: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    mean_accepted_length: float | None
    speedup: float | None


def speculation_of(outputs: Sequence[RequestOutput]) -> Speculation | UnsetType:
    """Return the statistics of finished requests together; unset without speculation."""
    parts = [part for output in outputs if (part := output.speculation) is not None]
    if not parts:
        return UNSET
    figures = reduce(add, parts).figures()
    rounded: dict[str, Any] = {
        n: round(x, 4) if isinstance(x, float) else x for n, x in figures.items()
    }
    return Speculation(**rounded)


class PromptDetails(Struct):
    cached_tokens: int  # found in the prefix cache
    cache_write_tokens: int  # computed and pinned


class CompletionDetails(Struct):
    """Counts of speculative drafts and of thought tokens."""

    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """Token counts. `speculation` is not an OpenAI field; it is present if the engine
    speculates."""

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
    """`bytes` is what the token adds to the text; `token` is the same, escaped if not UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Struct, gc=False):
    logprob: float
    rank: int | None  # 1 is the most likely
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id


def usage_of(
    outputs: Sequence[RequestOutput], count_thoughts: Callable[[Sequence[int]], int] | None = None
) -> Usage:
    """Return the usage of finished requests. A prompt counts once, whatever its `n`.

    Args:
        count_thoughts: counts the thought tokens among an answer's token ids; None: no thoughts.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(output.num_output_tokens for output in outputs)
    drafted = sum(output.num_drafted_tokens for output in outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    details: CompletionDetails | UnsetType = UNSET
    if drafted:
        details = CompletionDetails(accepted, drafted - accepted)
    if count_thoughts is not None:
        details = details or CompletionDetails()
        details.reasoning_tokens = sum(
            count_thoughts(part.token_ids) for output in outputs for part in output.outputs
        )
    return Usage(
        prompt,
        completion,
        prompt + completion,
        PromptDetails(
            sum(output.num_cached_tokens for output in outputs),
            sum(output.num_pinned_tokens for output in outputs),
        ),
        details,
        speculation_of(outputs),
    )


LEAST = -9999.0  # JSON has no minus infinity


class TokenNames:
    """The text of single tokens; their ids without a tokenizer or with `by_id`."""

    def __init__(self, tokenizer: Tokenizer | None, *, by_id: bool = False) -> None:
        self.tokenizer = tokenizer
        self._by_id = by_id

    def bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token adds to a text; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.token_bytes(token)

    def name(self, token: int, escape: str = "") -> str:
        """Return a token's text; if it is not UTF-8 by itself, `escape` and its bytes as \\xHH."""
        data = None if self._by_id else self.bytes(token)
        if data is None:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return escape + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return the log probabilities of a few output tokens, in order."""
        return ChatLogprobs([self._chat_token(entry) for entry in logprobs])

    def whole_chat(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return those of all output tokens, created while `encode_in_chunks` encodes them."""
        return ChatLogprobs(cast(list[TokenLogprob], LazyList(logprobs, self._chat_token)))

    def _chat_token(self, entry: TokenLogprobs) -> TokenLogprob:
        top = [
            TopLogprob(self.name(token), finite(value), self._numbers(token))
            for token, value in entry.top
        ]
        token = entry.token_id
        return TokenLogprob(self.name(token), finite(entry.logprob), self._numbers(token), top)

    def _numbers(self, token: int) -> list[int] | None:
        data = self.bytes(token)
        return None if data is None else list(data)

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """Return them by token id, the prompt's token first; created while `encode_in_chunks`
        runs."""
        return cast(PromptLogprobs, LazyList(logprobs, self._prompt_token))

    def _prompt_token(self, entry: TokenLogprobs | None) -> dict[str, PromptLogprob] | None:
        if entry is None:
            return None
        by_id = {
            str(entry.token_id): PromptLogprob(
                finite(entry.logprob), entry.rank, self.name(entry.token_id)
            )
        }
        for rank, (token, value) in enumerate(entry.top, start=1):
            by_id.setdefault(str(token), PromptLogprob(finite(value), rank, self.name(token)))
        return by_id


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


class Chunks:
    """Makes the chunks of a stream, with the usage that `stream_options` requests.

    Args:
        kind: type of the chunks.
        num_prompt_tokens: of all prompts.
        count_thoughts: see `usage_of`.
    """

    def __init__(
        self,
        head: ResponseHead,
        kind: Callable[..., Struct],
        options: StreamOptions | None,
        num_prompt_tokens: int,
        count_thoughts: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self._head, self._kind = head, kind
        self._count_thoughts = count_thoughts
        self._final = options is not None and bool(options.include_usage)  # the last has it
        # All chunks have the usage so far.
        self.with_usage = self._final and bool(options and options.continuous_usage_stats)
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, 0

    def count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def chunk(self, choices: list[Any], usage: Usage | None = None) -> Any:
        """Return a chunk. Without usage, it is null if the last chunk has it."""
        return self._kind(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage or (None if self._final else UNSET),
            system_fingerprint=FINGERPRINT,
        )

    def of(self, choice: Struct) -> Any:
        """Return the chunk of a choice."""
        prompt, completion = self._num_prompt_tokens, self._num_tokens
        usage = Usage(prompt, completion, prompt + completion) if self.with_usage else None
        return self.chunk([choice], usage)

    def event(self, choice: Struct) -> bytes:
        return json_event(self.of(choice))

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the end of the stream."""
        usage = usage_of(outputs, self._count_thoughts) if self._final else None
        return DONE if usage is None else json_event(self.chunk([], usage)) + DONE
