"""What guessing ahead may lose: the one rule that keeps it from being slower than not guessing.

    Every second that a step without drafts takes, or would have taken for the same tokens, adds
    SHARE of a second to the budget. Every second that guessing took beyond that is taken from it:
    checking drafts, making them, finding none, deciding whether to. What it gained is added, as far
    as there is room. Nothing is tried while the budget is spent, unless the last drafts gained.

So at any time, since the start or since any moment after it,

    time taken <= time without drafts * (1 + SHARE) + the room + what the last trial lost,

whatever drafts turn out to be worth, and with estimates however wrong: they only decide what the
budget is spent on. A trial is what is left of the budget and one step with drafts that loses; two
if one between them gained, or if the first one was dear because a text was read. What it lost is
paid for before the next one, so how long guessing rests follows from that.

The bound is on what is charged. `DraftControl` charges less than was measured for single steps that
something else seems to have held up, and at most four steps for making drafts.
"""

from __future__ import annotations

SHARE = 0.01  # of the time


class LossBudget:
    """Attributes:
    left: seconds; below 0, too much was lost and has to be made up for.
    needed: how much must be left before anything is tried again.
    """

    __slots__ = ("left", "needed")

    def __init__(self) -> None:
        self.left = 0.0
        self.needed = 0.0

    def passed(self, seconds: float) -> bool:
        """A step for which nothing was tried. Returns whether something may be, after it."""
        self.left += SHARE * seconds
        return self.left > 0 and self.left >= self.needed

    def spend(self, seconds: float) -> None:
        """On deciding, with nothing to show for it."""
        self.left -= seconds

    def settle(self, without: float, taken: float, room: float) -> None:
        """A step for which something was tried.

        Args:
            without: seconds that its tokens would have taken without drafts. taken: that it did.
            room: most that gains add up to, in seconds.
        """
        left = self.left + without * (1 + SHARE) - taken
        self.left = min(left, max(room, self.left))
