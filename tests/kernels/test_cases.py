"""Every implementation of every operation compared with the reference."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import pytest
import torch
from helpers.compared import check_case
from helpers.kernel_cases import (
    CASES,
    DTYPES,
    Argument,
    Case,
    Maker,
    arguments,
    as_integers,
    outputs,
)
from helpers.optional_native import instruction_sets
from helpers.weight_makers import WEIGHT_MAKERS, make_weight
from torch import Tensor

from kvik.kernels import torch_ops
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.rounding import round_tokens
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import Activation, MatrixSpec, Weight, in_nibbles
from kvik.spec.weight_kind import WeightKind

CPU = torch.device("cpu")
ISAS = instruction_sets()
NAMES = ["reference", "torch", *ISAS]


@cache
def implementation(name: str, threads: int = 1) -> Ops:
    """Return an implementation by name; the native kernels by instruction set."""
    if name in ISAS:
        from kvik.kernels.cpu.native import Native
        from kvik.kernels.cpu.ops import native_ops

        return native_ops(Native(threads, name))
    return {"reference": REFERENCE, "torch": TORCH}[name]


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    """Native kernels do not support float16."""
    return (torch.float32, torch.bfloat16) if name in ISAS else DTYPES


NAMED_DTYPES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name in NAMES
    for dtype in dtypes_of(name)
]


def rounded(args: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Round x in the arguments as the native kernels do for products with weights of few bits."""
    x, weight, *rest = args if len(args) > 1 else (*args, None)
    if not isinstance(x, Tensor) or not isinstance(weight, Weight):
        return as_integers(args)
    if weight.order is not None:
        kept, *_ = rounded((x[:, weight.order], weight.plain()))
        return (torch.empty_like(kept).index_copy_(1, weight.order.long(), kept), weight, *rest)
    if in_nibbles(weight.kind):
        return as_integers((round_tokens(x, weight.kind.group).to(x.dtype), weight, *rest))
    if not weight.kind.floats and weight.kind.activations == "float":
        return (x.bfloat16().to(x.dtype), weight, *rest)
    return args


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.name}")
def test_matches_reference(case: Case) -> None:
    for name in ("torch", *ISAS[:1]):
        check_by_name(name, case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.name}")
def test_other_instruction_sets_match_the_reference(case: Case) -> None:
    for name in ISAS[1:]:
        check_by_name(name, case)


def check_by_name(name: str, case: Case) -> None:
    """Check a case, and that no bit changes with the number of threads."""
    for dtype in dtypes_of(name):
        if name not in ISAS:
            check_case(implementation(name), case, dtype)
            continue
        found = check_case(implementation(name), case, dtype, rounded=rounded)
        by_two = outputs(implementation(name, 2), case, arguments(case, dtype, CPU))
        for a, b in zip(found, by_two, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name.endswith("-plain-bias")], ids=lambda c: c.name
)
def test_products_of_a_few_rows_at_a_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised weights are dequantised a few rows at a time."""
    monkeypatch.setattr(torch_ops, "PIECE", 700)
    check_case(TORCH, case)


@pytest.mark.parametrize("case", [c for c in CASES if c.op == "recurrence"], ids=lambda c: c.name)
def test_the_delta_rule_in_chunks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "CHUNK", 3)
    check_case(TORCH, case)


@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
@pytest.mark.parametrize("kind", [*WEIGHT_MAKERS, "w8a8-32-ordered"])
@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_packed_in_runs(name: str, kind: str, activation: Activation | None) -> None:
    """In any order, across gate and up, and with floats of another dtype than the matrix."""
    ops = implementation(name, threads=2)
    weight = make_weight(kind, Maker(torch.Generator().manual_seed(0), torch.float16, CPU), 150, 64)
    stored = WeightKind("float32") if weight.kind.floats else weight.kind
    spec = MatrixSpec(stored, 150, 64, False, activation, torch.float32, CPU)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    found = []
    for runs in ([(0, 150)], [(70, 100), (0, 33), (100, 150), (33, 70)]):
        matrix = ops.matrix(spec)
        for first, last in runs:
            ops.pack_rows(matrix, first, weight.rows(slice(first, last)))
        found.append(ops.linear(x, matrix, None))
    assert torch.equal(*found) and found[0].any()


def test_every_operation_has_cases() -> None:
    # Each case creates and packs its matrices, and joins its experts.
    assert {"matrix", "owned", "pack_rows", "expert_set", *(case.op for case in CASES)} == {
        field.name for field in fields(Ops)
    }


@pytest.mark.parametrize(("name", "dtype"), NAMED_DTYPES)
def test_nan_is_the_largest(name: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(5, 70, dtype=dtype)
    logits[0, 0] = logits[1, 69] = logits[2, 33] = torch.nan
    logits[2, 34] = torch.inf
    logits[3, 7] = torch.inf
    top, ids = implementation(name).largest(logits)
    assert top.isnan().tolist() == [True, True, True, False, False]
    assert top[3] == torch.inf and ids[3:].tolist() == [7, 0]
