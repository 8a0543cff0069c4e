"""HTTP errors: the status, the body in the format of the API, and whether to retry.

Clients retry 408, 409, 429 and 5xx. So errors in a request are always 4xx, and if a retry would
fail again the response says so: `x-should-retry: false`.
"""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec
from starlette.responses import Response

from kvik.engine.remote import EngineState
from kvik.errors import (
    MODEL_NOT_FOUND,
    KvikError,
    Overflow,
    OverloadError,
    ParamError,
    UnavailableError,
)

MAX_LINE = 500  # characters of a line of a traceback


def escaped(text: str, limit: int) -> str:
    """Return `text`, cut after `limit` characters, with everything but printable ASCII escaped."""
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return "".join(
        c if c.isascii() and c.isprintable() and c != "\\" else c.encode("unicode_escape").decode()
        for c in cut
    )


def escaped_traceback(error: BaseException) -> str:
    """Return the traceback of an error, escaped: it may quote text of a request.

    Each line is indented, so that none looks like a log line.
    """
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(f"    {escaped(line, MAX_LINE)}" for line in lines)


MESSAGES = re.compile(r"(/v1)?/messages(/.*)?", re.DOTALL)  # the API of Anthropic
MAX_MESSAGE = 1000  # characters; messages may quote the request
RETRY = {"retry-after": "1", "x-should-retry": "true"}
NO_RETRY = {"x-should-retry": "false"}

# Status -> the type of Anthropic's API; others are `invalid_request_error` below 500.
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """Every error except those of `/v1/messages`."""

    error: ErrorDetails


class MessagesErrorCode(msgspec.Struct):
    error_code: str


class MessagesErrorDetails(msgspec.Struct, omit_defaults=True):
    type: str
    message: str
    details: MessagesErrorCode | None = None


class MessagesError(msgspec.Struct, kw_only=True):
    """Every error of `/v1/messages`."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetails


class HttpError(KvikError):
    """An error with an HTTP status.

    Args:
        field: the invalid parameter, or "".
        code: for programs to read.
        anthropic_message: a different message for Anthropic's API, if its clients look for it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str = "",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic_message: str | None = None,
    ) -> None:
        super().__init__(field, message)
        self.status = status
        self.code = code
        # Clients would retry these, and fail again.
        default = NO_RETRY if status == 408 or (status >= 500 and status != 503) else {}
        self.headers = {**default, **(headers or {})}
        self._anthropic_message = anthropic_message

    def body(self, *, anthropic: bool = False) -> Error | MessagesError:
        """Return the body in the format of OpenAI's API or of Anthropic's."""
        if anthropic:
            kind = "invalid_request_error" if self.status < 500 else "api_error"
            kind = ANTHROPIC_TYPES.get(self.status, kind)
            message = _short(self._anthropic_message or self.message)
            details = MessagesErrorCode(self.code) if self.code else None
            return MessagesError(error=MessagesErrorDetails(kind, message, details))
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return Error(ErrorDetails(_short(self.message), kind, self.field or None, self.code))

    def response(self, *, anthropic: bool = False) -> Response:
        # ASCII: a message may quote text that is not valid Unicode.
        data = json.dumps(msgspec.to_builtins(self.body(anthropic=anthropic))).encode()
        return Response(data, self.status, headers=self.headers, media_type="application/json")


@contextmanager
def rename_fields(**names: str) -> Iterator[None]:
    """Replace the engine's field names in errors by the request's: `prompt="messages"`."""
    try:
        yield
    except KvikError as error:
        error.field = names.get(error.field, error.field)
        if isinstance(error, ParamError) and error.overflow is not None:
            prompt = error.overflow.prompt
            error.overflow = error.overflow._replace(prompt=names.get(prompt, prompt))
        raise


