"""Tiers of tests: which cases run on every edit, before a merge and at night.

- **fast** (`make test`): tests without a mark. A table of more than eight cases that is the product
  of several axes runs a cover of it: each value of each axis at least once.
- **full** (`make test-full`): also tests marked `full`, and all examples. Of a product of three and
  more axes it runs a cover too: each pair of values of two axes at least once.
- **check** (`make check`): tests marked `check`, which look at the form of sources and documents.
  They belong to no other tier.
- **nightly** (`make test-nightly`): also tests marked `nightly`, and whole products; ten times the
  examples, drawn from a new seed that the header of the run shows (`--seed` repeats it).

The tier stands in the environment, because modules read it when they are imported (`examples`) and
because the workers of xdist are processes of their own.
"""

from __future__ import annotations

import heapq
import os
import random
from collections import defaultdict
from itertools import combinations

import pytest

TIERS = ("fast", "full", "nightly")
STRENGTH = {"fast": 1, "full": 2}  # axes whose values are combined in a cover
CHECK = "check"
SMALL = 8  # cases of one function that are never thinned
FEWEST_EXAMPLES = 25

_TIER = "TEST_TIER"
_SEED = "TEST_SEED"


def begin(tier: str, seed: str | None) -> None:
    """Set the tier and the seed of this run, for this process and those it starts."""
    os.environ[_TIER] = tier
    if tier == "nightly":
        os.environ.setdefault(_SEED, seed or str(random.SystemRandom().randrange(2**32)))
    elif seed is not None:
        os.environ[_SEED] = seed


def tier() -> str:
    return os.environ.get(_TIER, "fast")


def seed() -> int:
    """Return the seed of tests that draw their own examples: 0 except at night or with `--seed`."""
    return int(os.environ.get(_SEED, "0"))


def examples(full: int) -> int:
    """Return how many examples to draw where the full tier draws `full`."""
    match tier():
        case "fast":
            return max(min(full, FEWEST_EXAMPLES), full // 5)
        case "nightly":
            return 10 * full
        case _:
            return full


def runs(full: int) -> int:
    """Return how many simulations to run, each of many steps, where the full tier runs `full`."""
    return {"fast": -(-full // 3), "nightly": 10 * full}.get(tier(), full)


def selected(items: list[pytest.Item], chosen: str) -> list[pytest.Item]:
    """Return the items that the tier `chosen` runs, in their order."""
    if chosen == CHECK:
        return [item for item in items if item.get_closest_marker(CHECK)]
    later = (*TIERS[TIERS.index(chosen) + 1 :], CHECK)
    items = [item for item in items if not any(map(item.get_closest_marker, later))]
    if chosen == "nightly":
        return items
    by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0]].append(item)
    kept = {
        item
        for cases in by_function.values()
        for item in (cases if _is_whole(cases, chosen) else covering(cases, STRENGTH[chosen]))
    }
    return [item for item in items if item in kept]


def _is_whole(cases: list[pytest.Item], chosen: str) -> bool:
    if len(cases) <= SMALL or not hasattr(cases[0], "callspec"):
        return True
    # Of as many axes as are combined each case is a combination of its own.
    pairs = chosen == "full" and len(cases[0].callspec._idlist) <= STRENGTH[chosen]
    return pairs or cases[0].get_closest_marker("whole") is not None


def covering(cases: list[pytest.Item], strength: int) -> list[pytest.Item]:
    """Return few cases that hold each combination of values of `strength` axes (`parametrize`,
    fixture) at least once.

    Greedy: always the case with most values that none before it had. The count of new values of a
    case only falls, so a heap of stale counts finds the next case without counting all again.
    """
    values = {
        case: set(combinations(enumerate(case.callspec._idlist), strength))  # type: ignore[attr-defined]
        for case in cases
    }
    missing = set().union(*values.values())
    heap = [(-len(values[case]), order) for order, case in enumerate(cases)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        count, order = heapq.heappop(heap)
        new = values[cases[order]] & missing
        if len(new) < -count:
            heapq.heappush(heap, (-len(new), order))
            continue
        chosen.append(cases[order])
        missing -= new
    return chosen
