"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.weights import Activation, Matrix
from kvik.nn.formats.base import Param, WeightFormat
from kvik.nn.quantizer import Quantizer

Fill = Callable[[Callable[[Tensor], object]], None]


class Linear:
    """y = activation(x W^T + b) + residual.

    The checkpoint's tensors are in memory only from the first that is filled in to the last; then
    the layer has its `matrix`, and it cannot be called before.
    """

    __slots__ = (
        "_activation",
        "_awaited",
        "_format",
        "_make_params",
        "_out_dtype",
        "_params",
        "_quantizer",
        "matrix",
        "ops",
    )
    matrix: Matrix

    def __init__(
        self,
        ops: Ops,
        format: WeightFormat,
        params: Callable[[], dict[str, Param]],
        *,
        activation: Activation | None,
        out_dtype: torch.dtype,
        quantizer: Quantizer,
    ) -> None:
        """
        Args:
            params: makes the unfilled tensors of `format`, and "bias" if the layer has one.
        """
        self.ops = ops
        self._format = format
        self._make_params = params
        self._activation = activation
        self._out_dtype = out_dtype
        self._quantizer = quantizer
        self._params: dict[str, Param] = {}
        self._awaited = 0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [tokens, inputs], residual [tokens, outputs] -> [tokens, outputs]."""
        return self.ops.linear(x, self.matrix, residual)

    def place(self, param: str, part: int) -> Fill:
        """Where a tensor of the checkpoint goes; the layer waits for all it was asked for."""
        self._awaited += 1

        def fill(write: Callable[[Tensor], object]) -> None:
            self._params = self._params or self._make_params()
            write(self._params[param].parts[part])
            self._awaited -= 1
            if not self._awaited:
                self.finish()

        return fill

    def finish(self) -> None:
        """Turn the filled tensors into the matrix, and let go of them.

        Raises:
            ModelError: weights that cannot be quantised.
        """
        tensors = {name: param.tensor for name, param in self._params.items()}
        self._params = {}
        bias = tensors.pop("bias", None)
        weight = self._quantizer(self._format.weight(tensors))
        del tensors  # before packing makes the next copy
        self.matrix = self.ops.pack(weight, bias, self._activation, self._out_dtype)
