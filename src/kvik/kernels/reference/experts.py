"""The choice of experts for each token, and the MLPs of the chosen experts.

A router scores all experts of a layer, and a token goes through the `active` best of them; the
output is the sum of their outputs, weighted by their scores (Shazeer et al. 2017, arXiv
1701.06538). Routers differ in how scores become a choice and weights (`spec/experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.kernels.weights import ExpertSet, Matrix
from kvik.spec.experts import Router

Product = Callable[[Tensor, Matrix, Tensor | None], Tensor]  # `Ops.linear`


def route(
    logits: Tensor,
    router: Router,
    correction: Tensor | None,
    scales: Tensor | None,
    given_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token; see `Router`.

    Args:
        logits: [tokens, experts] fp32. correction, scales: [experts] fp32.
        given_ids: [tokens, active] int64, the ids; None: those with the best scores.

    Returns:
        ids [tokens, active] int64, the best first, and their weights in fp32; with experts that
        return their input a further column of both, see `Ops.route`.
    """
    scores = logits
    if router.scores in ("softmax", "sigmoid"):
        scores = logits.sigmoid() if router.scores == "sigmoid" else logits.softmax(-1)
    elif router.scores == "sqrtsoftplus":
        scores = F.softplus(logits).sqrt()
    scores = scores.nan_to_num(0.0)
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        choice = _of_kept_groups(choice, router)
    # A stable sort puts the lower of equal ids first.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : router.active]
    ids = ids if given_ids is None else given_ids
    mixes = router.scores == "sparsemixer"
    weights = _among_near(scores, ids, router.jitter) if mixes else scores.gather(1, ids)
    if router.scores == "logit":
        weights = weights.sigmoid()
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    weights = weights * router.scale
    weights = weights if scales is None else weights * scales[ids]
    if router.zero:
        returns = ids >= router.experts
        total = (weights * returns).sum(-1, keepdim=True)
        weights = torch.cat((weights, total), 1)
        ids = torch.cat((ids.masked_fill(returns, -1), ids.new_full((len(ids), 1), -1)), 1)
    return ids.contiguous(), weights


def _among_near(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """Return the share of each chosen logit among those near it that were not chosen before.

    Args:
        logits: [tokens, experts]. ids: [tokens, active].
    """
    remaining, shares = logits, []
    for chosen in ids.split(1, dim=1):
        top = logits.gather(1, chosen)
        is_far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * jitter
        near = remaining.masked_fill(is_far, -torch.inf)
        shares.append(near.softmax(-1).gather(1, chosen))
        remaining = remaining.scatter(1, chosen, -torch.inf)
    return torch.cat(shares, 1)


def _of_kept_groups(choice: Tensor, router: Router) -> Tensor:
    """Keep the experts of the best groups: [tokens, experts], -inf for the others."""
    grouped = choice.unflatten(-1, (router.groups, -1))  # [tokens, groups, experts of a group]
    best = 1 if router.group_by == "best" else min(2, grouped.shape[-1])
    of_group = grouped.topk(best, dim=-1).values.sum(-1)  # [tokens, groups]
    best_groups = of_group.sort(dim=-1, descending=True, stable=True).indices[
        :, : router.kept_groups
    ]
    out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best_groups, False)
    return grouped.masked_fill(out[:, :, None], -torch.inf).flatten(1)


def expert_set(up: Sequence[Matrix], down: Sequence[Matrix]) -> ExpertSet:
    """See `Ops.expert_set`."""
    return ExpertSet(tuple(up), tuple(down))


def experts_by(linear: Product) -> Callable[..., Tensor]:
    """Return an `Ops.experts` that computes each product by a call of `linear`."""

    def experts(
        x: Tensor, ids: Tensor, weights: Tensor | None, experts: ExpertSet, residual: Tensor | None
    ) -> Tensor:
        total = x.new_zeros(len(x), experts.outputs, dtype=torch.float32)
        for expert in ids[ids >= 0].unique().tolist():  # ascending
            rows, place = (ids == expert).nonzero(as_tuple=True)
            inputs = x[rows]
            if weights is not None and experts.weigh_inputs:
                inputs = (inputs * weights[rows, place, None]).to(x.dtype)
            made = linear(linear(inputs, experts.up[expert], None), experts.down[expert], None)
            if weights is not None and not experts.weigh_inputs:
                made = made.float() * weights[rows, place, None]
            total[rows] += made
        if residual is not None:
            total += residual
        return total.to(x.dtype)

    return experts
