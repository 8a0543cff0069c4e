"""Text of others in a log line or a header: printable ASCII, and of bounded length."""

from __future__ import annotations

import traceback

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
