"""What `Ops.matrix` makes for the native kernels, and what it refuses."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik was installed without native kernels")

from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik.kernels.weights import (
    FloatKind,
    Fp8Kind,
    Int4Kind,
    Int4MinKind,
    Int8Kind,
    Int8Weight,
    MatrixSpec,
    OrderedKind,
    OrderedWeight,
    WeightKind,
)

CPU = torch.device("cpu")


def spec(kind: WeightKind, inputs: int = 512) -> MatrixSpec:
    return MatrixSpec(kind, 3, inputs, True, None, torch.float32, CPU)


@pytest.mark.parametrize(
    "kind",
    [
        *(Int4Kind(0, False), Int4Kind(4, False), Int4Kind(12, True), Int4Kind(264, True)),
        *(Int4MinKind(0), Int4MinKind(12), Int8Kind(True, 6), Int8Kind(True, 65536), Fp8Kind(2)),
    ],
)
def test_groups_that_kernels_cannot_multiply(
    kind: Int4Kind | Int4MinKind | Int8Kind | Fp8Kind,
) -> None:
    for wanted in (kind, OrderedKind(kind)):
        with pytest.raises(ValueError, match=f"groups of {kind.group}: "):
            native_ops(Native(1)).matrix(spec(wanted))


@pytest.mark.parametrize(
    "kind",
    [
        *(Int4Kind(8, True), Int4Kind(256, True), Int4Kind(512, False), Int4MinKind(512)),
        *(Int8Kind(True), Int8Kind(False, 4), Fp8Kind(128)),
    ],
)
def test_groups_that_they_can(kind: WeightKind) -> None:
    assert native_ops(Native(1)).matrix(spec(kind)).spec.inputs == 512


def test_rows_of_a_matrix_share_the_order_of_inputs() -> None:
    ops = native_ops(Native(1))
    plain = Int8Weight(torch.ones(1, 4, dtype=torch.int8), torch.ones(1), False)
    matrix = ops.matrix(spec(OrderedKind(plain.kind), 4))
    order = torch.tensor([1, 0, 3, 2], dtype=torch.int32)
    ops.pack_rows(matrix, 0, OrderedWeight(plain, order))
    ops.pack_rows(matrix, 2, OrderedWeight(plain, order.clone()))
    with pytest.raises(ValueError, match="in different orders"):
        ops.pack_rows(matrix, 1, OrderedWeight(plain, order.flip(0)))


def test_the_bias_is_fp32_whatever_torch_prefers() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        bias = native_ops(Native(1)).matrix(spec(FloatKind(torch.bfloat16))).bias
    finally:
        torch.set_default_dtype(before)
    assert bias is not None and bias.dtype == torch.float32
