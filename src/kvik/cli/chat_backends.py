"""The two backends of `kvik chat`: an engine in this process, or a server at a URL."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvik.cli.openai_stream import (
    Chunk,
    Event,
    EventTooLarge,
    SseParser,
    StreamedDelta,
    StreamedUsage,
    error_message,
)
from kvik.cli.report import kv_format, stats_line
from kvik.config.model_source import model_name
from kvik.core.sampling_params import SamplingParams
from kvik.errors import ConfigError, KvikError, ParamError
from kvik.remote_server import RemoteServer

if TYPE_CHECKING:
    from kvik.config.config import ResolvedConfig
    from kvik.llm import LLM, Stream


Messages = Sequence[Mapping[str, str]]  # each with role and content, the oldest first


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a finished answer."""

    figures: str  # tokens and times, in one line
    note: str = ""  # why the answer was cut short; empty if it was not


class LocalBackend:
    """Answers with an engine in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.params = params
        # The model and its main settings, to show before the first message.
        self.banner = _banner(llm.resolved)
        self._llm = llm
        self._limit = llm.resolved.scheduler.max_model_len

    def answer(self, messages: Messages) -> LocalAnswer:
        """Begin to answer; raises `KvikError` if these messages cannot be answered."""
        conversation = [dict(message) for message in messages]
        try:
            return LocalAnswer(self._llm.stream_chat(conversation, self.params), self._limit)
        except ParamError as error:
            first = not any(message["role"] == "assistant" for message in messages)
            if error.field != "prompt" or first:
                raise
            message = (
                f"the conversation outgrew the context of {self._limit} tokens; /reset starts over"
            )
            raise ParamError("prompt", message) from None

    def stats(self) -> str:
        """Describe the backend in one line."""
        stats = self._llm.stats()
        return (
            f"engine: {stats.steps} steps, {stats.delivered_tokens} tokens, "
            f"prefix-cache hit {stats.prefix_hit_rate:.0%}, {stats.cached_blocks} of "
            f"{stats.num_blocks} blocks cached, {stats.preemptions} preemptions"
        )


def _banner(resolved: ResolvedConfig) -> str:
    runner, spec = resolved.runner, resolved.model
    stored = spec.built or spec.quantization or runner.dtype
    weights = stored if runner.quantization == "none" else runner.quantization
    return (
        f"{model_name(Path(runner.model_path))}: weights in {weights}, KV cache in "
        f"{kv_format(resolved)}, a context of {resolved.scheduler.max_model_len:,} tokens, on "
        f"{runner.device}"
    )


class LocalAnswer:
    """One answer of the engine, read inside its `with`; leaving the block stops the answer.

    Args:
        limit: tokens of the context.
    """

    def __init__(self, stream: Stream, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    def __enter__(self) -> LocalAnswer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.__exit__(*exception)

    def __iter__(self) -> Iterator[str]:
        """Yield chunks of text; raises `KvikError` if the answer failed and must not be kept."""
        for delta in self._stream:
            yield delta.text
        output = self._stream.output
        if output is not None and output.outputs[0].finish_reason == "error":
            raise KvikError("request", output.outputs[0].error or "failed")

    @property
    def facts(self) -> Facts | None:
        """None if the answer did not end."""
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


CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 600.0  # until the next bytes: a long prompt on a slow machine takes minutes
PIECE_BYTES = 65536
MAX_BODY_BYTES = 1 << 20  # of an unstreamed response
MAX_MESSAGE = 300  # characters shown of a server's error message

# Some servers do not know this option and refuse requests with it.
COUNTED: Mapping[str, object] = {"stream_options": {"include_usage": True}}


def _send(
    server: RemoteServer,
    connection: HTTPConnection,
    method: str,
    route: str,
    body: bytes | None = None,
) -> HTTPResponse:
    """Send a request and return the response, with its body unread.

    Raises:
        ConfigError: the server cannot be reached.
        OSError, HTTPException: it can be reached, but does not answer.
    """
    headers = {"Content-Type": "application/json", "User-Agent": "kvik chat", **server.headers}
    try:
        connection.connect()
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise ConfigError("url", f"{server.url} cannot be reached: {error}") from None
    connection.sock.settimeout(SILENCE_SECONDS)
    connection.request(method, server.target("/v1" + route), body, headers)
    return connection.getresponse()


def first_model(server: RemoteServer) -> str:
    """Return the first model that the server lists.

    Raises:
        ConfigError: it cannot be reached, refuses, or lists none.
    """
    connection = server.connection(CONNECT_SECONDS)
    try:
        response = _send(server, connection, "GET", "/models")
        body = response.read(MAX_BODY_BYTES)
    except (OSError, HTTPException) as error:
        raise ConfigError("url", f"{server.url} does not answer: {_reason(error)}") from None
    finally:
        connection.close()
    if response.status in (401, 403):
        raise ConfigError("api_key", f"HTTP {response.status}: {_message(body)}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        message = f"must be given with --model: {server.url} does not list its models"
        raise ConfigError("model", message) from None


class RemoteBackend:
    """Answers through a server with an OpenAI-compatible API.

    Args:
        sampling: fields of a request that differ from the server's own defaults.
    """

    def __init__(self, server: RemoteServer, model: str, sampling: Mapping[str, object]) -> None:
        self._server = server
        self.banner = f"{model} of {server.url}"
        self._fields = {"model": model, "stream": True, **sampling}
        self._model = model

    def answer(self, messages: Messages) -> RemoteAnswer:
        return RemoteAnswer(self._server, {**self._fields, "messages": list(messages)})

    def stats(self) -> str:
        return f"server: {self._server.url}, model {self._model}"


Backend = LocalBackend | RemoteBackend


class RemoteAnswer:
    """One request on its own connection. It is sent when the first chunk is read, so that Ctrl-C
    also ends the wait for it."""

    def __init__(self, server: RemoteServer, fields: Mapping[str, object]) -> None:
        self._server = server
        self._fields = fields
        self._connection = server.connection(CONNECT_SECONDS)
        self._response: HTTPResponse | None = None
        self._decode = msgspec.json.Decoder(Chunk).decode
        self._ended = False
        self._thinks = False
        self._finish: str | None = None
        self._usage = StreamedUsage()
        self._first = 0.0  # seconds from the request to the first text
        self.facts: Facts | None = None

    def __enter__(self) -> RemoteAnswer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()
        if self._response is not None:  # it may own the socket now
            self._response.close()

    def __iter__(self) -> Iterator[str]:
        started = time.monotonic()
        try:
            for event in self._events():
                text = self._take(event)
                if text:
                    self._first = self._first or time.monotonic() - started
                    yield text
        except (OSError, HTTPException, EventTooLarge) as error:
            raise KvikError("server", f"the answer broke off: {_reason(error)}") from None
        if not self._ended:
            raise KvikError("server", "the answer broke off")
        note = "cut at the limit of length" if self._finish == "length" else ""
        self.facts = Facts(self._figures(time.monotonic() - started), note)

    def _events(self) -> Iterator[Event]:
        """Yield events until [DONE], which some servers leave out."""
        response = self._response = self._ask()
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            raise KvikError("server", f"the answer is not a stream, but {kind[:60]}")
        parser = SseParser()
        while piece := response.read1(PIECE_BYTES):
            for event in parser.feed(piece):
                if event.data == b"[DONE]":
                    self._ended = True
                    return
                yield event

    def _ask(self) -> HTTPResponse:
        for wish in (COUNTED, {}):
            body = json.dumps({**self._fields, **wish}).encode()
            response = _send(self._server, self._connection, "POST", "/chat/completions", body)
            if response.status == 200:
                return response
            message = _message(response.read(MAX_BODY_BYTES))
            self._connection.close()
            if "stream_options" not in message:
                break
        raise KvikError("server", f"HTTP {response.status}: {message}")

    def _take(self, event: Event) -> str:
        """Return the text of an event."""
        if event.name == b"error":
            raise KvikError("server", _message(event.data))
        try:
            chunk = self._decode(event.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            message = _message(event.data)
            raise KvikError("server", f"sent an invalid event: {message}") from None
        if bytes(chunk.error) != b"null":
            raise KvikError("server", _message(event.data))
        self._usage = chunk.usage or self._usage
        text = ""
        for choice in chunk.choices or ():
            self._finish = choice.finish_reason or self._finish
            self._ended |= self._finish is not None
            if choice.delta is not None:
                text += self._shown(choice.delta)
        return text

    def _shown(self, delta: StreamedDelta) -> str:
        """Return the text of a delta, with separate reasoning wrapped in <think> tags."""
        thought = delta.reasoning_content or delta.reasoning or ""
        text = delta.content or delta.refusal or ""
        if thought and not self._thinks:
            thought = f"<think>\n{thought}"
        if text and (self._thinks or thought):
            text = f"\n</think>\n\n{text}"
        self._thinks = bool((thought or self._thinks) and not text)
        return thought + text

    def _figures(self, seconds: float) -> str:
        prompt, output = self._usage.prompt_tokens, self._usage.completion_tokens
        parts = []
        if prompt is not None and output is not None:
            parts.append(f"{prompt} prompt + {output} output tokens")
        else:
            parts.append(f"{seconds:.1f} s, the server does not count tokens")
        if self._first:
            parts.append(f"TTFT {self._first * 1e3:.0f} ms")
        if output is not None and seconds > 0:
            parts.append(f"{output / seconds:.1f} tokens/s")
        details = self._usage.prompt_tokens_details
        if prompt and details is not None and details.cached_tokens is not None:
            parts.append(f"prefix-cache hit {details.cached_tokens / prompt:.0%}")
        guessed = self._usage.completion_tokens_details
        if guessed is not None:
            right = guessed.accepted_prediction_tokens or 0
            drafts = right + (guessed.rejected_prediction_tokens or 0)
            if drafts:
                parts.append(f"{right} of {drafts} drafts right")
        return ", ".join(parts)


def _message(body: bytes) -> str:
    return error_message(body)[:MAX_MESSAGE] or "no reason given"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
