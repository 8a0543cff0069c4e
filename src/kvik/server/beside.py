"""Work that grows with what a caller sends or asks for, kept out of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

BRIEF = 2000  # items at a microsecond or two: a thread would take longer to wake


async def beside(num_items: int, work: Callable[[], T]) -> T:
    """What `work` returns: done at once if it is little, else in a thread, where Python gives all
    others their turn every few milliseconds.

    Args:
        num_items: tokens, messages, log probabilities: whatever there is one turn of a loop for.
    """
    return work() if num_items <= BRIEF else await asyncio.to_thread(work)
