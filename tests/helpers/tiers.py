"""Tiers of tests: which cases run on every edit, before a merge and at night.

- **fast** (`make test`): tests without a mark. Of a product of several axes it runs a cover with
  each value of each axis at least once.
- **full** (`make test-full`): also tests marked `full`, and all examples. Of a product of three or
  more axes with more than eight cases, it runs a cover with each pair of values of two axes at
  least once; of tests marked `each(n)`, with each value of an argument at least n times.
- **check** (`make check`): tests marked `check`, which check the form of sources and documents and
  belong to no other tier.
- **nightly** (`make test-nightly`): also tests marked `nightly`, and whole products; ten times the
  examples, drawn from a new seed that the run's header shows (`--seed` repeats it).

The tier is an environment variable, because modules read it on import (`examples`) and because the
workers of xdist are separate processes.
"""

from __future__ import annotations

import heapq
import os
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import TypeVar

import pytest

TIERS = ("fast", "full", "nightly")
STRENGTH = {"fast": 1, "full": 2}  # axes whose values are combined in a cover
CHECK = "check"
SMALL = 8  # the full tier runs all cases of a function with this many or fewer
FEWEST_EXAMPLES = 25

Value = tuple[object, str]  # an axis, and the id of a value
Case = TypeVar("Case")

_TIER = "TEST_TIER"
_SEED = "TEST_SEED"


def begin(tier: str, seed: str | None) -> None:
    """Set the tier and the seed of this run, for this process and its children."""
    os.environ[_TIER] = tier
    if tier == "nightly":
        os.environ.setdefault(_SEED, seed or str(random.SystemRandom().randrange(2**32)))
    elif seed is not None:
        os.environ[_SEED] = seed


def tier() -> str:
    return os.environ.get(_TIER, "fast")


def seed() -> int:
    """Return the seed of tests that draw examples: 0 except in the nightly tier or with
    `--seed`."""
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
    kept = {item for cases in by_function.values() for item in _chosen(cases, chosen)}
    return [item for item in items if item in kept]


def _chosen(cases: list[pytest.Item], tier: str) -> list[pytest.Item]:
    """Return the cases of a function that the fast or full tier runs."""
    if (tier == "full" and len(cases) <= SMALL) or not hasattr(cases[0], "callspec"):
        return cases
    if each := cases[0].get_closest_marker("each"):
        values = [[(name, str(value)) for name, value in c.callspec.params.items()] for c in cases]
        return covering(cases, values, 1, times=each.args[0] if tier == "full" else 1)
    # With no more axes than are combined, each case is a combination of its own.
    pairs = tier == "full" and len(cases[0].callspec._idlist) <= STRENGTH[tier]
    if pairs or cases[0].get_closest_marker("whole"):
        return cases
    return covering(cases, [[*enumerate(c.callspec._idlist)] for c in cases], STRENGTH[tier])


def covering(
    cases: Sequence[Case], values: Sequence[list[Value]], strength: int, times: int = 1
) -> list[Case]:
    """Return few cases that cover each combination of values of `strength` axes at least that many
    times, as long as there are cases that have it.

    Greedy: repeatedly take the case with most new combinations, and of several the one whose values
    were taken least. Both numbers only get worse, so a heap of stale ones finds the next case
    without recounting all.

    Args:
        values: of each case, one of each axis.
    """
    combined = [set(combinations(one, strength)) for one in values]
    taken: Counter[Value] = Counter()
    chosen: set[int] = set()
    for _ in range(times):
        left = [order for order in range(len(cases)) if order not in chosen]
        missing = set().union(*(combined[order] for order in left))

        def rank(order: int, missing: set[tuple[Value, ...]] = missing) -> tuple[int, int, int]:
            return -len(combined[order] & missing), sum(taken[v] for v in values[order]), order

        heap = [*map(rank, left)]
        heapq.heapify(heap)
        while missing:
            found = heapq.heappop(heap)
            order = found[-1]
            if (now := rank(order)) > found:
                heapq.heappush(heap, now)
                continue
            chosen.add(order)
            missing -= combined[order]
            taken.update(values[order])
    return [cases[order] for order in sorted(chosen)]
