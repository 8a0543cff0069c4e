"""Which keys a query sees, as the definition reads."""

from __future__ import annotations

from functools import partial

from kvik.spec.kv import Window

Seen = Window | int | None  # a number: of the last keys; None: all

chunks = partial(Window, chunked=True)


def as_window(window: Seen) -> Window | None:
    return Window(window) if isinstance(window, int) else window


def first_seen(position: int, window: Seen) -> int:
    """Return the first key that the query at a position sees."""
    of = as_window(window)
    if of is None:
        return 0

    def sees(key: int) -> bool:
        if of.chunked:
            return key // of.keys == position // of.keys
        return position - key < of.keys

    return next(key for key in range(position + 1) if sees(key))
