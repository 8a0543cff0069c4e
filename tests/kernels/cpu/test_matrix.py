"""What `Ops.matrix` makes for the native kernels, and what it refuses."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik was installed without native kernels")

from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik.kernels.weights import FloatKind, Int4Kind, MatrixSpec, WeightKind

CPU = torch.device("cpu")


def spec(kind: WeightKind, inputs: int = 512) -> MatrixSpec:
    return MatrixSpec(kind, 3, inputs, True, None, torch.float32, CPU)


@pytest.mark.parametrize(("group", "zeros"), [(0, False), (4, False), (12, True), (264, True)])
def test_groups_that_kernels_cannot_multiply(group: int, zeros: bool) -> None:
    with pytest.raises(ValueError, match=f"groups of {group}: "):
        native_ops(Native(1)).matrix(spec(Int4Kind(group, zeros)))


@pytest.mark.parametrize(("group", "zeros"), [(8, True), (256, True), (512, False)])
def test_groups_that_they_can(group: int, zeros: bool) -> None:
    assert native_ops(Native(1)).matrix(spec(Int4Kind(group, zeros))).spec.inputs == 512


def test_the_bias_is_fp32_whatever_torch_prefers() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        bias = native_ops(Native(1)).matrix(spec(FloatKind(torch.bfloat16))).bias
    finally:
        torch.set_default_dtype(before)
    assert bias is not None and bias.dtype == torch.float32
