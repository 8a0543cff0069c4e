"""Matrices as they lie in GPU memory (`packed.py`), in a file."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvik.kernels.packing import Packing, Parts, check_order
from kvik.kernels.reference.packing import PLAIN
from kvik.kernels.triton.packed import (
    Packed,
    arrivals_of,
    is_packed,
    squares_of,
    unfilled,
    whole_of,
)
from kvik.kernels.weights import Matrix, MatrixSpec


def layout(spec: MatrixSpec) -> Parts:
    """See `Packing`."""
    return parts(unfilled(replace(spec, device=torch.device("meta"))))


def parts(matrix: Matrix) -> Parts:
    """See `Packing`."""
    packed = matrix.data
    if not isinstance(packed, Packed):
        return PLAIN.parts(matrix)
    names = ("values", "scales", "factors", "order", "input_scale")
    found = {name: getattr(packed, name) for name in names} | {"bias": matrix.bias}
    return {name: part for name, part in found.items() if part is not None}


def over(spec: MatrixSpec, parts: Parts) -> Matrix:
    """See `Packing`."""
    if not is_packed(spec):
        return PLAIN.over(spec, parts)
    own = {name: part.to(spec.device) for name, part in parts.items()}
    if "order" in own:
        check_order(own["order"])
    packed = Packed(
        own["values"],
        own["scales"],
        own.get("factors"),
        own.get("order"),
        own.get("input_scale"),
        squares_of(spec),
        whole_of(spec),
        arrivals_of(spec),
    )
    if packed.squares is not None:
        packed.squares.update(packed.scales, spec.rows, 0, spec.rows)
    if packed.whole is not None:
        packed.whole.update(packed.scales, spec.rows)
    return Matrix(spec, own.get("bias"), packed)


GPU = Packing("gpu-1", layout, parts, over)
