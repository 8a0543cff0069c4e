"""The engine of this process as the one who answers in a chat."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from kvik.cli.chat_backend import Facts, Messages
from kvik.cli.report import stats_line
from kvik.core.sampling_params import SamplingParams
from kvik.errors import KvikError, ParamError

if TYPE_CHECKING:
    from kvik.llm import LLM, Stream


class LocalBackend:
    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.params = params
        self._llm = llm
        self._limit = llm.resolved.scheduler.max_model_len

    def answer(self, messages: Messages) -> LocalAnswer:
        asked = [dict(message) for message in messages]
        try:
            return LocalAnswer(self._llm.stream_chat(asked, self.params), self._limit)
        except ParamError as error:
            first = not any(message["role"] == "assistant" for message in messages)
            if error.field != "prompt" or first:
                raise
            message = (
                f"the conversation outgrew the context of {self._limit} tokens; /reset starts over"
            )
            raise ParamError("prompt", message) from None

    def stats(self) -> str:
        stats = self._llm.stats()
        return (
            f"engine: {stats.steps} steps, {stats.delivered_tokens} tokens, "
            f"prefix-cache hit {stats.prefix_hit_rate:.0%}, {stats.cached_blocks} of "
            f"{stats.num_blocks} blocks cached, {stats.preemptions} preemptions"
        )


class LocalAnswer:
    """`limit`: tokens of the context."""

    def __init__(self, stream: Stream, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    def __enter__(self) -> LocalAnswer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[str]:
        for delta in self._stream:
            yield delta.text
        output = self._stream.output
        if output is not None and output.outputs[0].finish_reason == "error":
            raise KvikError("request", output.outputs[0].error or "failed")

    @property
    def facts(self) -> Facts | None:
        output = self._stream.output
        if output is None:
            return None
        (completion,) = output.outputs
        used = len(output.prompt_token_ids) + len(completion.token_ids)
        note = ""
        if completion.finish_reason == "length" and used >= self._limit:
            note = f"the context of {self._limit} tokens is full; /reset starts over"
        elif completion.finish_reason == "length":
            note = "cut at max_tokens"
        return Facts(stats_line(output), note)
