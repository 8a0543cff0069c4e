"""A linear layer from its declaration to its product."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import Activation, FloatWeight, Matrix, Weight
from kvik.nn.formats.base import LinearShape, Param
from kvik.nn.formats.dense import Dense
from kvik.nn.linear import Fill, Linear

SHAPE = LinearShape(inputs=6, outputs=(4, 4))
CPU = torch.device("cpu")


def as_stored(weight: Weight) -> Weight:
    return weight


class Layer:
    """A fused layer with a bias, and where its four tensors go."""

    def __init__(
        self,
        ops: Ops,
        activation: Activation | None = None,
        quantizer: Callable[[Weight], Weight] = as_stored,
    ) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.linear = Linear(
            ops,
            Dense(),
            self._params,
            activation=activation,
            out_dtype=torch.float32,
            quantizer=quantizer,
        )
        self.places: list[Fill] = [
            self.linear.place(name, part) for name in ("weight", "bias") for part in (0, 1)
        ]

    def _params(self) -> dict[str, Param]:
        params = Dense().params(SHAPE, "column", torch.float32, CPU)
        bias = torch.empty(8)
        params["bias"] = Param(bias, tuple(bias.split(4)))
        self.made.append(weakref.ref(params["weight"].tensor))
        return params

    def fill(self, values: list[Tensor]) -> None:
        for place, value in zip(self.places, values, strict=True):
            place(value_writer(value))


def value_writer(value: Tensor) -> Callable[[Tensor], object]:
    return lambda target: target.copy_(value)


@pytest.fixture
def values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((4, 6), (4, 6), (4,), (4,))]


@pytest.mark.parametrize("ops", [REFERENCE, TORCH], ids=["reference", "torch"])
def test_product_activation_and_residual(ops: Ops, values: list[Tensor]) -> None:
    layer = Layer(ops, "silu_and_mul")
    layer.fill(values)
    x, residual = torch.randn(5, 6), torch.randn(5, 4)
    gate, up = F.linear(x, torch.cat(values[:2]), torch.cat(values[2:])).chunk(2, -1)
    torch.testing.assert_close(layer.linear(x), F.silu(gate) * up)
    torch.testing.assert_close(layer.linear(x, residual), F.silu(gate) * up + residual)


def test_it_is_finished_with_its_last_tensor(values: list[Tensor]) -> None:
    layer = Layer(TORCH)
    assert not layer.made  # nothing is in memory before the first one comes
    for place, value in zip(layer.places[:-1], values[:-1], strict=True):
        place(value_writer(value))
        with pytest.raises(AttributeError):
            layer.linear(torch.ones(1, 6))
    layer.places[-1](value_writer(values[-1]))
    assert layer.linear(torch.ones(1, 6)).shape == (1, 8)
    assert len(layer.made) == 1


def test_the_stored_weight_is_gone_before_the_quantised_one_is_packed(
    values: list[Tensor],
) -> None:
    alive: list[bool] = []

    def pack(
        weight: Weight, bias: Tensor | None, activation: Activation | None, dtype: torch.dtype
    ) -> Matrix:
        alive.extend(made() is not None for made in layer.made)
        return REFERENCE.pack(weight, bias, activation, dtype)

    layer = Layer(
        replace(REFERENCE, pack=pack), quantizer=lambda w: FloatWeight(w.dequantized() * 2)
    )
    layer.fill(values)
    assert alive == [False]
    torch.testing.assert_close(layer.linear.matrix.data.values, 2 * torch.cat(values[:2]))
