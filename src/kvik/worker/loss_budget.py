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

Where trials bring back little of what they cost, less than SHARE is added: down to LEAST of it.

The bound is on what is charged. `DraftControl` charges less than was measured for single steps that
something else seems to have held up, and at most four steps for making drafts.
"""

from __future__ import annotations

SHARE = 0.01  # of the time
LEAST = 0.25  # of that, where trials have brought nothing back for long
_FADE = 0.95  # of what trials brought and cost, from one to the next
_PRIOR = 1.0  # of both, before the first


class LossBudget:
    """Attributes:
    left: seconds; below 0, too much was lost and has to be made up for.
    needed: how much must be left before anything is tried again.
    share: of the time, that is added now.
    """

    __slots__ = ("_lost", "_won", "left", "needed", "share")

    def __init__(self) -> None:
        self.left = 0.0
        self.needed = 0.0
        self.share = SHARE
        # By steps for which something was tried, over what they would have taken without.
        self._won = self._lost = _PRIOR

    def passed(self, seconds: float) -> bool:
        """Steps for which nothing was tried. Returns whether something may be, after them."""
        self.left += self.share * seconds
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
        left = self.left + without * (1 + self.share) - taken
        self.left = min(left, max(room, self.left))
        gain = 1.0 - taken / without
        self._won = _FADE * self._won + max(0.0, gain)
        self._lost = _FADE * self._lost + max(0.0, -gain)
        self.share = SHARE
        if self._won < self._lost:
            self.share *= max(LEAST, self._won / self._lost)
