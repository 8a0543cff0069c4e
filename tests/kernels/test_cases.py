"""Every implementation of every operation against the reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kvik.kernels import torch_ops
from kvik.kernels.cases import CASES, DTYPES, Case, arguments, outputs
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.select import select
from kvik.kernels.torch_ops import TORCH

CPU = torch.device("cpu")
IMPLEMENTATIONS = {"torch": TORCH}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.name}")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matches_reference(name: str, case: Case, dtype: torch.dtype) -> None:
    rtol, atol = case.tolerance(dtype)
    expected = outputs(REFERENCE, case, arguments(case, dtype, CPU))
    found = outputs(IMPLEMENTATIONS[name], case, arguments(case, dtype, CPU))
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("ops", [REFERENCE, TORCH], ids=["reference", "torch"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.written], ids=lambda c: f"{c.op}-{c.name}"
)
def test_leaves_its_arguments_alone(ops: Ops, case: Case) -> None:
    args = arguments(case, torch.float32, CPU)
    outputs(ops, case, args)
    for i, before in enumerate(arguments(case, torch.float32, CPU)):
        after = args[i]
        if i not in case.spoiled and isinstance(before, Tensor):
            assert isinstance(after, Tensor) and torch.equal(after, before)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.op == "linear"], ids=lambda c: f"{c.op}-{c.name}"
)
def test_products_in_pieces(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised weights are multiplied out a few rows at a time."""
    monkeypatch.setattr(torch_ops, "PIECE", 700)
    rtol, atol = case.tolerance(torch.float32)
    (expected,) = outputs(REFERENCE, case, arguments(case, torch.float32, CPU))
    (found,) = outputs(TORCH, case, arguments(case, torch.float32, CPU))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_every_operation_has_cases() -> None:
    # Every matrix of a case is packed.
    assert {"pack", *(case.op for case in CASES)} == {field.name for field in fields(Ops)}


@pytest.mark.parametrize("ops", [REFERENCE, TORCH], ids=["reference", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_nan_shows_in_the_largest(ops: Ops, dtype: torch.dtype) -> None:
    logits = torch.zeros(5, 70, dtype=dtype)
    logits[0, 0] = logits[1, 69] = logits[2, 33] = torch.nan
    logits[2, 34] = torch.inf
    logits[3, 7] = torch.inf
    top, ids = ops.largest(logits)
    assert top.isnan().tolist() == [True, True, True, False, False]
    assert top[3] == torch.inf and ids[3:].tolist() == [7, 0]


def test_selection_falls_back_to_the_reference() -> None:
    assert select(CPU) is TORCH
    assert select(torch.device("meta")) is REFERENCE
