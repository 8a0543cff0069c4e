"""Filling a matrix in parts gives the same matrix for any division."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvik.errors import ModelError
from kvik.kernels.reference.ops import REFERENCE, stored_weight
from kvik.kernels.weights import Matrix, MatrixSpec, Weight, int8_weight
from kvik.nn import parts
from kvik.nn.formats.base import Dense, LinearShape, StoredTensor, TensorError, WeightFormat
from kvik.nn.parts import LayerFiller, Quantizer, Rows
from kvik.spec.weight_kind import WeightKind
from kvik.spec.weights import layer_kind

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 64, 70


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


class Target:
    """A matrix with one more row before and after those of a part."""

    def __init__(
        self,
        quantization: str = "none",
        format: WeightFormat | None = None,
        scheme: WeightKind | None = None,
        transposed: bool = False,
        places: Tensor | None = None,
    ) -> None:
        shape = LinearShape(INPUTS, OUTPUTS, transposed)
        format = format or Dense(shape)
        scheme = scheme or layer_kind(quantization, INPUTS, head=False)
        kind = scheme or WeightKind("bfloat16")
        quantizer = Quantizer(kind, "layer")
        spec = MatrixSpec(kind, OUTPUTS + 2, INPUTS, False, None, torch.float32, CPU)
        self.matrix: Matrix = REFERENCE.matrix(spec)
        self.runs: list[tuple[int, int]] = []
        tensors = format.tensors(torch.bfloat16)
        ops = replace(REFERENCE, pack_rows=self._pack_rows)
        rows = Rows(ops, self.matrix, quantizer, places)
        self.part = LayerFiller("layer", format, tensors, shape, rows, 1)

    def _pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        self.runs.append((first, weight.outputs))
        REFERENCE.pack_rows(matrix, first, weight)

    def stored(self) -> list[Tensor]:
        own = stored_weight(self.matrix).rows(slice(1, OUTPUTS + 1))
        return list(own.tensors.values())


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_runs_give_the_same_matrix(quantization: str) -> None:
    """Also out of order, and with single rows."""
    values = normal(OUTPUTS, INPUTS)
    whole, cut = Target(quantization), Target(quantization)
    whole.part.fill("weight", 0, values)
    for first, last in ((40, 70), (0, 1), (1, 40)):
        cut.part.fill("weight", first, values[first:last])
    assert whole.runs == [(1, OUTPUTS)] and len(cut.runs) == 3
    for a, b in zip(whole.stored(), cut.stored(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_rows_are_stored_in_their_places(quantization: str) -> None:
    """For the first rows and any division."""
    values, kept = normal(OUTPUTS, INPUTS), 48
    places = torch.randperm(kept, generator=torch.Generator().manual_seed(1))
    moved = values.clone()
    moved[places] = values[:kept]
    straight = Target(quantization)
    straight.part.fill("weight", 0, moved)
    for cuts in ([0, OUTPUTS], [0, 1, 40, 50, OUTPUTS]):
        target = Target(quantization, places=torch.cat((torch.zeros(1, dtype=int), places + 1)))
        for first, last in pairwise(cuts):
            target.part.fill("weight", first, values[first:last])
        for a, b in zip(straight.stored(), target.stored(), strict=True):
            assert torch.equal(a, b)


def test_a_float_weight_is_not_changed() -> None:
    values = normal(OUTPUTS, INPUTS)
    target = Target()
    target.part.fill("weight", 0, values)
    assert torch.equal(target.stored()[0], values)


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_large_weights_are_divided(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also transposed ones, which arrive whole."""
    values = normal(OUTPUTS, INPUTS)
    straight = Target(quantization)
    straight.part.fill("weight", 0, values)
    monkeypatch.setattr(parts, "RUN_WEIGHTS", 40 * INPUTS)
    for transposed in (False, True):
        cut = Target(quantization, transposed=transposed)
        cut.part.fill("weight", 0, values.t().contiguous() if transposed else values)
        assert cut.runs == [(1, 32), (33, 32), (65, 6)]
        for a, b in zip(straight.stored(), cut.stored(), strict=True):
            assert torch.equal(a, b)


class RowScaled:
    """Bytes and a positive scale per output, in two tensors."""

    unread = ()

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor((OUTPUTS, INPUTS), torch.int8),
            "scale": StoredTensor((OUTPUTS,), torch.float32),
        }

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        scale = tensors["scale"][rows]
        if bool((scale <= 0).any()):
            raise TensorError("scale", "must be positive")
        return int8_weight(tensors["weight"][rows], scale, quantize_activations=False)


WEIGHT_ONLY = WeightKind("int8")


def row_scaled() -> tuple[Tensor, Tensor]:
    values = torch.randint(-127, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
    return values, torch.rand(OUTPUTS) + 0.1


def test_a_format_of_several_tensors_gets_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "RUN_WEIGHTS", 40 * INPUTS)
    target = Target(format=RowScaled(), scheme=WEIGHT_ONLY)
    values, scale = row_scaled()
    buffer = scale.clone()
    target.part.fill("scale", 0, buffer)
    assert not target.runs
    buffer.zero_()  # its memory is reused
    target.part.fill("weight", 0, values)
    assert target.runs == [(1, 32), (33, 32), (65, 6)]
    assert torch.equal(target.stored()[0], values) and torch.equal(target.stored()[1], scale)


def test_a_quantised_weight_is_dequantised_for_a_float_matrix() -> None:
    target = Target(format=RowScaled())
    values, scale = row_scaled()
    target.part.fill("weight", 0, values)
    target.part.fill("scale", 0, scale)
    expected = (values * scale[:, None]).bfloat16()
    assert torch.equal(target.stored()[0], expected)


def test_an_invalid_tensor_is_named() -> None:
    target = Target(format=RowScaled(), scheme=WEIGHT_ONLY)
    values, scale = row_scaled()
    scale[69] = 0
    target.part.fill("weight", 0, values)
    with pytest.raises(ModelError, match=r"tensor 'layer\.scale' must be positive"):
        target.part.fill("scale", 0, scale)
