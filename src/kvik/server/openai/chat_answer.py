"""Answers of /v1/chat/completions: in one piece, and as a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from kvik.core.types import TokenLogprobs
from kvik.engine.output import CompletionOutput, RequestOutput, TextDelta
from kvik.server.openai.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Usage,
)
from kvik.server.openai.chat_request import ChatRequest
from kvik.server.openai.heading import FINGERPRINT, Heading
from kvik.server.openai.tokens import TokenNames
from kvik.server.openai.usage import usage_of, usage_so_far
from kvik.server.pieces import encoded
from kvik.server.sse import DONE, Template, event, json_event

_HOLE = "\ue000text\ue000"


def whole(
    heading: Heading, body: ChatRequest, names: TokenNames, output: RequestOutput
) -> ChatCompletion:
    """Of a finished request."""
    asked = body.prompt_logprobs is not None and output.prompt_logprobs is not None
    return ChatCompletion(
        id=heading.id,
        created=heading.created,
        model=heading.model,
        choices=[_choice(body, names, one) for one in output.completions],
        usage=usage_of([output]),
        system_fingerprint=FINGERPRINT,
        prompt_logprobs=names.prompt(output.prompt_logprobs or []) if asked else UNSET,
    )


def _choice(body: ChatRequest, names: TokenNames, one: CompletionOutput) -> ChatChoice:
    return ChatChoice(
        index=one.index,
        message=AnswerMessage(one.text),
        logprobs=names.whole_chat(one.logprobs or []) if body.logprobs else None,
        finish_reason=one.finish_reason,
        stop_reason=one.stop_reason,
    )


class ChatStream:
    """Deltas -> events. Each completion begins with its role and ends with its finish reason."""

    def __init__(
        self, heading: Heading, body: ChatRequest, names: TokenNames, prompt_tokens: int
    ) -> None:
        options = body.stream_options
        self._heading = heading
        self._names = names
        self._logprobs = bool(body.logprobs)
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._final_usage = options is not None and bool(options.include_usage)
        self._each_usage = (
            self._final_usage and options is not None and bool(options.continuous_usage_stats)
        )
        self._num_prompt_tokens = prompt_tokens
        self._num_tokens = 0
        self._templates: dict[int, Template] = {}  # of the completions that have begun

    def begin(self) -> bytes:
        return b""

    def grow(self, position: int, deltas: Sequence[TextDelta]) -> bytes:
        """`position` is 0: a chat has one prompt."""
        return b"".join(one for delta in deltas for one in self._events(delta))

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        usage = json_event(self._chunk([], usage_of(outputs))) if self._final_usage else b""
        return usage + DONE

    def _events(self, delta: TextDelta) -> Iterator[bytes]:
        self._num_tokens += len(delta.token_ids)
        if delta.index not in self._templates:
            self._templates[delta.index] = self._template(delta.index)
            first = self._chunk_of(ChunkChoice(delta.index, Delta(role="assistant", content="")))
            if self._prompt_logprobs and delta.prompt_logprobs is not None:
                first.prompt_logprobs = self._names.prompt(delta.prompt_logprobs)
            yield event(encoded(first))
        logprobs = self._shown(delta.logprobs)
        if logprobs is not None or (delta.text and self._each_usage):
            yield self._event(ChunkChoice(delta.index, Delta(content=delta.text), logprobs))
        elif delta.text:
            yield self._templates[delta.index].fill(delta.text)
        if delta.finish_reason is not None:
            yield self._event(
                ChunkChoice(
                    delta.index,
                    Delta(),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )

    def _shown(self, logprobs: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        return self._names.chat(logprobs) if self._logprobs and logprobs else None

    def _template(self, index: int) -> Template:
        usage = None if self._final_usage else UNSET
        return Template(self._chunk([ChunkChoice(index, Delta(content=_HOLE))], usage), [_HOLE])

    def _event(self, choice: ChunkChoice) -> bytes:
        return json_event(self._chunk_of(choice))

    def _chunk_of(self, choice: ChunkChoice) -> ChatChunk:
        usage: Usage | UnsetType | None = None if self._final_usage else UNSET
        if self._each_usage:
            usage = usage_so_far(self._num_prompt_tokens, self._num_tokens)
        return self._chunk([choice], usage)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._heading.id,
            created=self._heading.created,
            model=self._heading.model,
            choices=choices,
            usage=usage,
            system_fingerprint=FINGERPRINT,
        )
