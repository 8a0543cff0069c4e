"""Inputs and tolerances for every operation, so that one test covers every implementation.

A case makes its arguments from a seed; `outputs` runs an implementation on them and returns what
it returned or wrote. Sizes are odd on purpose: one row, no multiple of a vector, strided views.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kvik.kernels.ops import Ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# An implementation may round intermediate results to the dtype; the reference rounds once.
_RTOL = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
_ATOL = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}


@dataclass(frozen=True, slots=True)
class Maker:
    """Seeded tensors of one dtype on one device."""

    generator: torch.Generator
    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator) * scale
        return drawn.to(self.device, dtype or self.dtype)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator).to(self.device)


@dataclass(frozen=True, slots=True)
class Case:
    """Attributes:
    op: a field of `Ops`.
    make: the arguments.
    written: indices of the arguments that the operation changes.
    exact: the operation only moves data.
    """

    op: str
    name: str
    make: Callable[[Maker], tuple[Tensor | float, ...]]
    written: tuple[int, ...] = ()
    exact: bool = False

    def tolerance(self, dtype: torch.dtype) -> tuple[float, float]:
        """rtol, atol."""
        return (0.0, 0.0) if self.exact else (_RTOL[dtype], _ATOL[dtype])


def arguments(
    case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor | float, ...]:
    """Equal seeds give equal arguments."""
    return case.make(Maker(torch.Generator().manual_seed(seed), dtype, device))


def outputs(ops: Ops, case: Case, args: tuple[Tensor | float, ...]) -> tuple[Tensor, ...]:
    """Run one case: what the operation returns, then the arguments it writes to."""
    result = getattr(ops, case.op)(*args)
    returned = () if result is None else result if isinstance(result, tuple) else (result,)
    written = (arg for i, arg in enumerate(args) if i in case.written)
    return (*returned, *(arg for arg in written if isinstance(arg, Tensor)))


def _norms() -> list[Case]:
    cases = []
    for rows, dim in product((1, 7), (1, 33, 256)):
        name = f"{rows}x{dim}"
        cases += [
            Case("rms_norm", name, _rms_norm(rows, dim)),
            Case("add_rms_norm", name, _add_rms_norm(rows, dim)),
            Case("layer_norm", name, _layer_norm(rows, dim)),
        ]
    zeros = Case("rms_norm", "zeros", lambda m: (m.normal(3, 64) * 0, m.normal(64), 1e-6))
    large = Case("rms_norm", "large", lambda m: (m.normal(3, 64, scale=3e3), m.normal(64), 1e-6))
    heads = Case("rms_norm", "per-head", lambda m: (m.normal(5, 9, 32)[:, 2:6], m.normal(32), 1e-6))
    return [*cases, zeros, large, heads]


def _rms_norm(rows: int, dim: int) -> Callable[[Maker], tuple[Tensor | float, ...]]:
    return lambda m: (m.normal(rows, dim), m.normal(dim), 1e-5)


def _add_rms_norm(rows: int, dim: int) -> Callable[[Maker], tuple[Tensor | float, ...]]:
    return lambda m: (m.normal(rows, dim), m.normal(rows, dim), m.normal(dim), 1e-5)


def _layer_norm(rows: int, dim: int) -> Callable[[Maker], tuple[Tensor | float, ...]]:
    return lambda m: (m.normal(rows, dim, scale=3.0), m.normal(dim), m.normal(dim), 1e-5)


def _rotaries() -> list[Case]:
    def make(
        tokens: int, heads: int, kv_heads: int, dim: int
    ) -> Callable[[Maker], tuple[Tensor, ...]]:
        def arguments(m: Maker) -> tuple[Tensor, ...]:
            # q and k are views of one fused projection, as in the models
            qkv = m.normal(tokens, heads + 2 * kv_heads, dim)
            q, k, _ = qkv.split((heads, kv_heads, kv_heads), dim=1)
            angle = m.normal(tokens, dim // 2, scale=10.0, dtype=torch.float32)
            return q, k, angle.cos(), angle.sin()

        return arguments

    shapes = ((1, 8, 4, 32), (5, 3, 1, 2), (7, 4, 4, 64), (3, 14, 2, 10))
    return [Case("rotary", "x".join(map(str, shape)), make(*shape)) for shape in shapes]


def _activations() -> list[Case]:
    def silu(rows: int, inner: int, scale: float) -> Callable[[Maker], tuple[Tensor, ...]]:
        return lambda m: (m.normal(rows, 2 * inner, scale=scale),)

    def gelu(rows: int, dim: int, scale: float) -> Callable[[Maker], tuple[Tensor, ...]]:
        return lambda m: (m.normal(rows, dim, scale=scale),)

    cases = []
    for rows, dim, scale in ((1, 704, 1.0), (7, 33, 1.0), (3, 1, 1.0), (4, 65, 50.0)):
        name = f"{rows}x{dim}@{scale:g}"
        cases += [
            Case("silu_and_mul", name, silu(rows, dim, scale)),
            Case("gelu_tanh", name, gelu(rows, dim, scale)),
        ]
    return cases


def _caches() -> list[Case]:
    def store(
        tokens: int, blocks: int, block_size: int, kv_heads: int, dim: int
    ) -> Callable[[Maker], tuple[Tensor, ...]]:
        def arguments(m: Maker) -> tuple[Tensor, ...]:
            k, v = m.normal(tokens, 2 * kv_heads, dim).chunk(2, dim=1)
            cache = (blocks, block_size, kv_heads, dim)
            slots = m.permutation(blocks * block_size)[:tokens]
            return k, v, m.normal(*cache), m.normal(*cache), slots

        return arguments

    def copy(blocks: int, n: int) -> Callable[[Maker], tuple[Tensor, ...]]:
        # sources and targets overlap: a block is read before it is overwritten
        return lambda m: (
            m.normal(blocks, 4, 2, 3),
            m.permutation(blocks)[:n],
            m.permutation(blocks)[:n],
        )

    shapes = ((1, 3, 16, 4, 32), (9, 5, 8, 1, 7), (6, 20, 1, 2, 16), (64, 1, 64, 3, 5))
    stores = [
        Case("store_kv", "x".join(map(str, s)), store(*s), written=(2, 3), exact=True)
        for s in shapes
    ]
    copies = [
        Case("copy_blocks", f"{n} of {blocks}", copy(blocks, n), written=(0,), exact=True)
        for blocks, n in ((1, 1), (6, 3), (9, 9))
    ]
    return [*stores, *copies]


CASES = (*_norms(), *_rotaries(), *_activations(), *_caches())
