"""Draw one token per row by inverse CDF, and compute the probability of each token.

A row [vocab] of logits and one uniform number in [0, 1) determine its token. So the token does not
depend on other rows, and sampling keeps no state.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.ops import Draws, Masks, Penalties, Truncation

# Rules that drop unlikely tokens: top_k, top_p, min_p and typical_p, in this order.
#
# They work on weights: probabilities up to a factor per row, such that the largest weight of a row
# is 1. A dropped token has weight 0, so each rule sees the tokens left by the rule before it.
#
# Every sum over a row is a cumulative sum, because that is computed in order: a plain reduction may
# split a long row when it is alone in its batch, and then round differently from the same row in
# a larger batch.


def truncate(weights: Tensor, rules: Truncation) -> Tensor:
    """Apply rules to weights [rows, vocab] float32: dropped tokens become 0."""
    if rules.top_k is not None or rules.top_p is not None:
        weights = _top(weights, rules.top_k, rules.top_p)
    if rules.min_p is not None:
        weights = weights * (weights >= rules.min_p[:, None])
    if rules.typical_p is not None:
        weights = _typical(weights, rules.typical_p)
    return weights


def _top(weights: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Apply top_k and top_p, which keep the most likely tokens; of equal ones the lower ids."""
    rows, vocab = weights.shape
    count = weights.new_full((rows,), vocab, dtype=torch.int64) if top_k is None else top_k
    # How deep to sort each row: one beyond what it keeps, to detect equal weights.
    depth = torch.where(count < vocab, count + 1, 1)
    if top_p is not None:
        depth = torch.where((top_p < 1.0) & (count == vocab), vocab, depth)
    descending = _largest(weights, int(depth.max()))
    last = descending.shape[1] - 1
    if top_p is not None:
        mass = descending.cumsum(-1, dtype=torch.float64)
        total = mass.gather(1, (count - 1).clamp(max=last)[:, None])
        nucleus = torch.searchsorted(mass, top_p[:, None] * total)[:, 0] + 1
        count = torch.where(top_p < 1.0, torch.minimum(nucleus, count), count)
    threshold = descending.gather(1, (count - 1).clamp(max=last)[:, None])
    threshold = torch.where(count[:, None] < vocab, threshold, 0.0)
    next_below = descending.gather(1, count.clamp(max=last)[:, None])
    keep = weights >= threshold
    if bool((next_below == threshold).any()):
        higher, equal = weights > threshold, weights == threshold
        num_equal = count[:, None] - higher.sum(-1, keepdim=True)
        keep = higher | (equal & (equal.cumsum(-1) <= num_equal))
    return weights * keep


def _typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the tokens whose information is nearest to the entropy (Meister et al. 2022): the
    smallest set that reaches the mass `typical_p`, and tokens as near as its last one."""
    share = weights / weights.cumsum(-1, dtype=torch.float64)[:, -1:]  # float64
    entropy = torch.special.entr(share).cumsum(-1)[:, -1:]
    distance = (-share.log() - entropy).abs()
    order = _ascending_order(distance)
    mass = share.gather(1, order).cumsum(-1)
    last = torch.searchsorted(mass, typical_p[:, None]).clamp(max=share.shape[1] - 1)
    limit = distance.gather(1, order.gather(1, last))
    return weights * ((distance <= limit) | (typical_p[:, None] >= 1.0))


# On a CPU numpy sorts rows 5 to 30 times faster than torch; but topk is faster for few of many
# values.


def _largest(values: Tensor, depth: int) -> Tensor:
    """Return the `depth` largest of each row, descending."""
    if values.device.type != "cpu" or depth * 256 < values.shape[1]:
        return values.topk(depth).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)[:, :depth].contiguous()


def _ascending_order(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.argsort(dim=-1)
    return torch.from_numpy(np.argsort(values.numpy(), axis=-1))


# Penalties for tokens seen before: CTRL's repetition (Keskar et al. 2019, section 4.1), and the
# frequency and presence of OpenAI's API.


def penalize(logits: Tensor, penalties: Penalties) -> None:
    """Apply penalties to logits, [rows, vocab] float32, in place."""
    x = logits.index_select(0, penalties.rows)
    counts = penalties.counts.index_select(0, penalties.seen)
    generated = counts > 0
    seen = penalties.in_prompt.index_select(0, penalties.seen) | generated
    repetition = penalties.repetition[:, None]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= penalties.frequency[:, None] * counts
    x -= penalties.presence[:, None] * generated
    logits.index_copy_(0, penalties.rows, x)


def mask(logits: Tensor, masks: Masks) -> None:
    """Apply masks to logits, [rows, vocab] float32, in place."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    allowed = masks.words[:, ids // 32] >> (ids % 32) & 1  # [n, vocab]
    x = logits.index_select(0, masks.rows)
    logits.index_copy_(0, masks.rows, x.masked_fill(allowed == 0, -torch.inf))


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Draw from logits [n, vocab] -> [n] int64: the first token whose cumulative weight exceeds u
    times the total."""
    weights = _weights(logits, draws.temperature, draws.truncation)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # u is at most 1 - 2^-53, so the product is below the total however it is rounded
    point = draws.uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def probabilities(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
    """Return the distribution that `draw` draws from: logits [n, vocab] -> [n, vocab] float32."""
    weights = _weights(logits, temperature, truncation)
    total = weights.cumsum(-1, dtype=torch.float64)[:, -1:]
    return weights.div_(total)


def _weights(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
    weights = logits.float() - logits.amax(dim=-1, keepdim=True).float()
    return truncate(weights.div_(temperature[:, None]).exp_(), truncation)
