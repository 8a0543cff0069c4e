"""Answers of /v1/messages: in one piece, and as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvik.core.types import PromptUse
from kvik.engine.output import RequestOutput, TextDelta
from kvik.server.anthropic.message_answer import Answer, StopReason, TextBlock
from kvik.server.anthropic.usage import Meter
from kvik.server.generation import Generation
from kvik.server.sse import Template, json_event

PING = json_event({"type": "ping"}, "ping")
_HOLE = "\ue000text\ue000"
_START = json_event(
    {"type": "content_block_start", "index": 0, "content_block": TextBlock("")},
    "content_block_start",
)
_TEXT = Template(
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": _HOLE},
    },
    [_HOLE],
    "content_block_delta",
)
_STOP = json_event({"type": "content_block_stop", "index": 0}, "content_block_stop")
_END = json_event({"type": "message_stop"}, "message_stop")


@dataclass(frozen=True, slots=True)
class Heading:
    """What an answer needs beside its text.

    Attributes:
        stop_sequences: that the caller named.
        max_model_len: of prompt and answer together.
        silent: the prompt is computed for the cache, and nobody wants an answer.
    """

    id: str
    model: str
    meter: Meter
    stop_sequences: Sequence[str]
    max_model_len: int
    silent: bool = False

    def whole(self, output: RequestOutput) -> Answer:
        """Of a finished request."""
        used = PromptUse(output.num_cached_tokens, output.num_pinned_tokens)
        if self.silent:
            return replace(self.begun(used), stop_reason="max_tokens")
        reason, sequence = self._stop(output)
        return Answer(
            id=self.id,
            model=self.model,
            content=[TextBlock(output.text)],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self.meter.usage(used, output.num_output_tokens),
        )

    def begun(self, used: PromptUse | None) -> Answer:
        """Of one that has no text yet."""
        return Answer(
            id=self.id,
            model=self.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self.meter.usage(used, 0),
        )

    def _stop(self, output: RequestOutput) -> tuple[StopReason, str | None]:
        end = output.completions[0]
        if isinstance(end.stop_reason, str) and end.stop_reason in self.stop_sequences:
            return "stop_sequence", end.stop_reason
        if end.finish_reason != "length":
            return "end_turn", None
        if self.meter.num_prompt + output.num_output_tokens >= self.max_model_len:
            return "model_context_window_exceeded", None
        return "max_tokens", None


class MessageStream:
    """Deltas -> events: one block of text, between the beginning and the end of a message."""

    def __init__(self, heading: Heading, generation: Generation) -> None:
        self._heading = heading
        self._generation = generation

    def begin(self) -> bytes:
        message = self._heading.begun(self._generation.prompt_use)
        start = json_event({"type": "message_start", "message": message}, "message_start")
        return start + (PING if self._heading.silent else _START + PING)

    def grow(self, position: int, deltas: Sequence[TextDelta]) -> bytes:
        """`position` is 0, and there is one completion."""
        if self._heading.silent:
            return b""
        return b"".join(_TEXT.fill(delta.text) for delta in deltas if delta.text)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        answer = self._heading.whole(outputs[0])
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence},
            "usage": answer.usage,
        }
        stop = b"" if self._heading.silent else _STOP
        return stop + json_event(delta, "message_delta") + _END
