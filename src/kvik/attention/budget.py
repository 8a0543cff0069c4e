"""Choice of the tokens that a layer with a budget keeps (`spec.visible_keys.Budget`).

The last queries choose among the keys that a layer has of a request: their attention weights are
summed over queries and heads, and averaged over neighbours, so that runs of tokens are kept rather
than single ones (SnapKV, Li et al. 2024, arXiv 2404.14469, section 4.2). All heads of a layer keep
the same tokens (Kim and Jung, Mathematics 2025, 13(15), 2366, section 3), since a block holds whole
tokens.

The queries come from the forward itself, and are kept in a ring for each slot. So the choice
depends on the last tokens before a cut and on the cache, but not on how these were computed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvik.spec.visible_keys import Budget

NEIGHBOURS = 5  # keys whose weights are averaged


def weights_of(
    queries: Tensor, k: Tensor, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of the last queries to each key, summed over queries: [heads, keys].

    Those of a head do not depend on which other heads are computed here, to the bit.

    Args:
        queries: [queries, heads, head_dim] fp32, scaled, of the last keys.
        k: [keys, kv_heads, head_dim] fp32.
        softcap, sinks: see `AttentionSpec`; sinks are those of these heads.
    """
    last, heads, _ = queries.shape
    count, kv_heads, _ = k.shape
    hidden = torch.ones(last, last, dtype=torch.bool, device=k.device).triu(1)
    total = torch.empty(heads, count, device=k.device)
    for head in range(heads):
        if head % (heads // kv_heads) == 0:
            keys = k[:, head * kv_heads // heads].t().contiguous()
        scores = torch.matmul(queries[:, head].contiguous(), keys)  # [queries, keys]
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores[:, count - last :].masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].expand(last, 1)), 1)
        total[head] = scores.softmax(-1)[:, :count].sum(0)
    return total


def kept_keys(weights: Tensor, budget: Budget) -> Tensor:
    """Return which keys are kept: [tokens] int64, ascending. Of equal ones the earlier are kept.

    Args:
        weights: [heads, keys], of all heads, from `weights_of`; more keys than are kept.
    """
    count, last, device = weights.shape[1], budget.last, weights.device
    total = torch.zeros(count, device=device)
    for of_head in weights:  # one after the other, so that the bits do not depend on threads
        total += of_head
    middle = total[budget.first : count - last]
    means = avg_pool1d(middle[None], NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)[0]
    best = means.sort(descending=True, stable=True).indices[: budget.tokens - budget.min_tokens]
    return torch.cat(
        (
            torch.arange(budget.first, device=device),
            best.sort().values + budget.first,
            torch.arange(count - last, count, device=device),
        )
    )
