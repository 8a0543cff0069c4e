"""The choice of experts for each token.

Floor: a launch; the logits are read once, and a warp searches the logits of a token in registers,
once for each expert chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.activation import sigmoid
from kvik.kernels.triton.launch import launch, power_of_two
from kvik.spec.experts import SCORES, Router

BEHIND = tl.constexpr(0x7FFFFFFF)  # larger than all ids
MOST = tl.constexpr(3.4028234663852886e38)  # largest fp32 number


@triton.jit
def _numbers(x):
    """Replace NaN, which only a correction can cause, by infinity, so that it sorts first."""
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _first_best(x, ids, AXIS: tl.constexpr):
    """Return the largest number and the lowest id that has it."""
    best = tl.max(x, AXIS, keep_dims=True)
    return best, tl.min(tl.where(x == best, ids, BEHIND), AXIS, keep_dims=True)


@triton.jit
def _of_kept_groups(
    choice, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr
):
    """Return choice [groups, experts of a group], with -inf in groups not among the best."""
    GROUP_BLOCK: tl.constexpr = choice.shape[0]
    SIZE_BLOCK: tl.constexpr = choice.shape[1]
    place = tl.arange(0, SIZE_BLOCK)[None, :]
    best, at = _first_best(choice, place, 1)
    if TWO and SIZE > 1:
        second = tl.max(tl.where(place == at, float("-inf"), choice), 1, keep_dims=True)
        best = _numbers(best + second)
    group = tl.arange(0, GROUP_BLOCK)[:, None]
    left = group < GROUPS
    for _ in tl.static_range(KEPT):
        _, chosen = _first_best(
            tl.where(left, best, float("-inf")), tl.where(left, group, BEHIND), 0
        )
        left = left & (group != chosen)
    return tl.where(left, float("-inf"), choice)


@triton.jit
def _root_softplus(x):
    """sqrt(max(x, 0) + log(1 + y)) with y = exp(-|x|) and log(1 + y) = 2 artanh(y / (2 + y))."""
    y = tl.exp(-tl.abs(x))
    z = y / (y + 2.0)
    series = tl.full(x.shape, 1.0 / 15.0, tl.float32)
    for n in tl.static_range(7):
        series = series * z * z + 1.0 / (13.0 - 2.0 * n)
    return tl.sqrt(tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit
def route_kernel(
    logits, correction, each_scale, given, ids, weights, stride, scale, jitter,
    EXPERTS: tl.constexpr, ACTIVE: tl.constexpr, SCORES: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, TWO: tl.constexpr, NORMALISED: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr, ACTIVE_BLOCK: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """grid [tokens]; logits [tokens, EXPERTS], correction and each_scale [EXPERTS] or None, given
    (or None), ids and weights [tokens, ACTIVE]. The experts of a group are a row of a tile. SCORES:
    index in `SCORES`. TWO: the score of a group is the sum of its best two. ZERO: how many of the
    last experts return their input; not 0: ids and weights have a further column."""
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group, place = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, SIZE_BLOCK)[None, :]
    expert = group * SIZE + place
    inside = (group < GROUPS) & (place < SIZE)
    x = tl.load(logits + token * stride + expert, mask=inside, other=float("-inf"))
    if SCORES == 4:
        scores = _root_softplus(x)
    elif SCORES >= 2:
        scores = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -MOST), MOST)
    elif SCORES == 1:
        scores = sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    scores = tl.where(scores == scores, scores, 0.0)
    choice = scores
    if correction is not None:
        choice = _numbers(scores + tl.load(correction + expert, mask=inside, other=0.0))
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _of_kept_groups(choice, GROUPS, SIZE, KEPT, TWO)
    left = tl.where(inside, expert, BEHIND)
    k = tl.arange(0, ACTIVE_BLOCK)
    found_ids = tl.zeros((ACTIVE_BLOCK,), tl.int32)
    found = tl.zeros((ACTIVE_BLOCK,), tl.float32)
    for i in range(ACTIVE):
        best = tl.max(tl.max(tl.where(left == BEHIND, float("-inf"), choice), 1), 0)
        chosen = tl.min(tl.min(tl.where(choice == best, left, BEHIND), 1), 0)
        if given is not None:
            chosen = tl.load(given + token * ACTIVE + i).to(tl.int32)
        score = tl.sum(tl.sum(tl.where(left == chosen, scores, 0.0), 1), 0)
        if SCORES == 2:
            far = (score - scores) / tl.maximum(tl.abs(scores), score) > 2.0 * jitter
            shares = tl.where(far | (left == BEHIND), 0.0, tl.exp(scores - score))
            score = 1.0 / tl.sum(tl.sum(shares, 1), 0)
        if SCORES == 3:
            score = sigmoid(score)
        found_ids = tl.where(k == i, chosen, found_ids)
        found = tl.where(k == i, score, found)
        left = tl.where(left == chosen, BEHIND, left)
    if NORMALISED:
        found = found / tl.maximum(tl.sum(found, 0), 1.1754943508222875e-38)
    COLUMNS: tl.constexpr = ACTIVE + (1 if ZERO > 0 else 0)
    to = token * COLUMNS + k
    found = found * scale
    if each_scale is not None:
        found = found * tl.load(each_scale + found_ids, mask=k < ACTIVE, other=0.0)
    if ZERO > 0:
        returns = (k < ACTIVE) & (found_ids >= EXPERTS - ZERO)
        total = tl.sum(tl.where(returns, found, 0.0), 0)
        found = tl.where(k == ACTIVE, total, found)
        found_ids = tl.where(returns | (k == ACTIVE), -1, found_ids)
    tl.store(ids + to, found_ids.to(tl.int64), mask=k < COLUMNS)
    tl.store(weights + to, found, mask=k < COLUMNS)


def route(
    logits: Tensor,
    router: Router,
    correction: Tensor | None,
    scales: Tensor | None,
    given_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Ops.route`."""
    shape, device = (len(logits), router.columns), logits.device
    ids = torch.empty(*shape, dtype=torch.int64, device=device)
    weights = torch.empty(*shape, dtype=torch.float32, device=device)
    if not len(logits):
        return ids, weights
    constants = (
        router.outputs,
        router.active,
        SCORES.index(router.scores),
        router.groups,
        router.kept_groups,
        router.group_by == "best two",
        router.normalised,
        power_of_two(router.groups),
        power_of_two(router.outputs // router.groups),
        power_of_two(router.columns),
        router.zero,
    )
    tensors = (logits, correction, scales, given_ids, ids, weights)
    numbers = (logits.stride(0), router.scale, router.jitter)
    launch(route_kernel, (len(logits),), tensors, numbers, constants, num_warps=1)
    return ids, weights
