"""Linear layers."""

from __future__ import annotations

from torch import Tensor

from kvik.nn.formats.base import WeightFormat


class Linear:
    """y = x W^T + b, in whatever format the weight is stored."""

    __slots__ = ("bias", "format", "params")

    def __init__(
        self, format: WeightFormat, params: dict[str, Tensor], bias: Tensor | None = None
    ) -> None:
        self.format = format
        self.params = params
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] -> [tokens, outputs]."""
        return self.format.apply(x, self.params, self.bias)

    def finish(self) -> None:
        """Bring the loaded weights into the form the format multiplies."""
        self.params = self.format.finish(self.params)
