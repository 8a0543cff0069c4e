"""What the engine is given means what was found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.kernels.weights import FloatWeight, Int4Weight, Int8Weight, OrderedWeight
from kvik.quantize.gptq import rtn
from kvik.quantize.quantised import ROW, TENSOR, Grid, Quantised, Scales


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [16, ROW, TENSOR])
def test_few_bits_become_an_int4_weight(bits: int, symmetric: bool, group: int) -> None:
    found = rtn(normal(6, 64), Grid(bits, group, symmetric))
    weight = found.weight()
    assert isinstance(weight, Int4Weight)
    assert torch.equal(weight.dequantized(), found.dequantised())
    assert weight.scales.shape == (6, 64 // weight.group)
    assert (weight.zeros is None) == symmetric


@pytest.mark.parametrize("bits", [5, 8])
@pytest.mark.parametrize("group", [ROW, TENSOR, 64, 16])
@pytest.mark.parametrize("activations", [True, False])
def test_more_bits_become_an_int8_weight(bits: int, group: int, activations: bool) -> None:
    found = rtn(normal(6, 64), Grid(bits, group, True))
    weight = found.weight(activations)
    assert isinstance(weight, Int8Weight)
    assert weight.quantize_activations == activations
    assert weight.group == (16 if group == 16 else 0)
    assert weight.values.dtype == torch.int8
    assert int(weight.values.min()) >= -(2 ** (bits - 1) - 1)  # nothing wrapped
    assert torch.equal(weight.dequantized(), found.dequantised())


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_act_order_becomes_an_ordered_weight(bits: int) -> None:
    natural = rtn(normal(4, 64), Grid(bits, 32, True))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)) // 32
    found = Quantised(natural.q, natural.scales, natural.grid, order)
    weight = found.weight()
    assert isinstance(weight, OrderedWeight)
    assert isinstance(weight.plain, Int8Weight if bits == 8 else Int4Weight)
    assert torch.equal(weight.dequantized(), found.dequantised())


@pytest.mark.parametrize("grid", [Grid(8, ROW, False), Grid(8, 32, False), Grid(5, 2, True)])
def test_what_no_kernel_multiplies_becomes_floats(grid: Grid) -> None:
    found = rtn(normal(4, 64), grid)
    weight = found.weight()
    assert isinstance(weight, FloatWeight)
    assert torch.equal(weight.dequantized(), found.dequantised())


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_by_order(symmetric: bool) -> None:
    found = rtn(normal(4, 64), Grid(4, 32, symmetric))
    order = torch.arange(64) // 32
    same = Quantised(found.q, found.scales, found.grid, order)
    assert torch.equal(same.dequantised(), found.dequantised())
    back = torch.arange(63, -1, -1)
    turned = Quantised(found.q[:, back], found.scales, found.grid, order[back])
    assert torch.equal(turned.dequantised()[:, back], found.dequantised())


def test_by_hand() -> None:
    scales = Scales(torch.tensor([[0.5, 2.0]]), torch.tensor([[3, 0]], dtype=torch.uint8))
    q = torch.tensor([[0, 3, 15, 1]], dtype=torch.uint8)
    found = Quantised(q, scales, Grid(4, 2, False))
    assert found.dequantised().tolist() == [[-1.5, 0.0, 30.0, 2.0]]
