"""Choice of the tokens that a layer with a budget keeps (`spec.kv.Budget`).

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


def weights_of(queries: Tensor, k: Tensor) -> Tensor:
    """Return the attention of the last queries to each key, summed over heads and queries: [keys].

    Args:
        queries: [queries, heads, head_dim] fp32, scaled, of the last keys.
        k: [keys, kv_heads, head_dim] fp32.
    """
    last, heads, _ = queries.shape
    count, kv_heads, _ = k.shape
    # The queries of a kv head, one after another, each with the heads of its group.
    grouped = queries.unflatten(1, (kv_heads, heads // kv_heads)).transpose(0, 1)
    # [queries, last keys]
    hidden = torch.ones(last, last, dtype=torch.bool, device=k.device).triu(1)
    total = torch.zeros(count, device=k.device)
    for head in range(kv_heads):
        rows = grouped[head].flatten(0, 1)
        scores = torch.matmul(rows, k[:, head].t().contiguous())
        scores = scores.unflatten(0, (last, -1))  # [queries, group, keys]
        scores[..., count - last :].masked_fill_(hidden[:, None], -torch.inf)
        total += scores.softmax(-1).sum((0, 1))
    return total


def kept_keys(queries: Tensor, k: Tensor, budget: Budget) -> Tensor:
    """Return which keys are kept: [tokens] int64, ascending. Of equal ones the earlier are kept.

    Args:
        queries, k: see `weights_of`; more keys than are kept.
    """
    count, last = len(k), budget.last
    middle = weights_of(queries, k)[budget.first : count - last]
    means = avg_pool1d(middle[None], NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)[0]
    best = means.sort(descending=True, stable=True).indices[: budget.tokens - budget.min_tokens]
    return torch.cat(
        (
            torch.arange(budget.first, device=k.device),
            best.sort().values + budget.first,
            torch.arange(count - last, count, device=k.device),
        )
    )
