"""The keys that a query sees, by definition."""

from __future__ import annotations

from functools import cache, partial

from kvik.spec.visible_keys import Budget, Window

Seen = Window | Budget | int | None  # a number of last keys; None: all

chunks = partial(Window, chunked=True)


def sinks(count: int, keys: int) -> Window:
    """Return a window of the first `count` keys and the last `keys`."""
    return Window(keys, sinks=count)


def as_window(window: Seen) -> Window | None:
    if isinstance(window, Budget):
        return None
    return Window(window) if isinstance(window, int) else window


def cut_points(budget: Budget, prompt: int, most: int) -> list[int]:
    """Return the numbers of tokens, up to `most`, after which a request drops some."""
    if prompt > budget.tokens:
        return list(range(prompt, most + 1, budget.every))
    return list(range(budget.tokens + budget.every, most + 1, budget.every))


def num_sinks(position: int, window: Seen) -> int:
    """Return how many of the first keys are sinks for the query at a position."""
    of = as_window(window)
    return 0 if of is None else min(of.sinks, position + 1)


def seen(position: int, window: Seen) -> list[int]:
    """Return all keys that the query at a position sees, in order."""
    first = max(first_seen(position, window), num_sinks(position, window))
    return [*range(num_sinks(position, window)), *range(first, position + 1)]


@cache
def first_seen(position: int, window: Seen) -> int:
    """Return the first key that the query at a position sees, apart from sinks."""
    of = as_window(window)
    if of is None:
        return 0

    def sees(key: int) -> bool:
        if of.chunked:
            return key // of.keys == position // of.keys
        return position - key < of.keys

    return next(key for key in range(position + 1) if sees(key))
