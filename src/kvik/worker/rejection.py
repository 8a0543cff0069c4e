"""Acceptance of drafts: the output has the target's distribution, whatever is drafted.

Every row of logits gives a token, drawn from the target's distribution p. Drafts are accepted as
long as each equals the token of the row that judges it; the token after them is output too, so a
step gives at least one token. There are two ways to draw:

- as without speculation. Then the output is the same, token for token, as without speculation.
- coupled to a draft that was drawn from a distribution q: the draft with min(1, p/q), else a draw
  of norm(max(0, p - q)) (Leviathan et al. 2023, 2211.17192; Chen et al. 2023, 2302.01318). The
  token again has the distribution p, and no other method makes it equal the draft more often.

`typical` gives up the distribution, and must be requested explicitly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.config.speculative import Typical
from kvik.frozen import frozen
from kvik.worker.draft_tree import DraftTree
from kvik.worker.sampling_batch import Supposed


@frozen
class CheckedDrafts:
    """The rows of logits of a step whose tokens are output: one for each sampling row, and one for
    each accepted draft."""

    first: np.ndarray  # [sampling rows], the first row of logits of each
    # [tokens], the rows of logits whose tokens are output, grouped by sampling row.
    rows: np.ndarray
    lengths: np.ndarray  # [sampling rows], number of output tokens of each

    @property
    def newest(self) -> np.ndarray:
        """[sampling rows], the row of logits that gave each its newest token."""
        newest: np.ndarray = self.rows[self.lengths.cumsum() - 1]
        return newest

    def paths(self, drafts: int) -> np.ndarray:
        """[sampling rows, drafts] bool, which of the drafts of each were accepted: the row of
        logits after a draft is output if and only if the draft is."""
        owners = np.arange(len(self.first)).repeat(self.lengths)
        accepted = np.zeros((len(self.first), 1 + drafts), np.bool_)
        accepted[owners, self.rows - self.first[owners]] = True
        return accepted[:, 1:]


# The accepted path of each request through a tree of drafts.


@dataclass(frozen=True, slots=True)
class Trees:
    """The rows of logits of requests whose drafts are the first nodes of a tree. A request with d
    drafts has d + 1 rows, one for each node, the root's first. Drafts in a tree are never sampled,
    so a row's token is the same as without drafts."""

    tree: DraftTree  # shared by all requests
    starts: _Ids  # [requests + 1] int64, first row of each
    judged: _Ids  # [rows] int64, the draft at each row's node; -1 at a root

    @staticmethod
    def of(tree: DraftTree, counts: NDArray[np.integer], tokens: NDArray[np.integer]) -> Trees:
        """See `Chains.of`."""
        starts = np.zeros(len(counts) + 1, np.int64)
        (counts + 1).cumsum(out=starts[1:])
        judged = tokens.astype(np.int64)  # a copy
        judged[starts[:-1]] = -1
        return Trees(tree, starts, judged)

    def supposed(self) -> Supposed:
        """Return the drafts that each row follows: those on its path."""
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
        """Return pairs of a row and a draft it judges, at a child of its node: [drafts] each."""
        drafts = np.flatnonzero(self.judged >= 0)
        nodes = self._nodes()[drafts]
        rows: _Ids = drafts - nodes + np.array(self.tree.parents)[nodes]
        order = np.argsort(rows, kind="stable")
        return rows[order], self.judged[drafts[order]]

    def output(
        self, token_ids: _Ids, bad: NDArray[np.bool_] | None = None
    ) -> tuple[_Ids, NDArray[np.integer]]:
        """Return which rows' tokens are output: [tokens], request after request; and how many of
        each: [requests]. A run ends before a bad row, unless that is the root's.

        Args:
            token_ids: [rows], the token of each row.
            bad: [rows], rows without a token.
        """
        requests = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        shape = (len(self.starts) - 1, len(self.tree.parents))
        sampled, drafts = np.full(shape, -2, np.int64), np.full(shape, -1, np.int64)
        nodes = self._nodes()
        sampled[requests, nodes] = token_ids if bad is None else np.where(bad, -2, token_ids)
        drafts[requests, nodes] = self.judged
        paths, lengths = accepted_paths(np.array(self.tree.parents), sampled, drafts)
        # [requests, 1 + depth] nodes whose rows give a token, the root's first
        path_nodes = np.concatenate([np.zeros((shape[0], 1), np.int64), paths], axis=1)
        if bad is not None:
            last = self.starts[:-1] + path_nodes[np.arange(shape[0]), lengths]
            lengths = lengths - (bad[last] & (lengths > 0))
        counts = lengths + 1
        inside = np.arange(path_nodes.shape[1]) < counts[:, None]
        rows: _Ids = (self.starts[:-1, None] + path_nodes)[inside]
        return rows, counts

    def _nodes(self) -> _Ids:
        """[rows], the node of each."""
        return _within(self.starts)


