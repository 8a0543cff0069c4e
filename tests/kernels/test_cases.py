"""Every implementation of every operation compared with the reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from helpers.optional_native import instruction_sets
from torch import Tensor

from kvik.kernels import torch_ops
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.rounding import round_int4, round_int8, round_mxfp4, round_tokens
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import (
    Activation,
    MatrixSpec,
    Weight,
    float_weight,
    fp8_weight,
    in_nibbles,
    int4_min_weight,
    int4_weight,
    int8_weight,
    ordered_weight,
)
from kvik.spec.weight_kind import WeightKind
from kvik_bench.kernel_cases import CASES, DTYPES, Argument, Case, arguments, outputs

CPU = torch.device("cpu")
ISAS = instruction_sets()
NAMES = ["reference", "torch", *ISAS]


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
        return args
    if weight.order is not None:
        kept, *_ = rounded((x[:, weight.order], weight.plain()))
        assert isinstance(kept, Tensor)
        return (torch.empty_like(kept).index_copy_(1, weight.order.long(), kept), weight, *rest)
    if in_nibbles(weight.kind):
        return (round_tokens(x, weight.kind.group).to(x.dtype), weight, *rest)
    if not weight.kind.floats and weight.kind.activations == "float":
        return (x.bfloat16().to(x.dtype), weight, *rest)
    return args


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.name}")
def test_matches_reference(case: Case) -> None:
    for name in ("torch", *ISAS[:1]):
        check_case(name, case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.name}")
@pytest.mark.parametrize("isa", ISAS[1:])
def test_other_instruction_sets_match_the_reference(isa: str, case: Case) -> None:
    check_case(isa, case)


def check_case(name: str, case: Case) -> None:
    """Compare results with the reference, and check that other arguments do not change, nor any bit
    with the number of threads."""
    for dtype in dtypes_of(name):
        rtol, atol = case.tolerance(dtype)
        given, args, unchanged = (arguments(case, dtype, CPU) for _ in range(3))
        expected = outputs(REFERENCE, case, rounded(given) if name in ISAS else given)
        found = outputs(implementation(name), case, args)
        for i, before in enumerate(unchanged):
            if i not in (*case.spoiled, *case.written) and isinstance(before, Tensor):
                for after in (given[i], args[i]):
                    assert isinstance(after, Tensor) and torch.equal(after, before)
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        if name in ISAS:
            by_two = outputs(implementation(name, 2), case, unchanged)
            for a, b in zip(found, by_two, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name.endswith("-plain-bias")], ids=lambda c: c.name
)
def test_products_of_a_few_rows_at_a_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised weights are dequantised a few rows at a time."""
    monkeypatch.setattr(torch_ops, "PIECE", 700)
    rtol, atol = case.tolerance(torch.float32)
    (expected,) = outputs(REFERENCE, case, arguments(case, torch.float32, CPU))
    (found,) = outputs(TORCH, case, arguments(case, torch.float32, CPU))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", [c for c in CASES if c.op == "gated_delta"], ids=lambda c: c.name)
def test_the_delta_rule_in_chunks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "CHUNK", 3)
    rtol, atol = case.tolerance(torch.float32)
    expected = outputs(REFERENCE, case, arguments(case, torch.float32, CPU))
    found = outputs(TORCH, case, arguments(case, torch.float32, CPU))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def _in_groups(group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes [150, 64], and scales and minima of groups of them."""
    generator = torch.Generator().manual_seed(group)
    drawn = torch.randint(0, 127, (150, 64), generator=generator, dtype=torch.uint8)
    scales, minima = torch.randn(2, 150, 64 // group, generator=generator)
    return drawn, scales, minima


BYTES16, SCALES16, _ = _in_groups(16)
BYTES32, SCALES32, MINIMA32 = _in_groups(32)
WEIGHTS = (
    int8_weight(BYTES16.view(torch.int8), SCALES16, True, 16),
    int8_weight(BYTES32.view(torch.int8), SCALES32, False, 32),
    int4_min_weight(BYTES32[:, :32], SCALES32, MINIMA32, 32),
    fp8_weight(BYTES32.view(torch.float8_e4m3fn), SCALES32, 32),
    fp8_weight(BYTES32.view(torch.float8_e4m3fn), SCALES32, 32, "static", torch.tensor([0.01])),
    ordered_weight(
        int8_weight(BYTES16.view(torch.int8), SCALES16, True, 16), torch.arange(63, -1, -1).int()
    ),
    float_weight(torch.randn(150, 64, generator=torch.Generator().manual_seed(0)).half()),
    round_int8(torch.randn(150, 64, generator=torch.Generator().manual_seed(1)), True),
    round_int4(torch.randn(150, 64, generator=torch.Generator().manual_seed(2)), 32),
    int4_weight(BYTES32[:, :32], SCALES32, None, 32),
    round_mxfp4(torch.randn(150, 64, generator=torch.Generator().manual_seed(4))),
)


@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_packed_in_runs(name: str, weight: Weight, activation: Activation | None) -> None:
    """In any order, across gate and up, and with floats of another dtype than the matrix."""
    ops = implementation(name, threads=2)
    kind = WeightKind("float32") if weight.kind.floats else weight.kind
    spec = MatrixSpec(kind, 150, 64, False, activation, torch.float32, CPU)
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
