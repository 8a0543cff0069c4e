"""A tree of drafts that is the same for every request: only its tokens change from step to step.

Node 0 is the newest token of a request; all others are drafts. A node at depth d is the `ranks`-th
likeliest token of the prediction d tokens ahead. Parents come before their children, so the first n
nodes of a tree are a tree as well.

In a step the nodes of a request are contiguous and in node order, both in the batch and in the
cache; node i has the position of node 0 plus its depth.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MAX_NODES = 63  # a node's ancestors are the bits of a word, whose sign is not used


@dataclass(frozen=True)
class DraftTree:
    """The shape of a tree of drafts, of at most `MAX_NODES` nodes."""

    parents: tuple[int, ...]  # of each node; node 0 has -1
    # Of each node: which candidate at its depth it is, 0 the likeliest. 0 for node 0.
    ranks: tuple[int, ...]

    @staticmethod
    def best(accuracies: Sequence[Sequence[float]], drafts: int) -> DraftTree:
        """Return the tree of at most `drafts` drafts with the most accepted drafts on average, as
        in Medusa (Cai et al. 2024, section 2.3): a node's worth is the product of the accuracies
        along its path, and the node of highest worth is added next. So the first n nodes are always
        the best n.

        Args:
            accuracies: [depths][ranks], how often the r-th likeliest token at depth d + 1 is right.
        """
        parents, ranks, depths = [-1], [0], [0]
        # Ranks by accuracy: one measured on few tokens may exceed those before it.
        orders = [
            sorted(range(len(shares)), key=shares.__getitem__, reverse=True)
            for shares in accuracies
        ]
        # -worth, parent, place of the rank in the order, parent's worth
        candidates: list[tuple[float, int, int, float]] = []

        def offer(parent: int, place: int, worth: float) -> None:
            depth = depths[parent]
            if depth < len(orders) and place < len(orders[depth]):
                probability = worth * accuracies[depth][orders[depth][place]]
                if probability > 0:
                    heapq.heappush(candidates, (-probability, parent, place, worth))

        offer(0, 0, 1.0)
        while candidates and len(parents) <= drafts:
            negated, parent, place, worth = heapq.heappop(candidates)
            parents.append(parent)
            ranks.append(orders[depths[parent]][place])
            depths.append(depths[parent] + 1)
            offer(parent, place + 1, worth)
            offer(len(parents) - 1, 0, -negated)
        return DraftTree(tuple(parents), tuple(ranks))

    def worth(self, accuracies: Sequence[Sequence[float]]) -> float:
        """Return how many of its drafts are accepted on average, if the depths are independent.

        Args:
            accuracies: see `best`.
        """
        worths = [1.0]
        for node in range(1, len(self.parents)):
            share = accuracies[int(self.depths[node]) - 1][self.ranks[node]]
            worths.append(worths[self.parents[node]] * share)
        return sum(worths[1:])

    @property
    def drafts(self) -> int:
        """Number of nodes without node 0."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> np.ndarray:
        """[nodes] int64: position of each node, counted from node 0."""
        depths = np.zeros(len(self.parents), np.int64)
        for node, parent in enumerate(self.parents[1:], 1):
            depths[node] = depths[parent] + 1
        return depths

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """[nodes]: [n] is the greatest depth among the first n drafts."""
        return tuple(np.maximum.accumulate(self.depths).tolist())

    @cached_property
    def words(self) -> np.ndarray:
        """[nodes] int64: bit j is set if node j is the node itself or an ancestor. The values of
        `StepLayout.tree` for the tokens of a request; never 0."""
        words = np.zeros(len(self.parents), np.int64)
        for node, parent in enumerate(self.parents):
            words[node] = 1 << node | (int(words[parent]) if node else 0)
        return words

    def last_valid(self, drafts: Sequence[int], valid: Callable[[Sequence[int]], int]) -> int:
        """Return the last node whose path may follow; 0: no draft may.

        Args:
            drafts: tokens of the first nodes after node 0.
            valid: tokens -> how many of them, from the first on, may follow.
        """
        allowed = [True]
        for node in range(1, len(drafts) + 1):
            path = [drafts[step - 1] for step in self.path(node)[1:]]
            allowed.append(allowed[self.parents[node]] and valid(path) == len(path))
        return max(node for node, good in enumerate(allowed) if good)

    def path(self, node: int) -> list[int]:
        """Return the nodes from node 0 to `node`, both included."""
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path[::-1]
