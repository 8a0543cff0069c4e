"""The memory layout of matrices of an implementation of `Ops`, to write them to a file and to map
them from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvik.kernels.reference.ops import matrix, stored_weight
from kvik.kernels.weights import Matrix, MatrixSpec, Weight

ALIGNMENT = 4096  # bytes: every part begins at a page

Parts = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Packing:
    """A layout of matrices.

    layout(spec) -> the parts of such a matrix, without memory (device "meta")
    parts(matrix) -> its memory, bias included
    over(spec, parts) -> the matrix over the memory of these parts, with the shapes of `layout`.
        Raises ValueError if their contents are invalid"""

    name: str  # changes whenever the bytes of a part do
    layout: Callable[[MatrixSpec], Parts]
    parts: Callable[[Matrix], Parts]
    over: Callable[[MatrixSpec, Parts], Matrix]
    divided: bool = False  # `over` uses only some rows of the parts, so `parts` cannot return them


def check_order(order: Tensor) -> None:
    """Check an order of inputs, [inputs] int32.

    Raises:
        ValueError: it is not a permutation, so kernels would read beyond their inputs.
    """
    if not torch.equal(order.sort().values, torch.arange(len(order)).to(order)):
        raise ValueError("the order of its inputs is not a permutation")


# Weights in a file, as plain tensors.

META = torch.device("meta")


def layout(spec: MatrixSpec) -> Parts:
    """See `Packing`."""
    return parts(matrix(replace(spec, device=META)))


def parts(matrix: Matrix) -> Parts:
    """See `Packing`."""
    tensors = stored_weight(matrix).tensors
    return tensors if matrix.bias is None else {**tensors, "bias": matrix.bias}


def over(spec: MatrixSpec, parts: Parts) -> Matrix:
    """See `Packing`."""
    tensors = {name: tensor.to(spec.device) for name, tensor in parts.items()}
    bias = tensors.pop("bias", None)
    if "order" in tensors:
        check_order(tensors["order"])
    return Matrix(spec, bias, Weight(spec.kind, **tensors))


PLAIN = Packing("plain-1", layout, parts, over)
