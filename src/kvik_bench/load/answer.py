"""One streamed answer of an OpenAI-compatible server, read into a record."""

from __future__ import annotations

import msgspec

from kvik.cli.openai_stream import Choice, Chunk, Event, EventTooLarge, SseParser, Usage
from kvik_bench.load.records import RequestRecord

MAX_DETAIL = 200  # characters kept of what a server says about an error


class BrokenAnswer(Exception):
    """An answer that cannot count."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail[:MAX_DETAIL]


class AnswerReader:
    """Fed with the bytes of a stream, it stamps each chunk of output into the record.

    Tokens are counted by the server's own `usage` where it is sent with each chunk. Else a chunk
    counts as one token, and the sum is compared with the usage at the end.
    """

    def __init__(self, record: RequestRecord, decoder: msgspec.json.Decoder[Chunk]) -> None:
        self._record = record
        self._decode = decoder.decode
        self._sse = SseParser()
        self._texts: list[str] = []
        self._usage: Usage | None = None
        self._running = False  # counts come with the chunks, not only after them
        self._counted = 0  # tokens recorded so far
        self._finish: float | None = None
        self._finish_was_empty = False
        self.done = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that arrived at `now`. Raises `BrokenAnswer`."""
        try:
            events = self._sse.feed(data)
        except EventTooLarge as error:
            raise BrokenAnswer("bad chunk", str(error)) from None
        for event in events:
            if event.data == b"[DONE]":
                self.done = True
            elif not self.done:
                self._take(event, now)

    def end(self) -> None:
        """The stream is over: settle the counts. Raises `BrokenAnswer`."""
        record, usage = self._record, self._usage
        if not self.done:
            raise BrokenAnswer("no [DONE]", "the stream ended early")
        if not record.times:
            raise BrokenAnswer("empty answer", "no output came")
        if usage is not None and usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens
        if usage is not None and usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage is None or usage.completion_tokens is None:
            record.assumed = True
        else:
            # An end-of-text token has no text; it came with the finish reason.
            if self._finish_was_empty and usage.completion_tokens == self._counted + 1:
                self._record_output(self._finish or record.times[-1], 1)
            record.output_tokens = usage.completion_tokens
        record.finished = record.times[-1] if self._finish is None else self._finish

    def _take(self, event: Event, now: float) -> None:
        if event.name == b"error":
            raise BrokenAnswer("error event", event.data.decode(errors="replace"))
        try:
            chunk = self._decode(event.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise BrokenAnswer("bad chunk", event.data.decode(errors="replace")) from None
        if bytes(chunk.error) != b"null":
            raise BrokenAnswer("error event", bytes(chunk.error).decode(errors="replace"))
        total = None
        if chunk.usage is not None:
            self._usage, total = chunk.usage, chunk.usage.completion_tokens
        for choice in chunk.choices or ():
            self._take_choice(choice, total, now)

    def _take_choice(self, choice: Choice, total: int | None, now: float) -> None:
        """`total`: tokens of the answer until now, where the server tells."""
        has_output, ends = self._has_output(choice), choice.finish_reason is not None
        if ends and self._finish is None:
            self._finish = now
            self._finish_was_empty = not has_output
        # Told at the end alone it is no running count, unless there was no chunk before.
        self._running |= bool(total) and not (ends and self._counted)
        if not (total and self._running):
            if has_output:
                self._record_output(now, 1)
        elif not self._counted:
            if has_output:
                self._record_output(now, total)
        elif total > self._counted and (has_output or ends):
            self._record_output(now, total - self._counted)

    def _has_output(self, choice: Choice) -> bool:
        text, delta = choice.text, choice.delta
        if delta is not None:
            text = delta.content
            if delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls:
                if text:
                    self._texts.append(text)
                return True
        if not text:
            return False
        self._texts.append(text)
        return True

    def _record_output(self, now: float, tokens: int) -> None:
        self._record.chunk(now, tokens)
        self._counted += tokens
