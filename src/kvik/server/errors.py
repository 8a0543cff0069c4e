"""How an error is told: the status, the body in the API's own shape, and whether to try again.

Clients retry 408, 409, 429 and everything from 500 on. So what is wrong with a request is 4xx,
always, and where trying again brings nothing an answer says so: `x-should-retry: false`.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.responses import Response

from kvik.engine.client import EngineState
from kvik.errors import KvikError, Overflow, OverloadError, ParamError, UnavailableError

MAX_LINE = 500  # signs of a line of a traceback


def escaped(text: str, most: int) -> str:
    """`text` cut after `most` signs, and all but printable ASCII as backslash sequences."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "".join(
        sign if sign.isascii() and sign.isprintable() and sign != "\\" else _sequence(sign)
        for sign in cut
    )


def escaped_traceback(error: BaseException) -> str:
    """The traceback of an error, which may quote text of others.

    Each line is indented, so that none can pass for a line of the log.
    """
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(f"    {escaped(line, MAX_LINE)}" for line in lines)


def _sequence(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")


INVALID = "invalid_request_error"
SERVER = "server_error"
MESSAGES = "/v1/messages"  # the API of Anthropic
MAX_MESSAGE = 1000  # characters: messages may quote what was sent

# Status -> what Anthropic calls it; others are `invalid_request_error` below 500.
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class HttpError(KvikError):
    """What a handler raises when it knows the status itself. `field` is the parameter, or ""."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str = "",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(field, message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error in the words of HTTP.

    Attributes:
        status: of the answer, when it has not begun.
        type: what OpenAI calls it.
        param: the parameter that is wrong, if it is one.
        code: for programs to read.
        in_anthropic: the message in Anthropic's words, where clients look for those.
    """

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    in_anthropic: str | None = None

    def openai(self) -> dict[str, object]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, object]:
        message = self.in_anthropic or self.message
        kind = ANTHROPIC_TYPES.get(self.status, INVALID if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, *, anthropic: bool = False) -> Response:
        body = self.anthropic() if anthropic else self.openai()
        # ASCII: a message may quote text that is no valid Unicode
        return Response(
            json.dumps(body).encode(),
            self.status,
            headers=dict(self.headers),
            media_type="application/json",
        )


@contextmanager
def rename_fields(**names: str) -> Iterator[None]:
    """Errors that name a field of the engine name that of the request: `prompt="messages"`."""
    try:
        yield
    except KvikError as error:
        error.field = names.get(error.field, error.field)
        if isinstance(error, ParamError) and error.overflow is not None:
            prompt = error.overflow.prompt
            error.overflow = error.overflow._replace(prompt=names.get(prompt, prompt))
        raise


def describe(error: Exception) -> ErrorResponse:
    """What to tell of an error. Of one that is nobody's fault but ours, nothing but that."""
    match error:
        case HttpError():
            answer = ErrorResponse(
                error.status,
                _short(error.message),
                _type(error.status),
                error.field or None,
                error.code,
                {**_retry(error.status), **error.headers},
            )
        case OverloadError(own=True):
            answer = _retry_later(429, error, "rate_limit_error", "rate_limit_exceeded")
        case OverloadError():
            answer = _retry_later(503, error, SERVER, "overloaded")
        case UnavailableError():
            headers = {"retry-after": "1", "x-should-retry": "true"}
            answer = ErrorResponse(503, _short(str(error)), SERVER, None, "unavailable", headers)
        case ParamError(overflow=Overflow() as overflow):
            answer = _too_long(error.field, overflow)
        case KvikError():
            answer = ErrorResponse(400, _short(str(error)), INVALID, error.field or None)
        case _:
            answer = ErrorResponse(500, "internal error", SERVER, headers=_retry(500))
    return answer


def in_messages(path: str) -> bool:
    """Whether errors of this path have Anthropic's shape."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def model_not_found(model: str) -> HttpError:
    return HttpError(404, f"the model {model[:60]!r} does not exist", "model", "model_not_found")


def _too_long(field: str, overflow: Overflow) -> ErrorResponse:
    """In the words of OpenAI and of Anthropic: clients that make a conversation shorter and try
    again find out by them (LiteLLM, LangChain, coding agents)."""
    limit, prompt = overflow.limit, overflow.prompt
    count = f"{'' if overflow.counted else 'more than '}{overflow.num_prompt}"
    requested, shorten = f"{count} tokens in the {prompt}", prompt
    if overflow.num_output:
        requested = (
            f"{overflow.num_prompt + overflow.num_output} tokens ({count} in the {prompt}, "
            f"{overflow.num_output} in the completion)"
        )
        shorten = f"{prompt} or completion"
    return ErrorResponse(
        400,
        f"{field}: This model's maximum context length is {limit} tokens. However, you requested "
        f"{requested}. Please reduce the length of the {shorten}.",
        INVALID,
        field,
        "context_length_exceeded",
        # One token of output is the least that must fit behind the prompt.
        in_anthropic=f"{field}: prompt is too long: {count} tokens > "
        f"{limit - (overflow.num_output > 0)} maximum",
    )


def _retry_later(status: int, error: OverloadError, kind: str, code: str) -> ErrorResponse:
    seconds = max(1, math.ceil(error.retry_after)) if math.isfinite(error.retry_after) else 60
    headers = {"retry-after": str(seconds), "x-should-retry": "true"}
    return ErrorResponse(status, _short(str(error)), kind, None, code, headers)


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return INVALID if status < 500 else SERVER


def _retry(status: int) -> dict[str, str]:
    """A client that would try again, where it would fare the same, is told not to."""
    again = status in (429, 503)
    return {} if again or (status < 500 and status != 408) else {"x-should-retry": "false"}


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."


FAILED = "engine_error"
DEADLINE = "deadline_exceeded"
ABORTED = "aborted"
_STATES: Mapping[EngineState, str] = {
    EngineState.STARTING: "is being started",
    EngineState.STALLED: "has work, and has computed no step for too long",
    EngineState.RESTARTING: "has failed, and is being started again",
    EngineState.FAILED: "has failed, and is not started again",
    EngineState.CLOSED: "was closed",
}


def failed(request_id: str) -> HttpError:
    """The engine could not finish it, and would not if it was asked again.

    Args:
        request_id: under which the log says why.
    """
    return HttpError(500, f"the engine failed in this request ({request_id})", code=FAILED)


def lost() -> HttpError:
    """The engine was lost before anything of the answer was sent: another one may be asked."""
    message = "the engine failed and is being started again; nothing of the answer was sent"
    headers = {"retry-after": "1", "x-should-retry": "true"}
    return HttpError(503, message, code=FAILED, headers=headers)


def deadline_exceeded() -> HttpError:
    message = "the deadline passed before the request was finished"
    return HttpError(504, message, code=DEADLINE)


def aborted(message: str, *, again: bool) -> HttpError:
    """It was ended from outside.

    Args:
        again: whether to send it again, as to another server or to this one when it is back. Not
            if somebody wanted this very request to end.
    """
    headers = {"retry-after": "1"} if again else {}
    headers["x-should-retry"] = "true" if again else "false"
    return HttpError(503, message, code=ABORTED, headers=headers)


def state_in_words(state: EngineState) -> str:
    """Of an engine that is not ready: what it does instead."""
    return _STATES.get(state, "is not ready")


def not_ready(state: EngineState) -> UnavailableError:
    return UnavailableError("engine", state_in_words(state))
