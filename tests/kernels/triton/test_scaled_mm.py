"""E4M3 times E4M3 by a library, replaced by a stand-in that checks the library's conditions and
multiplies in fp32; and the rounding of x."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers.optional_triton import NO_TRITON, device
from torch import Tensor
from torch.nn.functional import ScalingType

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.kernel_cases import filled_matrix

from kvik.kernels.fp8 import round_activations
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.rounding import round_tokens as reference_round_tokens
from kvik.kernels.triton.matrix import TritonMatrices
from kvik.kernels.triton.packed import GPU
from kvik.kernels.triton.rounding import round_tokens
from kvik.kernels.triton.scaled_mm import Library, product, product_of_wholes, scaled_mm
from kvik.kernels.weights import Activation, Weight, fp8_weight
from kvik.spec.weight_kind import Rounding

E4M3 = torch.float8_e4m3fn


@dataclass
class StandIn:
    """Checks its arguments like ScaledBlas.cpp."""

    called: list[ScalingType] = field(default_factory=list)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        x_scales: Tensor,
        x_scaling: ScalingType,
        scales: Tensor,
        scaling: ScalingType,
        dtype: torch.dtype,
    ) -> Tensor:
        (tokens, inputs), outputs = x.shape, weight.shape[1]
        assert x.dtype == weight.dtype == E4M3 and dtype == torch.bfloat16
        assert x_scales.dtype == scales.dtype == torch.float32
        assert x.stride(1) == 1 and weight.stride(0) == 1
        assert inputs % 16 == outputs % 16 == 0 and weight.shape[0] == inputs
        self.called.append(scaling)
        if scaling == ScalingType.TensorWise:
            assert x_scaling == ScalingType.TensorWise and x_scales.shape == scales.shape == (1,)
            return ((x.float() @ weight.float()) * (x_scales * scales)).to(dtype)
        if scaling == ScalingType.RowWise:
            assert x_scaling == ScalingType.RowWise
            assert x_scales.shape == (tokens, 1) and scales.shape == (1, outputs)
            assert x_scales.is_contiguous() and scales.is_contiguous()
            return ((x.float() * x_scales) @ (weight.float() * scales)).to(dtype)
        assert scaling == ScalingType.BlockWise128x128
        assert x_scaling == ScalingType.BlockWise1x128
        blocks = -(-inputs // 128)
        assert tokens % 4 == 0
        assert x_scales.shape == (tokens, blocks) and x_scales.stride() == (1, tokens)
        filled = -(-blocks // 4) * 4
        assert scales.shape == (filled, -(-outputs // 128)) and scales.stride() == (1, filled)
        wide = x.float() * x_scales.repeat_interleave(128, 1)[:, :inputs]
        spread = scales[:blocks].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (wide @ (weight.float() * spread[:inputs, :outputs])).to(dtype)


def weight_of(outputs: int, group: int, activations: Rounding, square: bool) -> Weight:
    """Return a weight of 300 inputs. square: scales are per blocks of 128 rows, or of the whole
    matrix without groups."""
    g = torch.Generator().manual_seed(outputs + group)
    values = (torch.randn(outputs, 300, generator=g) * 60).clamp(-448, 448).to(E4M3)
    shape = (outputs, 3) if group else (outputs,)
    scales = (torch.rand(shape, generator=g) + 0.5) / 1000
    if square:
        alike = 128 if group else outputs
        scales = scales[::alike].repeat_interleave(alike, 0)[:outputs]
    scale = torch.tensor([0.01]) if activations == "static" else None
    return fp8_weight(values, scales, group, activations, scale)


def with_library(stand_in: StandIn) -> TritonMatrices:
    library = Library(tensor_cores=False, rows=True, blocks=True, multiply=stand_in)
    return TritonMatrices(device(), library)


@pytest.mark.full
@pytest.mark.parametrize(
    ("group", "activations", "square", "activation", "by"),
    [
        (0, "token", False, None, [ScalingType.RowWise]),
        (0, "token", True, None, [ScalingType.RowWise]),
        (0, "static", False, "silu_and_mul", [ScalingType.RowWise]),
        (0, "static", True, "silu_and_mul", [ScalingType.TensorWise]),
        (128, "group", True, "silu_and_mul", [ScalingType.BlockWise128x128]),
        (128, "group", True, "gelu_tanh", [ScalingType.BlockWise128x128]),
        (128, "group", False, None, []),
    ],
)
def test_many_tokens_go_to_the_library(
    group: int,
    activations: Rounding,
    square: bool,
    activation: Activation | None,
    by: list[ScalingType],
) -> None:
    """If it supports the scales; in runs of rows that end inside a block."""
    stand_in = StandIn()
    matrices = with_library(stand_in)
    weight = weight_of(270, group, activations, square)
    g = torch.Generator().manual_seed(1)
    bias, x = torch.randn(270, generator=g), torch.randn(66, 300, generator=g).bfloat16()
    known = filled_matrix(REFERENCE, weight, bias, activation, torch.bfloat16)
    matrix = matrices.matrix(replace(known.spec, device=device()))
    for first, last in ((100, 270), (0, 100)):
        matrices.pack_rows(matrix, first, weight.rows(slice(first, last)))
    matrix.bias.copy_(bias)
    residual = torch.randn(66, known.spec.outputs, generator=g).bfloat16()
    found = matrices.linear(x.to(device()), matrix, residual.to(device())).cpu()
    torch.testing.assert_close(found, REFERENCE.linear(x, known, residual), rtol=1.6e-2, atol=6e-2)
    assert stand_in.called == by
    mapped = GPU.over(matrix.spec, GPU.parts(matrix))  # as from an engine folder
    again = matrices.linear(x.to(device()), mapped, residual.to(device())).cpu()
    assert torch.equal(again, found) and stand_in.called == 2 * by


@pytest.mark.parametrize(("tokens", "dtype"), [(5, torch.bfloat16), (66, torch.float32)])
def test_few_tokens_and_rounded_results_avoid_the_library(tokens: int, dtype: torch.dtype) -> None:
    """Few tokens, and results that it would round."""
    stand_in = StandIn()
    matrices = with_library(stand_in)
    weight = weight_of(20, 0, "token", False)
    known = filled_matrix(REFERENCE, weight, None, None, dtype)
    matrix = matrices.matrix(replace(known.spec, device=device()))
    matrices.pack_rows(matrix, 0, weight)
    x = torch.randn(tokens, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = REFERENCE.linear(x, known, None)
    found = matrices.linear(x.to(device()), matrix, None).cpu()
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=3e-2)
    assert not stand_in.called


def test_nan_passes_through_a_product_with_one_scale() -> None:
    stand_in = StandIn()
    matrices = with_library(stand_in)
    known = filled_matrix(REFERENCE, weight_of(20, 0, "static", True), None, None, torch.bfloat16)
    matrix = matrices.matrix(replace(known.spec, device=device()))
    matrices.pack_rows(matrix, 0, weight_of(20, 0, "static", True))
    x = torch.ones(66, 300).bfloat16()
    x[7, 299], x[8, 0] = torch.nan, torch.inf
    found = matrices.linear(x.to(device()), matrix, None)
    assert stand_in.called == [ScalingType.TensorWise]
    assert found.isnan().any(1).nonzero().tolist() == [[7]]


def test_the_stand_in_equals_torch() -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 32, generator=g) * 60).to(E4M3)
    weight = (torch.randn(16, 32, generator=g) * 60).to(E4M3)
    x_scales, scales = torch.rand(5, generator=g), torch.rand(16, generator=g)
    try:
        found = product(x, x_scales, weight, scales, scaled_mm)
    except NotImplementedError:
        pytest.skip("this torch has no products of E4M3 on a CPU")
    expected = product(x, x_scales, weight, scales, StandIn())
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=1e-2)
    found = product_of_wholes(x, x_scales[:1], weight, scales[:1], scaled_mm)
    expected = product_of_wholes(x, x_scales[:1], weight, scales[:1], StandIn())
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("group", [0, 16, 48])
@pytest.mark.parametrize("e4m3", [False, True])
def test_tokens_are_rounded_to_the_bit(e4m3: bool, group: int) -> None:
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))[:, :90]
    x[1] = 0
    x[2] *= 1e-3
    x[3, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 63.5])  # ties
    codes, scales = round_tokens(x.to(device()), 128, group, e4m3, None)
    assert codes.shape == (4, 128)
    spread = scales.t().repeat_interleave(group, 1) if group else scales[:, None]
    found = (codes.float().cpu() * spread[:, :128].cpu())[:, :90]
    rounded = round_activations(x, group) if e4m3 else reference_round_tokens(x, group)
    assert torch.equal(found, rounded)
    assert not codes.float()[:, 90:].any()
