"""Searches for the threshold between good and bad numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


def largest(good: Callable[[int], bool], limit: int) -> int:
    """Return the largest good number up to `limit`, by doubling and bisection; 0 if 1 is not good.

    A stricter predicate never yields a larger number, even if it is not monotonic.

    Args:
        good: true up to the threshold and false above it.
    """
    end = 1
    while end <= limit and good(end):
        end *= 2
    low = end // 2
    numbers = range(low + 1, min(end, limit + 1))
    return low + bisect_left(numbers, True, key=lambda number: not good(number))


def smallest(good: Callable[[int], bool], limit: int) -> int | None:
    """Return the smallest good number from 1 to `limit`; None if `limit` is not good.

    Args:
        good: false below the threshold and true from it on.
    """
    if not good(limit):
        return None
    return 1 + bisect_left(range(1, limit), True, key=good)
