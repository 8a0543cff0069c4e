"""Searches for the border between numbers that are good and numbers that are not."""

from __future__ import annotations

from collections.abc import Callable


def largest(good: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that is good, by doubling and bisection; 0 if 1 is
    not good.

    A predicate that is true of fewer numbers never finds a larger one, whatever it is.

    Args:
        good: true up to the border and false above it.
    """
    low, high = 0, 1
    while high <= most and good(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def least(good: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to `most` that is good; None if `most` is not.

    Args:
        good: false below the border and true from it on.
    """
    if not good(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
