"""Routed experts by Triton: every kind of weight, rows by expert, and the launches of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON, device
from helpers.weight_makers import WEIGHT_MAKERS, make_weight
from torch import Tensor

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.compilations import compilation
from helpers.kernel_cases import Maker, filled_matrix, in_integers
from triton.runtime.interpreter import InterpretedFunction

from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.triton import expert_rows
from kvik.kernels.triton.experts import Tables
from kvik.kernels.triton.matrix_shapes import FEW, MANY, tile_of_experts, tokens_of_experts
from kvik.kernels.triton.ops import triton_ops
from kvik.kernels.weights import ExpertSet, MatrixSpec, Weight, int4_weight
from kvik.spec.experts import Router
from kvik.spec.weight_kind import WeightKind

OPS = triton_ops(device())
HIDDEN, INNER = 160, 96  # a partial step, and several tiles of outputs


def maker(dtype: torch.dtype) -> Maker:
    return Maker(torch.Generator().manual_seed(3), dtype, device())


def weights_of(name: str, m: Maker, experts: int) -> list[tuple[Weight, Weight]]:
    """Return up and down of each expert, with different calibrated scales."""

    def made(outputs: int, inputs: int, expert: int) -> Weight:
        weight = make_weight(name, m, outputs, inputs)
        if weight.input_scale is None:
            return weight
        return replace(weight, input_scale=weight.input_scale * (1 + expert / 4))

    return [(made(2 * INNER, HIDDEN, i), made(HIDDEN, INNER, i)) for i in range(experts)]


def experts_of(
    ops: Ops, weights: list[tuple[Weight, Weight]], dtype: torch.dtype, biased: bool
) -> ExpertSet:
    def bias(size: int, by: int) -> Tensor | None:
        return torch.arange(size, device=device()).sub(by).to(dtype) / size if biased else None

    pairs = list(enumerate(weights))
    up = [filled_matrix(ops, w, bias(2 * INNER, i), "silu_and_mul", dtype) for i, (w, _) in pairs]
    down = [filled_matrix(ops, w, bias(HIDDEN, i), None, dtype) for i, (_, w) in pairs]
    return ops.expert_set(up, down)


def chosen(rows: int, router: Router, seed: int = 0) -> tuple[Tensor, Tensor]:
    """All rows choose the last expert, none the one before it."""
    logits = torch.randn(rows, router.experts, generator=torch.Generator().manual_seed(seed))
    logits[:, -1], logits[:, -2] = 9, -9
    return OPS.route(logits.to(device()), router, None, None)


KINDS = [
    *(
        (name, torch.float32, False)
        for name in (*WEIGHT_MAKERS, "int4-32-zeros-ordered", "fp8-static-ordered")
    ),
    *((name, torch.bfloat16, False) for name in ("float", "int4-32-zeros-ordered", "int8")),
    *((name, torch.float32, True) for name in ("float", "w8a8", "int4-32-zeros-ordered")),
    ("float", torch.bfloat16, True),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype", "weighed"), KINDS, ids=str)
def test_every_kind_of_weight(name: str, dtype: torch.dtype, weighed: bool) -> None:
    """With biases, full blocks and a partial one."""
    m, router = maker(dtype), Router(4, 2)
    rows = 19
    assert tile_of_experts(2 * rows, router.experts).tokens == 16 < rows
    x, residual = m.normal(rows, HIDDEN), m.normal(rows, HIDDEN)
    weights, (ids, shares) = weights_of(name, m, router.experts), chosen(rows, router)

    def run(ops: Ops, weights: list[tuple[Weight, Weight]]) -> Tensor:
        experts = replace(experts_of(ops, weights, dtype, True), weigh_inputs=weighed)
        return ops.experts(x, ids, shares, experts, residual.clone()).cpu()

    integers = [(in_integers(up), in_integers(down)) for up, down in weights]
    found, expected = run(OPS, weights), run(REFERENCE, integers)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)
    else:
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=6e-2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["float", "int4-32-zeros", "int4-min", "fp8-32-group"])
def test_many_tokens_of_an_expert(name: str) -> None:
    m, rows = maker(torch.bfloat16), 196
    assert tile_of_experts(rows, 3) == MANY
    x, weights = m.normal(rows, HIDDEN), weights_of(name, m, 3)
    ids = torch.arange(rows, device=device())[:, None] // 150 * 2  # 150 rows of one, 46 of another
    shares = torch.ones(rows, 1, device=device())
    found, expected = (
        ops.experts(x, ids, shares, experts_of(ops, weights, m.dtype, False), None)
        for ops in (OPS, REFERENCE)
    )
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=6e-2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["float", "int4-32", "w8a8", "fp8-static"])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    """In a class of tokens, to the bit."""
    m, router = maker(torch.bfloat16), Router(4, 2)
    experts = experts_of(OPS, weights_of(name, m, 4), m.dtype, False)
    rows = 13
    x, (ids, shares) = m.normal(rows, HIDDEN), chosen(rows, router)
    together = OPS.experts(x, ids, shares, experts, None)
    assert min(tokens_of_experts(4, 2)) >= rows
    for some in (slice(0, 1), slice(4, 9)):
        alone = OPS.experts(x[some], ids[some], shares[some], experts, None)
        assert torch.equal(alone, together[some])


def test_rows_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several pieces of the ids; blocks have pairs of one expert, each pair once."""
    monkeypatch.setattr(expert_rows, "BLOCK", 16)
    monkeypatch.setattr(expert_rows, "COMPARED", 32)
    g = torch.Generator().manual_seed(5)
    for tokens, active, experts, size in (
        (1, 3, 9, 8),
        (23, 3, 5, 8),
        (7, 2, 6, 16),
        (40, 1, 1, 8),
    ):
        ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :active].contiguous()
        found = expert_rows.by_expert(ids.to(device()), experts, size)
        flat = ids.flatten()
        assert found.order.tolist() == flat.argsort(stable=True).tolist()
        assert found.blocks.shape[1] == expert_rows.max_blocks(len(flat), experts, size)
        met = []
        for expert, begin, end in found.blocks.t().tolist():
            if expert >= 0:
                mine = found.order[begin:end].tolist()
                assert 0 < len(mine) <= size and {int(flat[pair]) for pair in mine} == {expert}
                met += mine
        assert met == found.order.tolist()


