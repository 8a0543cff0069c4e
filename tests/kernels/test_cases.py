"""Every implementation of every operation against the reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

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
    for after, before in zip(args, arguments(case, torch.float32, CPU), strict=True):
        assert torch.equal(torch.as_tensor(after), torch.as_tensor(before))


def test_every_operation_has_cases() -> None:
    assert {case.op for case in CASES} == {field.name for field in fields(Ops)}


def test_selection_falls_back_to_the_reference() -> None:
    assert select(CPU) is TORCH
    assert select(torch.device("meta")) is REFERENCE
