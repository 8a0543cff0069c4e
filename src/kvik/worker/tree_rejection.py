"""Which path through a tree of drafts is accepted, of each request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvik.worker.draft_tree import DraftTree
from kvik.worker.rejection import accepted_paths
from kvik.worker.sampling_batch import Supposed

_Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trees:
    """The rows of logits of some requests whose drafts are the first nodes of a tree. A request
    with d drafts has d + 1 rows, one for each node, the root's first. Drafts in a tree are never
    drawn, so a row's token is what it would be without them.

    Attributes:
        tree: of all requests.
        starts: [requests + 1] int64, first row of each.
        judged: [rows] int64, the draft that stands at each row's node; -1 at a root.
    """

    tree: DraftTree
    starts: _Ids
    judged: _Ids

    @staticmethod
    def of(tree: DraftTree, counts: NDArray[np.integer], tokens: NDArray[np.integer]) -> Trees:
        """
        Args:
            counts: [requests], drafts of each.
            tokens: [rows], that each row follows: of each request the newest one, and its drafts.
        """
        starts = np.zeros(len(counts) + 1, np.int64)
        (counts + 1).cumsum(out=starts[1:])
        judged = tokens.astype(np.int64)  # a copy
        judged[starts[:-1]] = -1
        return Trees(tree, starts, judged)

    def depths(self) -> _Ids:
        """[rows], how many drafts come before each row."""
        depths: _Ids = self.tree.depths[self._nodes()]
        return depths

    def supposed(self) -> Supposed:
        """The drafts before each row: those on its path."""
        depths = self.tree.depths
        ends = np.cumsum(depths)
        owners = np.repeat(np.arange(len(depths)), depths)  # [sum of depths], node after node
        paths = [node for end in range(len(depths)) for node in self.tree.path(end)[1:]]
        on_path = np.array(paths, np.int64)
        rows, tokens = [], []
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            count = int(ends[end - start - 1])
            rows.append(start + owners[:count])
            tokens.append(self.judged[start + on_path[:count]])
        return Supposed(np.concatenate(rows), np.concatenate(tokens))

    def offers(self) -> tuple[_Ids, _Ids]:
        """Rows and the drafts that they judge, those at their nodes' children: [drafts] each."""
        drafts = np.flatnonzero(self.judged >= 0)
        nodes = self._nodes()[drafts]
        rows: _Ids = drafts - nodes + np.array(self.tree.parents)[nodes]
        order = np.argsort(rows, kind="stable")
        return rows[order], self.judged[drafts[order]]

    def output(
        self, token_ids: _Ids, bad: NDArray[np.bool_] | None = None
    ) -> tuple[_Ids, NDArray[np.integer]]:
        """Which rows' tokens are output: [tokens], request after request; and how many of each:
        [requests]. A run ends before a bad row, unless that is the root's.

        Args:
            token_ids: [rows], the token of each row.
            bad: [rows], rows without a token.
        """
        requests = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        shape = (len(self.starts) - 1, len(self.tree.parents))
        given, drafts = np.full(shape, -2, np.int64), np.full(shape, -1, np.int64)
        nodes = self._nodes()
        given[requests, nodes] = token_ids if bad is None else np.where(bad, -2, token_ids)
        drafts[requests, nodes] = self.judged
        paths, lengths = accepted_paths(np.array(self.tree.parents), given, drafts)
        # [requests, 1 + depth] nodes whose rows give a token, the root's first
        taken = np.concatenate([np.zeros((shape[0], 1), np.int64), paths], axis=1)
        if bad is not None:
            last = self.starts[:-1] + taken[np.arange(shape[0]), lengths]
            lengths = lengths - (bad[last] & (lengths > 0))
        counts = lengths + 1
        inside = np.arange(taken.shape[1]) < counts[:, None]
        rows: _Ids = (self.starts[:-1, None] + taken)[inside]
        return rows, counts

    def _nodes(self) -> _Ids:
        """[rows], the node of each."""
        nodes: _Ids = np.arange(len(self.judged)) - np.repeat(
            self.starts[:-1], np.diff(self.starts)
        )
        return nodes
