"""How a generation can fail after it was admitted."""

from __future__ import annotations

from kvik.server.errors import HttpError

FAILED = "engine_error"
DEADLINE = "deadline_exceeded"
ABORTED = "aborted"


def failed(message: str) -> HttpError:
    """The engine could not finish it, and would not if it was asked again."""
    return HttpError(500, message, code=FAILED)


def deadline_exceeded() -> HttpError:
    message = "the deadline passed before the request was finished"
    return HttpError(504, message, code=DEADLINE)


def aborted(message: str) -> HttpError:
    """It was ended from outside: by an operator, with the server, or because its reader went away
    or did not read."""
    return HttpError(503, message, code=ABORTED)
