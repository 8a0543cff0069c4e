"""Weights in tiles (csrc/packed.hpp), in a file. All instruction sets have the same tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.kernels.cpu.matrix import Packed, has_input_scale, packed_over, packed_sizes
from kvik.kernels.packing import Packing, Parts, check_order
from kvik.kernels.weights import Matrix, MatrixSpec, OrderedKind


def layout(spec: MatrixSpec) -> Parts:
    """See `Packing`.

    Raises:
        ValueError: the kernels cannot multiply groups of this size.
    """
    found = {
        name: _meta(size, torch.uint8)
        for name, size in zip(("weight", "scales", "zeros"), packed_sizes(spec), strict=True)
        if size
    }
    if isinstance(spec.kind, OrderedKind):
        found["order"] = _meta(spec.inputs, torch.int32)
    if has_input_scale(spec):
        found["input_scale"] = _meta(1, torch.float32)
    if spec.bias:
        found["bias"] = _meta(spec.rows, torch.float32)
    return found


def parts(matrix: Matrix) -> Parts:
    """See `Packing`."""
    packed = matrix.data
    assert isinstance(packed, Packed)
    all_parts = {
        "weight": packed.weight,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "order": packed.order,
        "input_scale": packed.input_scale,
        "bias": matrix.bias,
    }
    return {name: part for name, part in all_parts.items() if part is not None and part.numel()}


def over(spec: MatrixSpec, parts: Parts) -> Matrix:
    """See `Packing`."""
    order = parts.get("order")
    if order is not None:
        check_order(order)
    none = torch.empty(0, dtype=torch.uint8)
    packed = packed_over(
        spec,
        parts["weight"],
        parts.get("scales", none),
        parts.get("zeros", none),
        order,
        parts.get("input_scale"),
    )
    return Matrix(spec, parts.get("bias"), packed)


def _meta(size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


TILES = Packing("tiles-1", layout, parts, over)