def http_error(error: Exception) -> HttpError:
    """Return the HTTP error for an exception. Internal errors do not reveal their cause."""
    match error:
        case HttpError():
            return error
        case OverloadError():
            status, code = (429, "rate_limit_exceeded") if error.of_caller else (503, "overloaded")
            seconds = 60
            if math.isfinite(error.retry_after):
                seconds = max(1, math.ceil(error.retry_after))
            headers = {**RETRY, "retry-after": str(seconds)}
            return HttpError(status, str(error), code=code, headers=headers)
        case UnavailableError():
            return HttpError(503, str(error), code="unavailable", headers=RETRY)
        case ParamError(overflow=Overflow() as overflow):
            return _too_long(error.field, overflow)
        case ParamError(code=str() as code) if code:
            return HttpError(404 if code == MODEL_NOT_FOUND else 400, str(error), error.field, code)
        case KvikError():
            return HttpError(400, str(error), error.field)
        case _:
            return HttpError(500, "internal error")


def in_messages(path: str) -> bool:
    """Return whether errors of this path have the format of Anthropic's API."""
    return MESSAGES.fullmatch(path) is not None


def model_not_found(model: str, served: Sequence[str]) -> HttpError:
    """Return the error of a request for a model name that is not served."""
    known = ", ".join(served) or "none"
    message = f"the model {model[:60]!r} does not exist; this server has {known}"
    return HttpError(404, message, "model", MODEL_NOT_FOUND)


def _too_long(field: str, overflow: Overflow) -> HttpError:
    """Return the error of a prompt that is too long, with the wording by which clients (LiteLLM,
    LangChain, coding agents) recognise that they must shorten a conversation."""
    limit, prompt = overflow.limit, overflow.prompt
    count = f"{'' if overflow.counted else 'more than '}{overflow.num_prompt}"
    requested, shorten = f"{count} tokens in the {prompt}", prompt
    if overflow.num_output:
        requested = (
            f"{overflow.num_prompt + overflow.num_output} tokens ({count} in the {prompt}, "
            f"{overflow.num_output} in the completion)"
        )
        shorten = f"{prompt} or completion"
    return HttpError(
        400,
        f"{field}: This model's maximum context length is {limit} tokens. However, you requested "
        f"{requested}. Please reduce the length of the {shorten}.",
        field,
        "context_length_exceeded",
        # At least one output token must fit after the prompt.
        anthropic_message=f"{field}: prompt is too long: {count} tokens > "
        f"{limit - (overflow.num_output > 0)} maximum",
    )


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."


FAILED = "engine_error"
DEADLINE = "deadline_exceeded"
ABORTED = "aborted"
_STATES: Mapping[EngineState, str] = {
    EngineState.STARTING: "is being started",
    EngineState.STALLED: "has work, and has computed no step for too long",
    EngineState.RESTARTING: "has failed, and is being started again",
    EngineState.ASLEEP: "sleeps until a request arrives",
    EngineState.FAILED: "has failed, and is not started again",
    EngineState.CLOSED: "was closed",
}


def failed(request_id: str, reason: str = "") -> HttpError:
    """Return the error of a request that failed in the engine; the log has the cause, with its id.

    Args:
        reason: the part of the cause that callers may see.
    """
    message = f"the engine failed in this request ({request_id})"
    return HttpError(500, f"{message}: {reason}" if reason else message, code=FAILED)


def lost(reason: str = "") -> HttpError:
    """Return the error of a request that may be retried, as nothing of its answer was sent.

    Args:
        reason: the part of the engine's failure that callers may see.
    """
    failure = f"the engine failed ({reason})" if reason else "the engine failed"
    message = f"{failure} and is being started again; nothing of the answer was sent"
    return HttpError(503, message, code=FAILED, headers=RETRY)


def deadline_exceeded() -> HttpError:
    message = "the deadline passed before the request was finished"
    return HttpError(504, message, code=DEADLINE)


def aborted(message: str, *, retry: bool) -> HttpError:
    """Return the error of an aborted request.

    Args:
        retry: whether the client should retry, on another server or later; false if this very
            request was to be aborted.
    """
    return HttpError(503, message, code=ABORTED, headers=RETRY if retry else NO_RETRY)


def state_in_words(state: EngineState) -> str:
    """Describe the state of an engine that is not ready."""
    return _STATES.get(state, "is not ready")


def not_ready(state: EngineState) -> UnavailableError:
    return UnavailableError("engine", state_in_words(state))
