"""`Ops.matrix` of the native kernels: results and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik was installed without native kernels")

from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik.kernels.weights import MatrixSpec, int8_weight, ordered_weight
from kvik.spec.weight_kind import WeightKind

CPU = torch.device("cpu")


def spec(kind: WeightKind, inputs: int = 512) -> MatrixSpec:
    return MatrixSpec(kind, 3, inputs, True, None, torch.float32, CPU)


@pytest.mark.parametrize(
    "kind",
    [
        WeightKind("int4", 0),
        WeightKind("int4", 4),
        WeightKind("int4", 12, "zeros"),
        WeightKind("int4", 264, "zeros"),
        WeightKind("int4", 0, "minima"),
        WeightKind("int4", 12, "minima"),
        WeightKind("int8", 6, activations="group"),
        WeightKind("int8", 131072, activations="group"),
        WeightKind("fp8", 2),
    ],
)
def test_groups_that_kernels_cannot_multiply(kind: WeightKind) -> None:
    for wanted in (kind, replace(kind, ordered=True)):
        with pytest.raises(ValueError, match=f"groups of {kind.group}: "):
            native_ops(Native(1)).matrix(spec(wanted))


def test_more_inputs_than_sums_of_integers_hold() -> None:
    kind = WeightKind("int8", activations="token")
    assert native_ops(Native(1)).matrix(spec(kind, 65536))
    with pytest.raises(ValueError, match="65537 inputs: at most 65536 "):
        native_ops(Native(1)).matrix(spec(kind, 65537))


@pytest.mark.parametrize(
    "kind",
    [
        WeightKind("int4", 8, "zeros"),
        WeightKind("int4", 256, "zeros"),
        WeightKind("int4", 512),
        WeightKind("int4", 512, "minima"),
        WeightKind("int8", activations="token"),
        WeightKind("int8", 4),
        WeightKind("fp8", 128),
    ],
)
def test_supported_group_sizes(kind: WeightKind) -> None:
    assert native_ops(Native(1)).matrix(spec(kind)).spec.inputs == 512


def test_rows_of_a_matrix_share_the_order_of_inputs() -> None:
    ops = native_ops(Native(1))
    plain = int8_weight(torch.ones(1, 4, dtype=torch.int8), torch.ones(1), False)
    matrix = ops.matrix(spec(replace(plain.kind, ordered=True), 4))
    order = torch.tensor([1, 0, 3, 2], dtype=torch.int32)
    ops.pack_rows(matrix, 0, ordered_weight(plain, order))
    ops.pack_rows(matrix, 2, ordered_weight(plain, order.clone()))
    with pytest.raises(ValueError, match="in different orders"):
        ops.pack_rows(matrix, 1, ordered_weight(plain, order.flip(0)))


def test_the_bias_is_fp32_for_every_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        bias = native_ops(Native(1)).matrix(spec(WeightKind("bfloat16"))).bias
    finally:
        torch.set_default_dtype(before)
    assert bias.dtype == torch.float32