_Ids = NDArray[np.int64]


def _within(starts: _Ids) -> _Ids:
    """Return the index of each row among those of its request: [rows]. starts: [requests + 1]."""
    return np.arange(starts[-1]) - starts[:-1].repeat(starts[1:] - starts[:-1])


@frozen
class Chains:
    """The rows of logits of requests with chains of drafts, one request after another. A request
    with d drafts has d + 1 rows; row i follows i drafts."""

    starts: _Ids  # [requests + 1] int64, first row of each
    # [rows] int64, the draft that a row's token must equal; -1 in the last row of each.
    judged: _Ids

    @staticmethod
    def of(counts: NDArray[np.integer], tokens: NDArray[np.integer]) -> Chains:
        """Return the rows that check these drafts.

        Args:
            counts: [requests], drafts of each request.
            tokens: [rows], the token before each row: a request's newest token, then its drafts.
        """
        starts = np.zeros(len(counts) + 1, np.int64)
        np.add.accumulate(counts + 1, out=starts[1:])
        judged = np.empty(len(tokens), np.int64)
        judged[:-1] = tokens[1:]
        judged[starts[1:] - 1] = -1
        return Chains(starts, judged)

    def depths(self) -> _Ids:
        """[rows], how many drafts come before each row."""
        return _within(self.starts)

    def supposed(self) -> Supposed:
        """Return the drafts that each row follows."""
        depths = self.depths()
        rows = np.repeat(np.arange(len(depths)), depths)
        firsts = np.cumsum(depths) - depths  # where the entries of a row begin
        within = np.arange(len(rows)) - np.repeat(firsts, depths)
        return Supposed(rows, self.judged[rows - depths[rows] + within])

    def offers(self) -> tuple[_Ids, _Ids]:
        """Return pairs of a row and the draft it judges: [drafts] each."""
        rows = np.flatnonzero(self.judged >= 0)
        return rows, self.judged[rows]

    def accepted(self, token_ids: _Ids, bad: NDArray[np.bool_] | None = None) -> _Ids:
        """Return the number of accepted drafts of each request: [requests]. Request i outputs the
        tokens of its first accepted[i] + 1 rows.

        Args:
            token_ids: [rows], the token of each row.
            bad: [rows], rows without a token. The output ends before the first of them, and the
                next step computes that row again as without drafts. A request whose first row is
                bad has no token at all.
        """
        wrong = token_ids != self.judged
        if bad is not None:
            wrong |= bad
        ends = wrong.nonzero()[0]  # the last row of a request is always one
        starts = self.starts[:-1]
        first = ends[ends.searchsorted(starts)]
        counts: _Ids = first - starts
        if bad is not None:
            counts -= bad[first] & (counts > 0)
        return counts

    def output(
        self, token_ids: _Ids, bad: NDArray[np.bool_] | None = None
    ) -> tuple[_Ids, NDArray[np.integer]]:
        """Return which rows' tokens are output: [tokens], request after request; and how many of
        each: [requests]. See `accepted`."""
        lengths = self.accepted(token_ids, bad) + 1
        ends = lengths.cumsum()
        firsts: _Ids = self.starts[:-1] - ends + lengths  # less what is output before
        return firsts.repeat(lengths) + np.arange(ends[-1]), lengths


