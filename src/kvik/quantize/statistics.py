"""Statistics of a layer's inputs; their size does not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

PIECE = 1 << 25  # numbers of the inputs in fp32 at a time
BLOCK = 1024  # columns of the second moment that are added together


class InputStatistics:
    """Sums over the inputs x [inputs] of all calibration tokens.

    Products within a batch are summed in fp32, batches in fp64, because an fp32 sum of millions of
    squares drifts. Batches should be large: each one passes over the whole second moment.

    Attributes:
        inputs, tokens: how many.
        abs_sum: [inputs] fp64, the sum of |x|.
        absmax: [inputs] fp32.
        sample: [up to `sample_size`, inputs] fp32, a uniform sample of all tokens. It depends on
            their positions in the stream alone, not on the batches.
    """

    def __init__(
        self,
        inputs: int,
        *,
        moment: bool = True,
        sample_size: int = 512,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            moment: whether to keep the second moment, by far the largest part.
            sample_size: 0: keep no sample.
        """
        self.inputs = inputs
        self.tokens = 0
        self.sample_size = sample_size
        self.abs_sum = torch.zeros(inputs, dtype=torch.float64, device=device)
        self.absmax = torch.zeros(inputs, device=device)
        self.sample = torch.empty(0, inputs, device=device)
        self._keys = torch.empty(0, dtype=torch.int64, device=device)
        # x^T x, of which the blocks on and below the diagonal are kept up to date
        self._lower: Tensor | None = None
        if moment:
            self._lower = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add x [tokens, inputs], any float dtype.

        Raises:
            ValueError: x holds NaN or infinity; nothing is added then.
        """
        if not len(x):
            return
        absmax = torch.maximum(x.amax(0), -x.amin(0)).float()
        if not bool(absmax.isfinite().all()):
            raise ValueError("the inputs of a layer hold NaN or infinity")
        self.absmax = torch.maximum(self.absmax, absmax)
        for piece in x.split(max(1, PIECE // self.inputs)):
            wide = piece.float()
            self.abs_sum += wide.abs().sum(0)
            if self._lower is not None:
                _add_products(self._lower, wide, exact=x.dtype == torch.bfloat16)
            places = torch.arange(len(wide), device=x.device) + self.tokens
            self._draw(_keys(places), wide)
            self.tokens += len(wide)

    def mean_abs(self) -> Tensor:
        """[inputs] fp32."""
        return (self.abs_sum / max(self.tokens, 1)).float()

    def hessian(self) -> Tensor:
        """Return 2 X X^T, the Hessian of the squared error: [inputs, inputs] fp32, a copy.

        Raises:
            ValueError: the second moment was not kept.
        """
        if self._lower is None:
            raise ValueError("no second moment was kept")
        whole = self._lower.float().mul_(2)
        for start in range(0, self.inputs, BLOCK):
            end = min(start + BLOCK, self.inputs)
            corner = whole[start:end, start:end]
            corner.copy_(corner.tril() + corner.tril(-1).t())
            whole[:start, start:end] = whole[start:end, :start].t()
        return whole

    def _draw(self, keys: Tensor, tokens: Tensor) -> None:
        """Keep the tokens with the smallest keys: a uniform sample of a stream of any length."""
        if not self.sample_size:
            return
        if len(self._keys) == self.sample_size:
            smaller = keys < self._keys[-1:]
            keys, tokens = keys[smaller], tokens[smaller]
        keys = torch.cat((self._keys, keys))
        kept = keys.argsort()[: self.sample_size]
        self._keys, self.sample = keys[kept], torch.cat((self.sample, tokens))[kept]


def _add_products(lower: Tensor, x: Tensor, exact: bool) -> None:
    """lower += x^T x, on and below the diagonal.

    Args:
        x: [tokens, inputs] fp32.
        exact: bfloat16 holds all of x, so that its products are those of fp32.
    """
    with _short_products() if exact else nullcontext():
        for start in range(0, len(lower), BLOCK):
            end = min(start + BLOCK, len(lower))
            lower[start:end, :end] += x[:, start:end].t() @ x[:, :end]


@contextmanager
def _short_products() -> Iterator[None]:
    """Let fp32 matrices be multiplied in bfloat16 where that is faster, with fp32 sums."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _keys(places: Tensor) -> Tensor:
    """Return a pseudo-random number for each of n positions: [n] int64 (splitmix64's finaliser)."""

    def shifted(z: Tensor, by: int) -> Tensor:
        return (z >> by) & (1 << 64 - by) - 1  # without the sign

    z = places * -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number
    z = (z ^ shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ shifted(z, 31)
