"""What the engine is given means what was found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.kernels.weights import Int4Weight, Int8Weight
from kvik.quantize.grid import ROW, TENSOR, Grid, Scales
from kvik.quantize.quantised import Quantised
from kvik.quantize.rtn import rtn


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
    # without zero points where the engine needs none
    assert (weight.zeros is None) == (symmetric and bits == 4)


@pytest.mark.parametrize("bits", [5, 8])
@pytest.mark.parametrize("group", [ROW, TENSOR, 64])
@pytest.mark.parametrize("activations", [True, False])
def test_symmetric_rows_become_an_int8_weight(bits: int, group: int, activations: bool) -> None:
    found = rtn(normal(6, 64), Grid(bits, group, True))
    weight = found.weight(activations)
    assert isinstance(weight, Int8Weight)
    assert weight.quantize_activations == activations
    assert weight.values.dtype == torch.int8
    assert int(weight.values.min()) >= -(2 ** (bits - 1) - 1)  # nothing wrapped
    assert torch.equal(weight.dequantized(), found.dequantised())


def test_what_the_engine_has_no_weight_for() -> None:
    w = normal(4, 64)
    for grid in (Grid(8, 32, True), Grid(8, ROW, False), Grid(5, 16, True)):
        with pytest.raises(ValueError, match=f"{grid.bits} bits"):
            rtn(w, grid).weight()
    found = rtn(w, Grid(4, 32, True))
    order = torch.arange(64) % 2
    with pytest.raises(ValueError, match="not neighbours"):
        Quantised(found.q, found.scales, found.grid, order).weight()


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
