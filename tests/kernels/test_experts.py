"""The router, and the products of the chosen experts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.kernel_cases import Maker, filled_matrix
from helpers.optional_native import instruction_sets, needs_native
from helpers.weight_makers import WEIGHT_MAKERS
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.reference.experts import experts_by
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import Activation, ExpertSet, Weight, ordered_weight
from kvik.spec.experts import Router

ISAS = instruction_sets()


def native(isa: str, threads: int = 1) -> Ops:
    from kvik.kernels.cpu.native import Native
    from kvik.kernels.cpu.ops import native_ops

    return native_ops(Native(threads, isa))


@pytest.fixture(scope="module", params=["reference", "torch", *ISAS])
def ops(request: pytest.FixtureRequest) -> Ops:
    return {"reference": REFERENCE, "torch": TORCH}.get(request.param) or native(request.param)


# The router.


def by_definition(
    logits: list[float],
    router: Router,
    correction: list[float] | None,
    scales: list[float] | None,
) -> tuple[list[int], list[float]]:
    """Return the experts of one token and their weights, in plain Python."""
    if router.scores in ("sparsemixer", "logit"):
        scores = logits
    elif router.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    elif router.scores == "sqrtsoftplus":
        scores = [math.log1p(math.exp(x)) ** 0.5 for x in logits]
    else:
        exps = [math.exp(x - max(logits)) for x in logits]
        scores = [x / sum(exps) for x in exps]
    added = correction or [0.0] * len(logits)
    choice = [s + c for s, c in zip(scores, added, strict=True)]
    size = router.experts // router.groups
    best = 1 if router.group_by == "best" else 2

    def of_group(g: int) -> float:
        return sum(sorted(choice[g * size : (g + 1) * size])[-best:])

    groups = sorted(range(router.groups), key=lambda g: (-of_group(g), g))[: router.kept_groups]
    allowed = [e for e in range(router.experts) if e // size in groups]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: router.active]
    weights = [scores[e] for e in ids]
    if router.scores == "sparsemixer":
        weights = [share(logits, e, ids[:n], router.jitter) for n, e in enumerate(ids)]
    if router.scores == "logit":
        weights = [1 / (1 + math.exp(-logits[e])) for e in ids]
    total = sum(weights) if router.normalised else 1.0
    each = scales or [1.0] * len(logits)
    return ids, [w / total * router.scale * each[e] for e, w in zip(ids, weights, strict=True)]


def share(logits: list[float], chosen: int, before: list[int], jitter: float) -> float:
    """Return the share of a logit among those near it that were not chosen before."""
    top, left = logits[chosen], [x for e, x in enumerate(logits) if e not in before]
    near = [x for x in left if top - x <= 2 * jitter * max(abs(x), top)]
    return 1 / sum(math.exp(x - top) for x in near)


ROUTERS = {
    "top-1": Router(7, 1, normalised=False),
    "all": Router(5, 5),
    "softmax": Router(64, 8, normalised=False),
    "sigmoid": Router(16, 4, "sigmoid"),
    "scaled": Router(12, 3, scale=0.5, scaled=True),
    "groups": Router(24, 3, groups=4, kept_groups=2, normalised=False, scale=16.0),
    "corrected": Router(32, 6, "sigmoid", True, 8, 4, "best two", scale=2.5),
    "sparsemixer": Router(16, 3, "sparsemixer", normalised=False, jitter=0.3),
    "logit": Router(16, 4, "logit", corrected=True, groups=4, kept_groups=2),
    "sqrtsoftplus": Router(16, 4, "sqrtsoftplus", corrected=True),
}


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_experts_are_chosen_by_definition(ops: Ops, router: Router) -> None:
    """Logits have few different values, so that experts and groups tie."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (40, router.experts), generator=generator).float()
    logits[1] = 0.0
    correction, added = None, None
    if router.corrected:
        correction = torch.randint(0, 3, (router.experts,), generator=generator) / 4
        added = correction.tolist()
    scales = torch.randn(router.experts, generator=generator) if router.scaled else None
    each = None if scales is None else scales.tolist()
    ids, weights = ops.route(logits, router, correction, scales, None)
    for row, chosen, shares in zip(logits.tolist(), ids, weights, strict=True):
        wanted, expected = by_definition(row, router, added, each)
        assert chosen.tolist() == wanted
        torch.testing.assert_close(shares, torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_a_row_of_nan_chooses_existing_experts(ops: Ops) -> None:
    logits = torch.full((2, 6), torch.nan)
    logits[1] = torch.arange(6)
    ids, _ = ops.route(logits, Router(6, 2), None, None, None)
    assert len(set(ids[0].tolist())) == 2 and int(ids.min()) >= 0 and int(ids.max()) < 6
    assert ids[1].tolist() == [5, 4]


# The products.

HIDDEN, INNER, EXPERTS, ACTIVE = 160, 96, 6, 3


def weights_of(kind: str, dtype: torch.dtype) -> list[tuple[Weight, Weight]]:
    m = Maker(torch.Generator().manual_seed(1), dtype, torch.device("cpu"))
    make = WEIGHT_MAKERS[kind]
    return [(make(m, 2 * INNER, HIDDEN), make(m, HIDDEN, INNER)) for _ in range(EXPERTS)]


def expert_set(ops: Ops, kind: str, dtype: torch.dtype, *, biased: bool = False) -> ExpertSet:
    generator = torch.Generator().manual_seed(2)

    def bias(rows: int) -> Tensor | None:
        return torch.randn(rows, generator=generator) if biased else None

    up, down = [], []
    activation: Activation = "clamped_swiglu" if biased else "silu_and_mul"  # as in gpt-oss
    for first, second in weights_of(kind, dtype):
        up.append(filled_matrix(ops, first, bias(2 * INNER), activation, dtype))
        down.append(filled_matrix(ops, second, bias(HIDDEN), None, dtype))
    return ops.expert_set(up, down)


def routed(rows: int, dtype: torch.dtype, loads: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, and the experts and weights of its rows."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    logits = torch.randn(rows, EXPERTS, generator=generator)
    if loads == "skewed":  # all rows have the same experts, the others none
        logits += torch.tensor([9.0, -9.0, 9.0, -9.0, -9.0, 9.0])
    return x, *REFERENCE.route(logits, Router(EXPERTS, ACTIVE), None, None, None)


@needs_native
@pytest.mark.parametrize("kind", WEIGHT_MAKERS)
@pytest.mark.parametrize("isa", ISAS)
def test_native_experts_are_sums_of_native_products(isa: str, kind: str) -> None:
    ops = native(isa, threads=2)
    for dtype, (rows, loads), weighed in product(
        (torch.float32, torch.bfloat16),
        ((1, "even"), (2, "even"), (33, "even"), (70, "skewed")),
        (False, True),
    ):
        experts = expert_set(ops, kind, dtype, biased=rows == 33)
        experts = replace(experts, weigh_inputs=weighed)
        x, ids, shares = routed(rows, dtype, loads)
        residual = x.flip(0).contiguous() if rows > 1 else None
        expected = experts_by(ops.linear)(x, ids, shares, experts, residual)
        found = ops.experts(x, ids, shares, experts, residual)
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_weight_may_multiply_the_input_of_its_expert(ops: Ops) -> None:
    x, ids, shares = routed(5, torch.float32, "even")
    expected = x.clone()
    for token, expert, weight in zip(
        torch.arange(5).repeat_interleave(ACTIVE), ids.flatten(), shares.flatten(), strict=True
    ):
        up, down = (part.values for part in weights_of("float", torch.float32)[expert])
        gate, value = (up @ (weight * x[token])).split(INNER)
        expected[token] += down @ (torch.nn.functional.silu(gate) * value)
    experts = replace(expert_set(ops, "float", torch.float32), weigh_inputs=True)
    found = ops.experts(x, ids, shares, experts, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("kind", ["float", "int4-32-zeros", "w8a8", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_bits_of_a_row_depend_on_nothing_else(isa: str, kind: str, weighed: bool) -> None:
    """Neither on the other rows, nor on the number of threads."""
    ops, dtype = native(isa), torch.bfloat16
    x, ids, shares = routed(45, dtype, "even")
    experts = replace(expert_set(ops, kind, dtype), weigh_inputs=weighed)
    whole = ops.experts(x, ids, shares, experts, None)
    for rows in (slice(0, 1), slice(7, 9), slice(20, 45)):
        part = ops.experts(
            x[rows], ids[rows].contiguous(), shares[rows].contiguous(), experts, None
        )
        assert torch.equal(part, whole[rows])
    others = native(isa, threads=3)
    again = replace(expert_set(others, kind, dtype), weigh_inputs=weighed)
    assert torch.equal(others.experts(x, ids, shares, again, None), whole)


@needs_native
def test_experts_may_have_different_orders_of_inputs() -> None:
    ops = native(ISAS[0])
    generator = torch.Generator().manual_seed(3)
    up, down = [], []
    for first, second in weights_of("int4-32-zeros", torch.float32):
        order = torch.randperm(HIDDEN, generator=generator).int()
        up.append(
            filled_matrix(ops, ordered_weight(first, order), None, "silu_and_mul", torch.float32)
        )
        down.append(filled_matrix(ops, second, None, None, torch.float32))
    for rows, weighed in ((1, False), (9, False), (9, True)):
        experts = replace(ops.expert_set(up, down), weigh_inputs=weighed)
        x, ids, shares = routed(rows, torch.float32, "even")
        found = ops.experts(x, ids, shares, experts, None)
        expected = experts_by(ops.linear)(x, ids, shares, experts, None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
