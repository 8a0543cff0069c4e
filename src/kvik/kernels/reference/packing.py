"""Weights as plain tensors, in a file."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from kvik.kernels.packing import Packing, Parts, check_order
from kvik.kernels.reference.ops import matrix, stored_weight
from kvik.kernels.weights import (
    FloatWeight,
    Fp8Weight,
    Int4MinWeight,
    Int4Weight,
    Int8Weight,
    Matrix,
    MatrixSpec,
    OrderedWeight,
    Weight,
)

META = torch.device("meta")


def layout(spec: MatrixSpec) -> Parts:
    """See `Packing`."""
    return parts(matrix(replace(spec, device=META)))


def parts(matrix: Matrix) -> Parts:
    """See `Packing`."""
    found = _parts(stored_weight(matrix))
    return found if matrix.bias is None else {**found, "bias": matrix.bias}


def over(spec: MatrixSpec, parts: Parts) -> Matrix:
    """See `Packing`."""
    own = {name: tensor.to(spec.device) for name, tensor in parts.items()}
    weight = _with(stored_weight(matrix(replace(spec, device=META))), own)
    return Matrix(spec, own.get("bias"), weight)


def _parts(weight: Weight) -> dict[str, Tensor]:
    match weight:
        case FloatWeight(values):
            return {"values": values}
        case Int8Weight(values, scales):
            return {"values": values, "scales": scales}
        case Fp8Weight(values, scales):
            found = {"values": values, "scales": scales}
            scale = weight.input_scale
            return found if scale is None else {**found, "input_scale": scale}
        case Int4Weight(values, scales, zeros):
            found = {"values": values, "scales": scales}
            return found if zeros is None else {**found, "zeros": zeros}
        case Int4MinWeight(values, scales, minima):
            return {"values": values, "scales": scales, "minima": minima}
        case OrderedWeight(plain, order):
            return {**_parts(plain), "order": order}
        case _:
            assert_never(weight)


def _with(like: Weight, own: Parts) -> Weight:
    """The same kind of weight over other memory."""
    match like:
        case FloatWeight():
            return FloatWeight(own["values"])
        case Int8Weight():
            return replace(like, values=own["values"], scales=own["scales"])
        case Fp8Weight():
            scale = own.get("input_scale")
            return replace(like, values=own["values"], scales=own["scales"], input_scale=scale)
        case Int4Weight():
            return replace(like, values=own["values"], scales=own["scales"], zeros=own.get("zeros"))
        case Int4MinWeight():
            return replace(like, values=own["values"], scales=own["scales"], minima=own["minima"])
        case OrderedWeight(plain):
            check_order(own["order"])
            inner = _with(plain, own)
            assert not isinstance(inner, OrderedWeight)
            return OrderedWeight(inner, own["order"])
        case _:
            assert_never(like)


PLAIN = Packing("plain-1", layout, parts, over)
