"""Matrices of every kind on a GPU: made, filled, multiplied, read row by row.

Floats are multiplied by cuBLAS, E4M3 with E4M3 for many tokens too, the rest by the kernels here;
weights in groups that are no multiple of 16, which are rare, by torch, a few rows at a time.

The order of a row's sum depends on the kind, the shape and the class of the number of tokens
(`matrix_shapes.py`: up to 8, 16, 32, 64, more), within which it is the same for any number; of
what cuBLAS multiplies, on what cuBLAS chooses for the shape, tokens included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.kernels.torch_ops import TORCH
from kvik.kernels.triton import linear_bytes
from kvik.kernels.triton.launch import ceil_div
from kvik.kernels.triton.linear_end import finish
from kvik.kernels.triton.linear_launch import bytes_linear, float_linear, format_of, words_linear
from kvik.kernels.triton.matrix_rows import (
    BYTES_AT_ONCE,
    TILES_AT_ONCE,
    byte_rows_kernel,
    word_rows_kernel,
)
from kvik.kernels.triton.matrix_shapes import FEW
from kvik.kernels.triton.packed import (
    LEAST_GROUP,
    Packed,
    fill,
    group_of,
    in_words,
    plain_kind,
    span_of,
    unfilled,
)
from kvik.kernels.triton.scaled_mm import (
    TOKEN_STEP,
    Library,
    library_of,
    product,
    product_of_blocks,
    product_of_wholes,
)
from kvik.kernels.triton.token_rounding import round_tokens
from kvik.kernels.weights import (
    FloatWeight,
    Fp8Kind,
    Int8Kind,
    Matrix,
    MatrixSpec,
    Weight,
)


class Matrices:
    """The rows `matrix`, `pack_rows`, `linear` and `matrix_rows` of `Ops`, for one device."""

    def __init__(self, device: torch.device, library: Library | None = None) -> None:
        """library: what can be done with E4M3 there; None: what the device can do."""
        self.library = library or library_of(device)

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """See `Ops.matrix`. The bias of a quantised one is fp32."""
        return unfilled(spec)

    def pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        """See `Ops.pack_rows`.

        Raises:
            ValueError: rows from before have their inputs in another order.
        """
        if isinstance(matrix.data, Packed):
            fill(matrix.spec, matrix.data, first, weight)
        else:
            TORCH.pack_rows(matrix, first, weight)

    def linear(self, x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
        """See `Ops.linear`."""
        spec, packed, kind = matrix.spec, matrix.data, plain_kind(matrix.spec)
        if not len(x):
            return torch.empty(0, spec.outputs, dtype=spec.out_dtype, device=x.device)
        if isinstance(packed, FloatWeight):
            return float_linear(x, packed.values, matrix, residual)
        if not isinstance(packed, Packed):
            return TORCH.linear(x, matrix, residual)
        if packed.order is not None:
            x = x.index_select(1, packed.order)
        if in_words(kind):
            return words_linear(x, packed, matrix, residual)
        if isinstance(kind, Int8Kind):
            filled = packed.values.shape[1]
            codes, x_scales = round_tokens(x, filled, kind.group, False, None)
            wide = span_of(kind.group) > LEAST_GROUP
            how = (linear_bytes.INT8 if wide else linear_bytes.INT8_IN_FP16).value
            return bytes_linear(codes, x_scales, kind.group, how, packed, matrix, residual)
        assert isinstance(kind, Fp8Kind)
        return self._e4m3_linear(x, packed, kind, matrix, residual)

    def rows(self, matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Ops.matrix_rows`."""
        spec, packed, kind = matrix.spec, matrix.data, plain_kind(matrix.spec)
        if not isinstance(packed, Packed):
            return TORCH.matrix_rows(matrix, ids, dtype)
        out = torch.empty(len(ids), spec.inputs, dtype=dtype, device=ids.device)
        if not len(ids):
            return out
        group, stride = group_of(kind), packed.scales.shape[-1]
        kernel: Any
        if in_words(kind):
            tiles = packed.values.shape[1]
            kernel = word_rows_kernel[(len(ids), ceil_div(tiles, TILES_AT_ONCE))]
            kernel(
                packed.values,
                packed.scales,
                packed.factors,
                packed.order,
                ids,
                out,
                spec.inputs,
                tiles,
                stride,
                *format_of(kind),
                group,
                span_of(group) == LEAST_GROUP,
                TILES_AT_ONCE,
            )
        else:
            codes = packed.values.view(torch.int8)
            kernel = byte_rows_kernel[(len(ids), ceil_div(spec.inputs, BYTES_AT_ONCE))]
            kernel(
                codes,
                packed.scales,
                packed.order,
                ids,
                out,
                spec.inputs,
                codes.shape[1],
                stride,
                format_of(kind)[0],
                group,
                BYTES_AT_ONCE,
            )
        return out

    def _e4m3_linear(
        self, x: Tensor, packed: Packed, kind: Fp8Kind, matrix: Matrix, residual: Tensor | None
    ) -> Tensor:
        """Gate and up are not interleaved here: what follows the product is a kernel of its own."""
        spec, library = matrix.spec, self.library
        x_group = kind.group if kind.activations == "group" else 0
        filled = packed.values.shape[1]
        many = len(x) > FEW[-1].tokens and spec.out_dtype == torch.bfloat16
        if many and library.rows and packed.whole is not None and packed.whole.alike:
            codes, _ = round_tokens(x, filled, 0, True, packed.input_scale)
            assert packed.input_scale is not None
            one = packed.scales[:1]
            z = product_of_wholes(codes, packed.input_scale, packed.values, one, library.multiply)
        elif many and library.rows and not kind.group:
            codes, x_scales = round_tokens(x, filled, 0, True, packed.input_scale)
            z = product(codes, x_scales, packed.values, packed.scales, library.multiply)
        elif many and library.blocks and packed.squares is not None and packed.squares.everywhere:
            missing = -len(x) % TOKEN_STEP
            padded = F.pad(x, (0, 0, 0, missing)) if missing else x
            codes, x_scales = round_tokens(padded, filled, x_group, True, None)
            squares = packed.squares.scales
            z = product_of_blocks(codes, x_scales, packed.values, squares, library.multiply)
        else:
            codes, x_scales = round_tokens(x, filled, x_group, True, packed.input_scale)
            native = library.tensor_cores and span_of(kind.group) > LEAST_GROUP
            how = (linear_bytes.E4M3 if native else linear_bytes.E4M3_IN_FP16).value
            if spec.activation != "silu_and_mul":
                return bytes_linear(codes, x_scales, x_group, how, packed, matrix, residual)
            plain = Matrix(replace(spec, activation=None), None, packed)
            z = bytes_linear(codes, x_scales, x_group, how, packed, plain, None)
        z = z[: len(x), : spec.rows]
        return finish(z, matrix.bias, spec.activation, residual, spec.out_dtype)
