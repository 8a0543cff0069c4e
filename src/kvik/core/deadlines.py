"""Requests that must be done by a time, and those that cannot be any more.

A request whose deadline has passed is ended. One that cannot reach its first token in time, or its
`min_tokens`, is ended as soon as that is sure, so that its work goes to others. It is sure if even
`HURRY` of the time would be too long that it takes when nothing holds it up and every step is as
fast as the fastest of the last ones (`Pace.at_least`).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from kvik.core.pace import Pace
from kvik.core.types import Request

HURRY = 0.75


class Deadlines:
    """A heap of the times at which to look at each request again.

    `missing` tells how many tokens a request has yet to compute before it samples, 0 if what it
    needs is under way.
    """

    def __init__(self, pace: Pace, budget: int, missing: Callable[[Request], int]) -> None:
        self.pace = pace
        self.budget = budget  # tokens of a step at most
        self.missing = missing
        self.most_per_step = 1  # tokens of a request, drafts included
        self._looks: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._looks)

    def add(self, request: Request, now: float, num_served: int) -> None:
        """Watch a request that has a deadline, beside `num_served` requests in all."""
        if request.deadline is None:
            return
        heappush(self._looks, (now, request.serial, request))
        if len(self._looks) > 64 + 2 * num_served:
            # Most have ended long before their time: keep only what is still served.
            self._looks = [look for look in self._looks if not look[2].finished]
            heapify(self._looks)

    def next_look(self) -> float | None:
        """When `late` may have something to say although nothing happens until then."""
        return self._looks[0][0] if self._looks else None

    def late(self, now: float) -> list[Request]:
        """Those that are past their deadline or cannot make it any more; they are forgotten."""
        found = []
        looks = self._looks
        while looks and (looks[0][0] <= now or looks[0][2].finished):
            request = heappop(looks)[2]
            if request.finished or request.deadline is None:
                continue
            last = request.deadline - HURRY * self._seconds(request)
            if last <= now:
                found.append(request)
            else:
                heappush(looks, (last, request.serial, request))
        return found

    def _seconds(self, request: Request) -> float:
        """What it takes at least until the tokens are there that make the answer worth having."""
        made = request.num_output_tokens + request.num_pending_tokens
        wanted = max(1, request.params.min_tokens) - made
        if wanted <= 0:
            return 0.0
        pace = self.pace
        full, rest = divmod(self.missing(request), self.budget)
        seconds = full * pace.at_least(self.budget) + (pace.at_least(rest) if rest else 0.0)
        return seconds + (wanted - 1) / self.most_per_step * pace.at_least(1)