def accepted_paths(parents: _Ids, token_ids: _Ids, drafts: _Ids) -> tuple[_Ids, _Ids]:
    """Return the accepted path of each request through a tree of drafts. Node 0 is the root, the
    newest token; of equal siblings the first is followed.

    Args:
        parents: [nodes], each before its children; -1 for the root.
        token_ids: [requests, nodes], the token that the row of each node gives.
        drafts: [requests, nodes], the token at each node; -1 where there is none.

    Returns:
        paths: [requests, depth] the nodes after the root, as far as lengths: [requests].
    """
    requests = np.arange(len(drafts))
    node = np.zeros(len(drafts), np.int64)
    alive = np.ones(len(drafts), np.bool_)
    paths: list[_Ids] = []
    lengths = np.zeros(len(drafts), np.int64)
    while len(parents) > 1:
        fits = (parents == node[:, None]) & (drafts == token_ids[requests, node][:, None])
        fits[:, 0] = False
        fits &= alive[:, None] & (drafts >= 0)
        alive = fits.any(axis=1)
        if not alive.any():
            break
        node = np.where(alive, fits.argmax(axis=1), node)
        paths.append(node)
        lengths += alive
    depth = np.stack(paths, axis=1) if paths else np.zeros((len(drafts), 0), np.int64)
    return depth, lengths


def coupled(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens of the distribution p that equal drafts of the distribution q as often as
    possible.

    Args:
        p, q: [n, vocab] float32, probabilities.
        drafts: [n] int64, drawn from q.
        accept, uniforms: [n] float64 in [0, 1): random numbers of the acceptance, and of the draw
            after a rejection.

    Returns:
        [n] int64.
    """
    of_draft = drafts[:, None]
    chance, guess = (x.gather(1, of_draft)[:, 0].double() for x in (p, q))
    refused = accept * guess >= chance
    if p.device.type != "cpu":  # reading which ones on the host takes longer than drawing for all
        return torch.where(refused, _drawn_instead(p, q, uniforms), drafts)
    rejected = refused.nonzero()[:, 0]
    if not len(rejected):
        return drafts
    drawn = _drawn_instead(p[rejected], q[rejected], uniforms[rejected])
    return drafts.index_copy(0, rejected, drawn)


def _drawn_instead(p: Tensor, q: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens from norm(max(0, p - q)): [n] int64. Arguments as in `coupled`."""
    mass = (p - q).clamp_(min=0).cumsum(-1, dtype=torch.float64)
    # If p equals q, the sum may be zero, or negative by rounding.
    lost = mass[:, -1:] <= 0
    if p.device.type != "cpu" or bool(lost.any()):
        mass = torch.where(lost, p.cumsum(-1, dtype=torch.float64), mass)
    point = uniforms[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, point, right=True)[:, 0]


def typical(p: Tensor, drawn: Tensor, owners: Tensor, drafts: Tensor, rule: Typical) -> Tensor:
    """Replace drawn tokens by drafts that are likely enough (lossy; see `Typical`). A drawn token
    that equals a draft stays; of several drafts the most probable is taken, of equal ones the
    first.

    Args:
        p: [n, vocab] float32, probabilities. drawn: [n] int64, by them.
        owners: [m] int64, the row that each draft is offered to. drafts: [m] int64.

    Returns:
        [n] int64.
    """
    bound = rule.delta * torch.exp(-torch.special.entr(p).sum(-1))
    share = p[owners, drafts]
    share = torch.where(share > bound.clamp(max=rule.epsilon)[owners], share, 0.0)
    share = torch.where(drafts == drawn[owners], 2.0, share)  # above every probability
    best = torch.zeros_like(bound).scatter_reduce(0, owners, share, "amax")
    order = torch.arange(len(drafts), device=p.device)
    order = torch.where((share > 0) & (share == best[owners]), order, len(drafts))
    first = torch.full_like(drawn, len(drafts)).scatter_reduce(0, owners, order, "amin")
    return torch.where(first < len(drafts), drafts[first.clamp(max=len(drafts) - 1)], drawn)
