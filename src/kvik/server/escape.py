"""Text of others in a log line or a header: printable ASCII, and of bounded length."""

from __future__ import annotations


def escaped(text: str, most: int) -> str:
    """`text` cut after `most` signs, and all but printable ASCII as backslash sequences."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "".join(
        sign if sign.isascii() and sign.isprintable() and sign != "\\" else _sequence(sign)
        for sign in cut
    )


def _sequence(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")
