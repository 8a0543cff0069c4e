"""Operations divided among processes, here threads, give the undivided results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers.kernel_cases import Maker
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON
from helpers.thread_ranks import Board, ThreadGroup
from helpers.weight_makers import make_weight
from torch import Tensor

from kvik.kernels import torch_group
from kvik.kernels.cut_ops import cut_ops, cuts_inputs
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import (
    Matrix,
    MatrixSpec,
    Weight,
    float_weight,
)
from kvik.spec.shares import Between

CPU = torch.device("cpu")
HIDDEN, INNER, TOKENS, SIZE = 96, 160, 5, 3


def triton_table() -> Ops:
    pytest.importorskip("triton", reason=NO_TRITON)
    from kvik.kernels.triton.ops import triton_ops

    table, lock = triton_ops(CPU), threading.Lock()

    def alone(operation: Callable[..., Any]) -> Callable[..., Any]:
        """The interpreter runs one thread at a time."""

        def run(*args: Any) -> Any:
            with lock:
                return operation(*args)

        return run

    return Ops(**{one.name: alone(getattr(table, one.name)) for one in fields(table)})


TABLES: dict[str, Callable[[], Ops]] = {
    "reference": lambda: REFERENCE,
    "torch": lambda: TORCH,
    "triton": triton_table,
}


def weight_of(kind: str, rows: int, inputs: int) -> Weight:
    return make_weight(kind, Maker(torch.default_generator, torch.float32, CPU), rows, inputs)


def matrix(ops: Ops, weight: Weight, bias: Tensor | None, **more: object) -> Matrix:
    spec = MatrixSpec(
        weight.kind, weight.outputs, weight.inputs, bias is not None, None, torch.float32, CPU
    )
    made = ops.matrix(replace(spec, **more))
    for first in range(0, weight.outputs, 48):  # in runs across the boundaries of shares
        end = min(first + 48, weight.outputs)
        for low, high in ops.owned(made, first, end - first):
            ops.pack_rows(made, low, weight.rows(slice(low, high)))
    if bias is not None:
        made.bias.copy_(bias)
    return made


def together(
    table: Ops, fast: bool, work: Callable[[Ops], Tensor], *, whole_experts: bool = False
) -> Tensor:
    """Return the result of all ranks, which must be the same."""
    board = Board(SIZE)
    groups = [ThreadGroup(board, rank) for rank in range(SIZE)]
    way = {"fast": fast, "whole_experts": whole_experts}
    with ThreadPoolExecutor(SIZE) as pool:
        found = [*pool.map(lambda group: work(cut_ops(table, group, **way)), groups)]
    assert len({group.digest for group in groups}) == 1
    assert all(torch.equal(found[0], other) for other in found[1:])
    return found[0]


KINDS = ("float", "int8", "int4-32-zeros", "mxfp4", "int4-32-ordered")


@pytest.mark.parametrize("table", [*TABLES])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [False, True])
@INTERPRETED_ONLY
def test_an_mlp(table: str, kind: str, fast: bool) -> None:
    torch.manual_seed(0)
    gate_up, down = weight_of(kind, 2 * INNER, HIDDEN), weight_of(kind, HIDDEN, INNER)
    offsets, last = torch.randn(2 * INNER), torch.randn(HIDDEN)
    x, residual = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    made = Between(INNER, 32)

    def work(ops: Ops) -> Tensor:
        first = matrix(ops, gate_up, offsets, activation="silu_and_mul", between=made)
        second = matrix(ops, down, last, between=replace(made, read=True))
        return ops.linear(ops.linear(x, first, None), second, residual.clone())

    ops = TABLES[table]()
    right = work(ops)
    torch.testing.assert_close(together(ops, fast, work), right, rtol=1e-4, atol=1e-3)


def test_the_division_of_a_sum_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    down, x = weight_of("float", HIDDEN + 1, INNER), torch.randn(TOKENS, INNER)
    residual, between = torch.randn(TOKENS, HIDDEN + 1), Between(INNER, 32, read=True)

    def work(ops: Ops) -> Tensor:
        return ops.linear(x, matrix(ops, down, None, between=between), residual.clone())

    whole = together(TORCH, True, work)
    monkeypatch.setattr(torch_group, "SHARED_SUMS", 0)
    assert torch.equal(together(TORCH, True, work), whole)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_projections_into_heads(kv_heads: int, fast: bool) -> None:
    """Of queries with a gate each, keys and values; the next product only uses own heads."""
    torch.manual_seed(0)
    heads, dim = 4, 8
    counts = (heads, heads, kv_heads, kv_heads)
    parts = tuple((i < 2, dim) for i in range(4))
    made = Between(heads, dim, kv_heads, parts)
    fused, out = (float_weight(torch.randn(n, m)) for n, m in ((sum(counts) * dim, 32), (32, 32)))
    bias, x = torch.randn(sum(counts) * dim), torch.randn(TOKENS, 32)

    def work(ops: Ops) -> Tensor:
        qkv = ops.linear(x, matrix(ops, fused, bias, between=made), None)
        q, gate, *_ = qkv.split_with_sizes([count * dim for count in counts], 1)
        o = matrix(ops, out, None, between=replace(made, read=True))
        return ops.linear(ops.gated(q, gate, "sigmoid"), o, None)

    right = work(TORCH)
    torch.testing.assert_close(together(TORCH, fast, work), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("vocab", [97, 40])  # of 40, one process has none
def test_a_table_of_tokens_and_the_head(vocab: int, fast: bool) -> None:
    torch.manual_seed(0)
    weight, x = float_weight(torch.randn(vocab, HIDDEN)), torch.randn(TOKENS, HIDDEN)
    ids = torch.tensor([0, vocab - 1, 31, 32, 33])

    def work(ops: Ops) -> Tensor:
        table = matrix(ops, weight, None)
        found = ops.matrix_rows(table, ids, torch.float32)
        return torch.cat((found, ops.linear(x, table, None)), 1)

    torch.testing.assert_close(together(TORCH, fast, work), work(TORCH), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "table", ["reference", "torch", pytest.param("triton", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("kind", ["float", "int4-32-zeros", "int4-32-ordered"])
@pytest.mark.parametrize("cut", ["exact", "fast", "whole"])
@INTERPRETED_ONLY
def test_experts(table: str, kind: str, cut: str) -> None:
    """Of three processes, two have one of four whole experts and one has two."""
    torch.manual_seed(0)
    ups = [weight_of(kind, 2 * INNER, HIDDEN) for _ in range(4)]
    downs = [weight_of(kind, HIDDEN, INNER) for _ in range(4)]
    biases = [(torch.randn(2 * INNER), torch.randn(HIDDEN)) for _ in range(4)]
    x, residual = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    ids, weights = torch.tensor([[0, 3], [2, 1], [3, 0], [0, 1], [2, 3]]), torch.rand(TOKENS, 2)
    made = Between(INNER, 32)

    def work(ops: Ops) -> Tensor:
        up, down = [], []
        for expert, (first, second) in enumerate(biases):
            own = {"expert": (expert, 4), "between": made}
            up.append(matrix(ops, ups[expert], first, activation="silu_and_mul", **own))
            own["between"] = replace(made, read=True)
            down.append(matrix(ops, downs[expert], second, **own))
        return ops.experts(x, ids, weights, ops.expert_set(up, down), residual.clone())

    ops = TABLES[table]()
    found = together(ops, cut != "exact", work, whole_experts=cut == "whole")
    torch.testing.assert_close(found, work(ops), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "runs", "can"),
    [
        ("float", [(0, 7), (7, 160)], True),
        ("int4-32-zeros", [(0, 64), (64, 160)], True),
        ("int4-32-zeros", [(0, 48), (48, 160)], False),
        ("int4-32-ordered", [(0, 64), (64, 160)], False),
        ("int8", [(0, 50), (50, 160)], True),
    ],
)
def test_weights_that_can_be_cut_by_inputs(
    kind: str, runs: list[tuple[int, int]], can: bool
) -> None:
    assert cuts_inputs(weight_of(kind, 32, INNER).kind, INNER, runs) == can


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_some_inputs_of_a_weight(kind: str) -> None:
    torch.manual_seed(0)
    weight = weight_of(kind, 32, INNER)
    assert torch.equal(weight.columns(64, 160).dequantized(), weight.dequantized()[:, 64:160])
