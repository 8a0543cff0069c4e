"""How a generation can fail, in words that tell nothing of the machine: what an exception says, or
the last line of a process, is for the log."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.config.errors import UnavailableError
from kvik.engine.async_client import EngineState
from kvik.server.errors import HttpError

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
