"""Searches for the threshold between good and bad numbers."""

from __future__ import annotations

from collections.abc import Callable


def largest(good: Callable[[int], bool], limit: int) -> int:
    """Return the largest good number up to `limit`, by doubling and bisection; 0 if 1 is not good.

    A stricter predicate never yields a larger number, even if it is not monotonic.

    Args:
        good: true up to the threshold and false above it.
    """
    low, high = 0, 1
    while high <= limit and good(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def smallest(good: Callable[[int], bool], limit: int) -> int | None:
    """Return the smallest good number from 1 to `limit`; None if `limit` is not good.

    Args:
        good: false below the threshold and true from it on.
    """
    if not good(limit):
        return None
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