def test_no_rows_and_unsupported_groups() -> None:
    m, router = maker(torch.float32), Router(3, 2)
    experts = experts_of(OPS, weights_of("float", m, 3), m.dtype, False)
    assert isinstance(experts.data, Tables)
    ids, shares = chosen(0, router)
    assert OPS.experts(m.normal(0, HIDDEN), ids, shares, experts, None).shape == (0, HIDDEN)

    def odd(outputs: int, inputs: int) -> Weight:
        values = m.integers(0, 255, outputs, inputs // 2, dtype=torch.uint8)
        return int4_weight(values, m.normal(outputs, inputs // 8).abs() / 40, None, 8)

    weights = [(odd(2 * INNER, HIDDEN), odd(HIDDEN, INNER)) for _ in range(3)]
    x, (ids, shares) = m.normal(4, HIDDEN), chosen(4, router)
    odds = experts_of(OPS, weights, m.dtype, False)
    assert odds.data is None
    expected = REFERENCE.experts(x, ids, shares, experts_of(REFERENCE, weights, m.dtype, False), x)
    torch.testing.assert_close(OPS.experts(x, ids, shares, odds, x), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, where a GPU is silent
def test_nan_scores_count_as_zero() -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    logits[0, 4], logits[1] = torch.nan, -torch.inf
    each = torch.randn(6, generator=torch.Generator().manual_seed(2))
    for router, scales in (
        (Router(6, 2, "sigmoid"), None),
        (Router(6, 2), each),
        (Router(6, 2, groups=3, kept_groups=2), None),
    ):
        there = None if scales is None else scales.to(device())
        ids, weights = OPS.route(logits.to(device()), router, None, there)
        expected = REFERENCE.route(logits, router, None, scales)
        assert ids.tolist() == expected[0].tolist()
        torch.testing.assert_close(weights.cpu(), expected[1])


def test_ties_go_to_the_lower_ids() -> None:
    logits = torch.zeros(1, 12, device=device())
    for router in (Router(12, 3), Router(12, 3, groups=4, kept_groups=2, group_by="best two")):
        assert OPS.route(logits, router, None, None)[0].tolist() == [[0, 1, 2]]


@INTERPRETED_ONLY
@pytest.mark.parametrize(
    "kind",
    [
        *(WeightKind("bfloat16"), WeightKind("int4", 128, "zeros")),
        WeightKind("fp8", 128, activations="group"),
    ],
    ids=str,
)
def test_experts_compile_once_for_each_class_of_tokens(
    kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()

    def bind(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add(compilation(self, *args, **options))

    monkeypatch.setattr(InterpretedFunction, "run", bind)
    cpu, dtype, router = torch.device("cpu"), torch.bfloat16, Router(16, 4)
    up = OPS.matrix(MatrixSpec(kind, 512, 256, False, "silu_and_mul", dtype, cpu))
    down = OPS.matrix(MatrixSpec(kind, 256, 256, False, None, dtype, cpu))
    experts = OPS.expert_set([up] * 16, [down] * 16)

    def step(tokens: int) -> None:
        ids, shares = OPS.route(torch.empty(tokens, 16), router, None, None)
        OPS.experts(torch.empty(tokens, 256, dtype=dtype), ids, shares, experts, None)

    bounds = tokens_of_experts(16, 4)
    for tokens in (*bounds, max(bounds) + 1):
        step(tokens)
    known = set(found)
    assert len([each for each in known if "_experts_kernel" in each]) == 2 * (len(FEW) + 1)
    for tokens in range(1, 300, 3):
        step(tokens)
    assert found == known
