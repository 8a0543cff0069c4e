"""Inputs and tolerances for every operation, so that one test covers every implementation.

A case makes its arguments from a seed; `outputs` runs an implementation on them and returns the
tensors that it returned or wrote. Sizes are irregular on purpose: one row, not a multiple of a
vector, strided views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import get_args

import torch
from torch import Tensor

from kvik.kernels.ops import Draws, Gate, Masks, Ops, Penalties, Sequences, StateHeads, Truncation
from kvik.kernels.weights import (
    PAIRED,
    Activation,
    Matrix,
    MatrixSpec,
    Weight,
    float_weight,
    fp8_weight,
    int4_min_weight,
    int4_weight,
    int8_weight,
    mxfp4_weight,
    nvfp4_weight,
    ordered_weight,
    table_weight,
)
from kvik.spec.experts import Router
from kvik.spec.weight_kind import MX_GROUP, Rounding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATES: tuple[Gate, ...] = get_args(Gate)

# An implementation may round intermediate results to the dtype; the reference rounds once.
_RTOL = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
_ATOL = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
# Sums of many products of either sign: errors scale with the terms, not with the small result.
_PRODUCT_ATOL = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

Argument = (
    Tensor
    | float
    | Weight
    | Draws
    | Masks
    | Penalties
    | Router
    | Sequences
    | StateHeads
    | str
    | torch.dtype
    | None
)
Arguments = tuple[Argument, ...]


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

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return random integers in low..high, inclusive."""
        drawn = torch.randint(low, high + 1, shape, generator=self.generator)
        return drawn.to(self.device, dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A test case of an operation.

    Attributes:
        op: a field of `Ops`.
        make: makes the arguments.
        run: runs the operation on the arguments; None: a plain call.
        written: indices of the arguments that the operation changes.
        spoiled: indices of the arguments that it may use as scratch.
        exact: the operation only moves data, or its result has one correct value.
        product: it sums products.
    """

    op: str
    name: str
    make: Callable[[Maker], Arguments]
    run: Callable[..., object] | None = None
    written: tuple[int, ...] = ()
    spoiled: tuple[int, ...] = ()
    exact: bool = False
    product: bool = False

    def tolerance(self, dtype: torch.dtype) -> tuple[float, float]:
        """rtol, atol."""
        if self.exact:
            return 0.0, 0.0
        return _RTOL[dtype], (_PRODUCT_ATOL if self.product else _ATOL)[dtype]


def arguments(case: Case, dtype: torch.dtype, device: torch.device) -> Arguments:
    """Return the arguments of a case, the same in each call."""
    return case.make(Maker(torch.Generator().manual_seed(0), dtype, device))


def outputs(ops: Ops, case: Case, args: Arguments) -> tuple[Tensor, ...]:
    """Run one case: what the operation returns, then the arguments it writes to."""
    result = case.run(ops, *args) if case.run else getattr(ops, case.op)(*args)
    returned = () if result is None else result if isinstance(result, tuple) else (result,)
    written = (arg for i, arg in enumerate(args) if i in case.written)
    return (*returned, *(arg for arg in written if isinstance(arg, Tensor)))


def _norms() -> list[Case]:
    cases = []
    for rows, dim in product((1, 7), (1, 33, 256)):
        name = f"{rows}x{dim}"
        cases += [
            Case("rms_norm", name, partial(_rms_norm, rows, dim)),
            Case("layer_norm", name, partial(_layer_norm, rows, dim)),
        ]
    zeros = Case("rms_norm", "zeros", lambda m: (m.normal(3, 64) * 0, m.normal(64), 1e-6))
    large = Case("rms_norm", "large", lambda m: (m.normal(3, 64, scale=3e3), m.normal(64), 1e-6))
    heads = Case("rms_norm", "per-head", lambda m: (m.normal(5, 9, 32)[:, 2:6], m.normal(32), 1e-6))
    each = Case(
        "rms_norm",
        "each head",
        lambda m: (m.normal(5, 2 * 70).view(5, 2, 70), m.normal(2, 70).float(), 1e-6),
    )
    wide = Case("rms_norm", "fp32-gain", lambda m: (m.normal(5, 70), m.normal(70).float(), 1e-6))
    layer_heads = Case(
        "layer_norm",
        "per-head",
        lambda m: (m.normal(5, 9, 33)[:, 2:6], m.normal(4, 33), m.normal(4, 33), 1e-5),
    )
    rescaled = [
        Case(
            "rescaled",
            f"{rows}x{parts}x{dim}@{scale:g}",
            partial(_rescaled, rows, parts, dim, scale),
        )
        for rows, parts, dim, scale in ((1, 3, 256, 1.0), (7, 1, 33, 50.0), (3, 2, 64, 1e-4))
    ]
    return [*cases, zeros, large, wide, heads, each, layer_heads, *rescaled]


def _rescaled(rows: int, parts: int, dim: int, scale: float, m: Maker) -> Arguments:
    x = m.normal(rows, parts + 1, dim, scale=scale)
    return x[:, :parts], m.normal(rows, dim, scale=3.0), 1e-5


def _rms_norm(rows: int, dim: int, m: Maker) -> Arguments:
    return m.normal(rows, dim), m.normal(dim), 1e-5


def _layer_norm(rows: int, dim: int, m: Maker) -> Arguments:
    return m.normal(rows, dim, scale=3.0), m.normal(dim), m.normal(dim), 1e-5


def _rotaries() -> list[Case]:
    def make(tokens: int, heads: int, kv_heads: int, dim: int, m: Maker) -> Arguments:
        # q and k are views of one fused projection, as in the models
        qkv = m.normal(tokens, heads + 2 * kv_heads, dim)
        q, k, _ = qkv.split((heads, kv_heads, kv_heads), dim=1)
        angle = m.normal(tokens, dim // 2, scale=10.0, dtype=torch.float32)
        return q, k, torch.cat((angle.cos(), angle.sin()), dim=-1)

    def angles(rows: int, low: int, dim: int, tokens: int, m: Maker) -> Arguments:
        return (
            m.normal(rows, dim, dtype=torch.float32),
            m.normal(low, dim, dtype=torch.float32),
            m.integers(0, rows * low - 1, tokens, dtype=torch.int64),
            rows * low // 2,
        )

    shapes = ((1, 8, 4, 32), (5, 3, 1, 2), (7, 4, 4, 64), (3, 14, 2, 10))
    return [
        *(
            Case("rotations", f"{n} of {h}x{low}x{d}", partial(angles, h, low, d, n), exact=True)
            for h, low, d, n in ((1, 3, 2, 1), (5, 16, 64, 9), (3, 7, 10, 4))
        ),
        *(
            Case("rotary", "x".join(map(str, shape)), partial(make, *shape), spoiled=(0, 1))
            for shape in shapes
        ),
    ]


def _activations() -> list[Case]:
    def made(rows: int, dim: int, scale: float, activation: Activation, m: Maker) -> Arguments:
        width = 2 * dim if activation in PAIRED else dim
        return m.normal(rows, width, scale=scale), activation

    def times(rows: int, dim: int, scale: float, m: Maker) -> Arguments:
        return m.normal(rows, dim, scale=scale), 0.3

    def pair(rows: int, dim: int, scale: float, m: Maker) -> Arguments:
        return m.normal(rows, dim, scale=scale), m.normal(rows, dim + 3, scale=scale)

    def split(rows: int, dim: int, scale: float, m: Maker) -> Arguments:
        return m.normal(rows, dim, scale=scale), 0.7, 1.4

    def capped(rows: int, dim: int, scale: float, m: Maker) -> Arguments:
        return m.normal(rows, dim, scale=scale).float(), 3.0

    def top(rows: int, dim: int, scale: float, deviations: float, m: Maker) -> Arguments:
        return m.normal(rows, 2 * dim, scale=scale), "gelu_tanh_and_mul", deviations

    def weighed(sums: int, parts: int, rows: int, dim: int, added: bool, m: Maker) -> Arguments:
        weights = m.normal(rows, sums, parts, dtype=torch.float32)
        return m.normal(rows, parts * dim), weights, m.normal(rows, sums * dim) if added else None

    def streams(rows: int, dim: int, scale: float, count: int, m: Maker) -> Arguments:
        wide, n = partial(m.normal, dtype=torch.float32), 8 + count**2
        factors = wide(4, n)
        factors[3] = 0.1
        return m.normal(rows, dim, scale=scale), wide(rows, n + 1)[:, 1:], factors, 1e-5, count, 5

    every: tuple[Activation, ...] = get_args(Activation)
    cases = []
    for rows, dim, scale in ((1, 704, 1.0), (7, 33, 1.0), (3, 1, 1.0), (4, 65, 50.0)):
        name = f"{rows}x{dim}@{scale:g}"
        cases.append(Case("scaled", name, partial(times, rows, dim, scale)))
        cases.append(Case("clipped", name, partial(times, rows, dim, scale)))
        cases.append(Case("joined", name, partial(pair, rows, dim, scale)))
        cases.append(Case("xielu", name, partial(split, rows, dim, scale)))
        for deviations in (-0.3, 1.6):
            case = partial(top, rows, dim, min(scale, 1.0), deviations)
            cases.append(Case("activate_top", f"{deviations}-{name}", case))
        for sums, parts, added in ((4, 4, True), (3, 1, True), (1, 2, False)):
            case = partial(weighed, sums, parts, rows, dim, added)
            cases.append(Case("weighted_sums", f"{sums}x{parts}-{name}", case, product=True))
        for count in (0, 3, 4):
            mixing = partial(streams, rows, dim, scale, count)
            cases.append(Case("stream_weights", f"{count}-{name}", mixing))
        cases.append(Case("softcap", name, partial(capped, rows, dim, scale), written=(0,)))
        for kind in every:
            size = min(scale, 1.0) if kind in ("gelu_tanh_and_mul", "gelu_and_mul") else scale
            cases.append(Case("activate", f"{kind}-{name}", partial(made, rows, dim, size, kind)))
    return cases


def _caches() -> list[Case]:
    def store(
        tokens: int, blocks: int, block_size: int, kv_heads: int, dim: int, m: Maker
    ) -> Arguments:
        k, v = m.normal(tokens, 2 * kv_heads, dim).chunk(2, dim=1)
        cache = (blocks, block_size, kv_heads, dim)
        slots = m.permutation(blocks * block_size)[:tokens]
        return k, v, m.normal(*cache), m.normal(*cache), slots

    def copy(blocks: int, n: int, m: Maker) -> Arguments:
        # Sources and targets overlap: a block is read before it is overwritten. They are columns of
        # pairs, as in a plan.
        pages = m.normal(blocks, 4, 2, 3)
        pairs = torch.stack([m.permutation(blocks)[:n] for _ in range(2)], dim=1)
        return pages, *pairs.unbind(1)

    shapes = ((1, 3, 16, 4, 32), (9, 5, 8, 1, 7), (6, 20, 1, 2, 16), (64, 1, 64, 3, 5))
    stores = [
        Case("store_kv", "x".join(map(str, s)), partial(store, *s), written=(2, 3), exact=True)
        for s in shapes
    ]
    copies = [
        Case("copy_blocks", f"{n} of {blocks}", partial(copy, blocks, n), written=(0,), exact=True)
        for blocks, n in ((1, 1), (6, 3), (9, 9))
    ]
    return [*stores, *copies]


def _products() -> list[Case]:
    """Return cases for each kind of weight and what may follow the product; "pack" is run too."""
    kinds: tuple[tuple[str, MakeWeight, Shapes], ...] = (
        ("float", random_float, ((1, 33, 7), (5, 257, 64), (9, 64, 1))),
        ("int8", random_int8(activations=False), ((1, 33, 7), (5, 257, 64))),
        ("int8-32", random_int8(32, activations=False), ((1, 33, 7), (5, 257, 64))),
        ("w8a8", random_int8(activations=True), ((1, 33, 7), (5, 257, 64))),
        ("w8a8-16", random_int8(16, activations=True), ((1, 33, 7), (5, 257, 64))),
        ("int4-32", random_int4(32, zeros=True), ((1, 96, 7), (5, 288, 64))),
        ("int4-128", random_int4(128, zeros=True), ((3, 256, 33),)),
        ("int4-symmetric", random_int4(64, zeros=False), ((3, 192, 33),)),
        ("int4-min", random_int4_min, ((1, 96, 7), (5, 288, 64))),
        ("mxfp4", random_mxfp4, ((1, 96, 7), (5, 288, 64))),
        ("nvfp4", random_nvfp4, ((1, 96, 7), (5, 288, 64))),
        ("iq4", random_iq4, ((1, 96, 7), (5, 288, 64))),
        ("nf4", random_table("nf4"), ((1, 128, 7), (5, 320, 64))),
        ("bnb_fp4", random_table("bnb_fp4"), ((1, 128, 7), (5, 320, 64))),
        ("fp8", random_fp8(0), ((1, 33, 7), (5, 257, 64))),
        ("fp8-128", random_fp8(128), ((1, 33, 7), (5, 257, 64))),
        ("fp8-token", random_fp8(0, "token"), ((1, 33, 7), (5, 257, 64))),
        ("fp8-static", random_fp8(0, "static"), ((1, 33, 7), (17, 257, 64))),
        ("fp8-128-group", random_fp8(128, "group"), ((1, 33, 7), (5, 257, 64), (17, 300, 33))),
        ("fp8-128-token", random_fp8(128, "token"), ((3, 257, 64),)),
        ("fp8-32-static", random_fp8(32, "static"), ((3, 257, 64),)),
        ("int4-ordered", _ordered(random_int4(32, zeros=True)), ((1, 96, 7), (5, 288, 64))),
        ("fp8-ordered", _ordered(random_fp8(0)), ((3, 33, 7),)),
        ("fp8-token-ordered", _ordered(random_fp8(0, "token")), ((3, 33, 7),)),
    )
    activations: tuple[Activation | None, ...]
    activations = (None, "silu_and_mul", "gelu_tanh", "gelu_tanh_and_mul", "gelu")
    pairs: list[tuple[tuple[str, MakeWeight, Shapes], Activation | None]]
    pairs = list(product(kinds, activations))
    pairs += [
        (kind, "clamped_swiglu") for kind in kinds if kind[0] in ("float", "mxfp4", "fp8-token")
    ]
    pairs += [(kind, "limited_swiglu") for kind in kinds if kind[0] in ("float", "int4-32")]
    pairs.append((kinds[0], "clipped_swiglu"))
    cases = []
    for (kind, weight, shapes), activation in pairs:
        for shape, bias, residual in zip(
            (*shapes, shapes[0], shapes[-1]),
            (False, True, True, False, True),
            (True, False, True, False, True),
            strict=False,
        ):
            extras = ("bias",) * bias + ("residual",) * residual
            name = "-".join(("x".join(map(str, shape)), kind, activation or "plain", *extras))
            make = partial(_product, shape, weight, activation, bias, residual)
            cases.append(Case("linear", name, make, _run_linear, spoiled=(5,), product=True))
    cases += [
        Case("linear", f"wide-out-{kind}", partial(_wide_out, weight), _run_linear, product=True)
        for kind, weight in (("float", random_float), ("w8a8", random_int8(activations=True)))
    ]
    cases += [_each(1, 3, 33, 7), _each(2, 2, 48, 64), _each(17, 5, 64, 33)]
    cases += [
        Case("matrix_rows", kind, partial(_rows_of, weight, shapes[0]), _run_matrix_rows)
        for kind, weight, shapes in kinds
    ]
    return cases


MakeWeight = Callable[[Maker, int, int], Weight]
Shapes = tuple[tuple[int, int, int], ...]  # tokens, inputs, outputs


def random_float(m: Maker, outputs: int, inputs: int) -> Weight:
    """Return a weight [outputs, inputs] in floats."""
    return float_weight(m.normal(outputs, inputs, scale=inputs**-0.5))


def _scales(m: Maker, outputs: int, inputs: int, group: int, largest: float) -> Tensor:
    """Return scales such that sums of products with codes up to `largest` are about 1; with groups,
    fp16 numbers."""
    size = inputs**-0.5 * 2 / largest
    if not group:
        return m.normal(outputs, dtype=torch.float32).abs() * size
    drawn = m.normal(outputs, -(-inputs // group), scale=size, dtype=torch.float16)
    return drawn.abs().float()


def random_int8(group: int = 0, *, activations: bool) -> MakeWeight:
    """Return a maker of 8-bit weights.

    Args:
        group: inputs that share a scale; 0: all of them.
        activations: whether x is also rounded.
    """

    def make(m: Maker, outputs: int, inputs: int) -> Weight:
        values = m.integers(-127, 127, outputs, inputs, dtype=torch.int8)
        scales = _scales(m, outputs, inputs, group, 140)
        return int8_weight(values, scales, activations, group)

    return make


def random_int4(group: int, *, zeros: bool) -> MakeWeight:
    """Return a maker of 4-bit weights in groups, with or without zero points."""

    def make(m: Maker, outputs: int, inputs: int) -> Weight:
        values = m.integers(0, 255, outputs, inputs // 2, dtype=torch.uint8)
        scales = _scales(m, outputs, inputs, group, 10)
        points = m.integers(0, 15, *scales.shape, dtype=torch.uint8) if zeros else None
        return int4_weight(values, scales, points, group)

    return make


def random_int4_min(m: Maker, outputs: int, inputs: int) -> Weight:
    """Return a weight [outputs, inputs] in four bits, in groups of 32 with minima."""
    values = m.integers(0, 255, outputs, inputs // 2, dtype=torch.uint8)
    scales = _scales(m, outputs, inputs, 32, 10)
    minima = _scales(m, outputs, inputs, 32, 2)
    return int4_min_weight(values, scales, minima, 32)


def random_mxfp4(m: Maker, outputs: int, inputs: int) -> Weight:
    """Return a weight [outputs, inputs] in four-bit floats."""
    values = m.integers(0, 255, outputs, inputs // 2, dtype=torch.uint8)
    middle = 125 - round(math.log2(inputs) / 2)
    scales = m.integers(middle - 2, middle + 1, outputs, inputs // MX_GROUP, dtype=torch.uint8)
    return mxfp4_weight(values, scales)


def random_nvfp4(m: Maker, outputs: int, inputs: int) -> Weight:
    """Return a weight [outputs, inputs] in four-bit floats, in groups of 16."""
    values = m.integers(0, 255, outputs, inputs // 2, dtype=torch.uint8)
    return nvfp4_weight(values, _scales(m, outputs, inputs, 16, 3), 16)


def random_iq4(m: Maker, outputs: int, inputs: int) -> Weight:
    """Return a weight [outputs, inputs] of numbers of a table, in groups of 32."""
    values = m.integers(0, 255, outputs, inputs // 2, dtype=torch.uint8)
    return table_weight("iq4", values, _scales(m, outputs, inputs, 32, 70), 32)


def random_table(codes: str, group: int = 64) -> MakeWeight:
    """Return a maker of weights of numbers of a table; see `as_integers`."""
    unit, _ = INTEGERS[codes]

    def make(m: Maker, outputs: int, inputs: int) -> Weight:
        values = m.integers(0, 255, outputs, inputs // 2, dtype=torch.uint8)
        scales = _scales(m, outputs, inputs, group, unit / 2) * unit  # of integers: fp16 numbers
        return table_weight(codes, values, scales, group)

    return make


# Kernels for integers round these multiples of some tables' numbers.
INTEGERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "nf4": (112, (-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112)),
    "bnb_fp4": (120, (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30)),
}


def in_integers(weight: Weight) -> Weight:
    """Return the weight that kernels for integers multiply."""
    if weight.kind.codes not in INTEGERS:
        return weight
    unit, table = INTEGERS[weight.kind.codes]
    codes = torch.stack((weight.values & 15, weight.values >> 4), dim=-1).flatten(1).int()
    values = torch.tensor(table, dtype=torch.int8, device=codes.device)[codes]
    assert weight.scales is not None
    plain = int8_weight(values, weight.scales / unit, False, weight.kind.group)
    return plain if weight.order is None else ordered_weight(plain, weight.order)


def as_integers(args: Arguments) -> Arguments:
    """Replace weights among the arguments; see `in_integers`."""
    return tuple(in_integers(part) if isinstance(part, Weight) else part for part in args)


def random_fp8(group: int, activations: Rounding = "float") -> MakeWeight:
    """Return a maker of E4M3 weights.

    Args:
        group: inputs that share a scale; 0: all of them.
        activations: how x is rounded.
    """

    def make(m: Maker, outputs: int, inputs: int) -> Weight:
        sizes = m.integers(0, 126, outputs, inputs, dtype=torch.uint8)  # 127 is NaN
        signs = m.integers(0, 1, outputs, inputs, dtype=torch.uint8) * 128
        values = (sizes + signs).view(torch.float8_e4m3fn)
        scales = _scales(m, outputs, inputs, group, 448)
        static = activations == "static"  # a scale that clips the largest numbers
        scale = torch.full((1,), 1.5 / 448, device=m.device) if static else None
        return fp8_weight(values, scales, group, activations, scale)

    return make


def _ordered(weight: MakeWeight) -> MakeWeight:
    def make(m: Maker, outputs: int, inputs: int) -> Weight:
        return ordered_weight(weight(m, outputs, inputs), m.permutation(inputs).int())

    return make


def _each(tokens: int, heads: int, inputs: int, outputs: int) -> Case:
    """Return a case of `linear_each` with strided heads and tokens."""
    rows = -(-outputs // 32) * 32

    def arguments(m: Maker) -> Arguments:
        x = m.normal(tokens, heads, inputs + 3)[:, :, :inputs]
        return x, random_float(m, heads * rows, inputs), outputs

    def run(ops: Ops, x: Tensor, weight: Weight, outputs: int) -> Tensor:
        return ops.linear_each(x, filled_matrix(ops, weight, None, None, x.dtype), outputs)

    name = f"{tokens}x{heads}x{inputs}x{outputs}"
    return Case("linear_each", name, arguments, run, product=True)


def _product(
    shape: tuple[int, int, int],
    weight: MakeWeight,
    activation: Activation | None,
    bias: bool,
    residual: bool,
    m: Maker,
) -> Arguments:
    tokens, inputs, outputs = shape
    rows = 2 * outputs if activation in PAIRED else outputs
    x = m.normal(tokens, inputs + 3)[:, :inputs]  # strided
    x[1:2] = 0  # nothing to scale
    return (
        x,
        weight(m, rows, inputs),
        m.normal(rows) if bias else None,
        activation,
        m.dtype,
        m.normal(tokens, outputs) if residual else None,
    )


def _wide_out(weight: MakeWeight, m: Maker) -> Arguments:
    return m.normal(5, 64), weight(m, 33, 64), None, None, torch.float32, None


def filled_matrix(
    ops: Ops,
    weight: Weight,
    bias: Tensor | None,
    activation: Activation | None,
    out_dtype: torch.dtype,
    device: torch.device | None = None,
) -> Matrix:
    """Return a matrix filled with a weight, on a device; None: the weight's device."""
    spec = MatrixSpec(
        weight.kind,
        weight.outputs,
        weight.inputs,
        bias is not None,
        activation,
        out_dtype,
        device or weight.values.device,
    )
    matrix = ops.matrix(spec)
    ops.pack_rows(matrix, 0, weight)
    if matrix.bias is not None and bias is not None:
        matrix.bias.copy_(bias)
    return matrix


def _run_linear(
    ops: Ops,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    activation: Activation | None,
    out_dtype: torch.dtype,
    residual: Tensor | None,
) -> Tensor:
    return ops.linear(x, filled_matrix(ops, weight, bias, activation, out_dtype), residual)


def _rows_of(weight: MakeWeight, shape: tuple[int, int, int], m: Maker) -> Arguments:
    _, inputs, outputs = shape
    return weight(m, outputs, inputs), m.integers(0, outputs - 1, 9, dtype=torch.int64), m.dtype


def _run_matrix_rows(ops: Ops, weight: Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    return ops.matrix_rows(filled_matrix(ops, weight, None, None, torch.float32), ids, dtype)


def _experts() -> list[Case]:
    routers = {
        "softmax": Router(8, 3, normalised=False),
        "normalised": Router(64, 8),
        "scaled": Router(12, 3, scaled=True),
        "corrected": Router(33, 4, "sigmoid", corrected=True, scale=2.5),
        "groups": Router(24, 3, groups=4, kept_groups=2, normalised=False, scale=16.0),
        "best-two": Router(24, 6, "sigmoid", True, 4, 2, "best two", scale=1.7),
        "sparsemixer": Router(16, 3, "sparsemixer", normalised=False, jitter=0.3),
        "logit": Router(19, 5, "logit", corrected=True, normalised=False),
        "zero": Router(8, 5, corrected=True, normalised=False, scale=1.5, zero=9),
        "sqrtsoftplus": Router(19, 5, "sqrtsoftplus", corrected=True, scale=1.5),
    }
    kinds = {
        "float": (random_float, 40, 24),
        "w8a8": (random_int8(activations=True), 40, 24),
        "fp8-token-ordered": (_ordered(random_fp8(0, "token")), 40, 24),
    }
    return [
        *(Case("route", name, partial(_logits, 9, router)) for name, router in routers.items()),
        Case("route", "given", partial(_logits, 9, routers["sqrtsoftplus"], given=True)),
        *(
            Case(
                "experts",
                f"{rows}-{name}{'-weighed' * router.weigh_inputs}",
                partial(_mixture, router, rows, *kind),
                _run_experts,
                spoiled=(4,),
                product=True,
            )
            for router, sizes in (
                (Router(5, 3), (1, 2, 19)),
                (Router(5, 2, "sigmoid", normalised=False, weigh_inputs=True), (1, 19)),
            )
            for name, kind in kinds.items()
            for rows in sizes
        ),
        *(
            Case(
                "experts",
                f"{name}-adapters",
                partial(_adapters, ids),
                _run_adapters,
                spoiled=(3,),
                product=True,
            )
            for name, ids in {
                "one": [2],
                "no": [-1, -1, -1],
                "many": [0, -1, 2, 2, 1, 3] * 12,
                "some": [-1, 3, 0, 0, -1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1],
            }.items()
        ),
    ]


def _logits(rows: int, router: Router, m: Maker, given: bool = False) -> Arguments:
    logits = m.normal(rows, router.outputs, scale=2.0, dtype=torch.float32)
    ids = torch.arange(rows * router.active, device=logits.device).view(rows, -1) % router.experts
    correction = m.normal(router.outputs, dtype=torch.float32) if router.corrected else None
    scales = m.normal(router.experts, dtype=torch.float32) if router.scaled else None
    return logits, router, correction, scales, ids if given else None


def _mixture(
    router: Router, rows: int, weight: MakeWeight, hidden: int, inner: int, m: Maker
) -> Arguments:
    logits = m.normal(rows, router.experts, dtype=torch.float32)
    logits[:, 3] = -9.0  # an expert without rows
    made = []
    for _ in range(router.experts):
        made += [weight(m, 2 * inner, hidden), weight(m, hidden, inner)]
    residual = m.normal(rows, hidden) if rows > 1 else None
    return m.normal(rows, hidden), logits, router, m.dtype, residual, *made


def _run_experts(
    ops: Ops,
    x: Tensor,
    logits: Tensor,
    router: Router,
    dtype: torch.dtype,
    residual: Tensor | None,
    *weights: Weight,
) -> Tensor:
    up = [filled_matrix(ops, weight, None, "silu_and_mul", dtype) for weight in weights[::2]]
    down = [filled_matrix(ops, weight, None, None, dtype) for weight in weights[1::2]]
    ids, shares = ops.route(logits, router, None, None, None)
    experts = replace(ops.expert_set(up, down), weigh_inputs=router.weigh_inputs)
    return ops.experts(x, ids, shares, experts, residual)


def _adapters(chosen: list[int], m: Maker) -> Arguments:
    inputs, rank, outputs, rows = 40, 6, 72, len(chosen)
    ids = torch.tensor(chosen, device=m.device)[:, None]
    pairs = [random_float(m, *size) for _ in range(4) for size in ((rank, inputs), (outputs, rank))]
    return m.normal(rows, inputs), ids, m.dtype, m.normal(rows, outputs), *pairs


def _run_adapters(
    ops: Ops, x: Tensor, ids: Tensor, dtype: torch.dtype, y: Tensor, *pairs: Weight
) -> Tensor:
    up, down = (
        [filled_matrix(ops, pair, None, None, dtype) for pair in pairs[first::2]]
        for first in (0, 1)
    )
    return ops.experts(x, ids, None, ops.expert_set(up, down), y)


def _rows() -> list[Case]:
    def logits(rows: int, vocab: int, m: Maker) -> Arguments:
        drawn = m.integers(-9, 9, rows, vocab, dtype=m.dtype)  # with ties
        drawn[0, vocab // 2 :] = -torch.inf
        drawn[-1] = -torch.inf
        return (drawn,)

    def gather(rows: int, dim: int, n: int, m: Maker) -> Arguments:
        return m.normal(rows, dim), m.integers(0, rows - 1, n, dtype=torch.int64)

    def add(rows: int, dim: int, m: Maker) -> Arguments:
        return m.normal(rows, dim), m.normal(rows, dim)

    return [
        *(
            Case("largest", f"{r}x{v}", partial(logits, r, v), exact=True)
            for r, v in ((1, 1), (4, 1003))
        ),
        *(
            Case("gather_rows", f"{n} of {r}x{d}", partial(gather, r, d, n), exact=True)
            for r, d, n in ((1, 3, 1), (7, 33, 9))
        ),
        *(Case("add", f"{r}x{d}", partial(add, r, d), exact=True) for r, d in ((1, 1), (5, 67))),
    ]


def _rules() -> list[Case]:
    def penalties(rows: int, vocab: int, n: int, max_count: int, m: Maker) -> Arguments:
        logits = m.normal(rows, vocab, scale=3.0).float()
        logits[-1, ::2] = -torch.inf
        repetition, frequency, presence = torch.rand(3, n, generator=m.generator).to(m.device)
        seen = n + 2
        counts = m.integers(-9 * max_count, max_count, seen, vocab, dtype=torch.int32)
        return logits, Penalties(
            rows=m.permutation(rows)[:n],
            seen=m.permutation(seen)[:n],
            repetition=repetition + 0.5,
            frequency=frequency - 0.5,
            presence=presence - 0.5,
            in_prompt=m.integers(0, vocab // 9, seen, vocab, dtype=torch.int64) == 0,
            counts=counts.clamp(min=0),
        )

    def masks(rows: int, vocab: int, n: int, max_count: int, m: Maker) -> Arguments:
        words = m.integers(-(2**31), 2**31 - 1, n, vocab // 32 + 1, dtype=torch.int32)
        words[:, ::3], words[:, 1::5] = 0, -1
        logits = m.normal(rows, vocab, scale=3.0).float()
        return logits, Masks(rows=m.permutation(rows)[:n], words=words)

    sizes = ((1, 1, 1, 3), (4, 70, 3, 4), (3, 40003, 3, 1))
    return [
        Case(
            name,
            f"{n} of {r}x{vocab}",
            partial(made, r, vocab, n, max_count),
            written=(0,),
            exact=True,
        )
        for name, made in (("penalize", penalties), ("mask", masks))
        for r, vocab, n, max_count in sizes
    ]


def _states() -> list[Case]:
    """Return cases of operations with states: sequences begin, continue, are padding, or have no
    tokens, their rows are not in order, and some have drafts, in this step or in the last one."""
    most_drafts = 4

    def sequences(m: Maker, drafted: bool) -> Sequences:
        starts, lengths, rows = [0, 1, 6, 6, 7, 16], [5, 5, 9, 3, 20], [3, 0, 4, -1, 2]
        pending, drafts = [2, 0, 0, 0, most_drafts], [0, most_drafts, 0, 0, 3]
        return placed(m, starts, lengths, rows, *((pending, drafts) if drafted else ()))

    def long_sequences(m: Maker, drafted: bool) -> Sequences:
        """Return sequences of one to several chunks of a GPU."""
        starts, lengths = [0, 63, 64, 161, 225, 292], [63, 9, 97, 70, 97]
        drafts = ([0, 0, 0, 0, 3], [0, 0, 0, 2, 0]) if drafted else ()
        return placed(m, starts, lengths, [3, 4, 0, 2, 1], *drafts)

    def placed(m: Maker, starts: Sequence[int], *numbers: Sequence[int]) -> Sequences:
        longest = max(end - start for start, end in pairwise(starts))
        each = [torch.tensor(n).to(m.device, torch.int32) for n in (starts, *numbers)]
        return Sequences(*each[:3], longest, *each[3:])

    def masked(y: Tensor) -> Tensor:
        y[6] = 0  # of padding, which is undefined
        return y

    def convolution(
        channels: int, width: int, bias: bool, silu: bool, drafted: bool = False
    ) -> Case:
        def make(m: Maker) -> Arguments:
            wide, kept = m.normal(16, 3 * channels), width - 1 + most_drafts * drafted
            state = m.normal(5, (kept + 1) * channels, dtype=torch.float32)[:, channels:]
            state = state.unflatten(1, (kept, channels))
            state[0] = float("nan")  # of the sequence that begins
            return (
                wide[:, channels : 2 * channels],
                m.normal(width, channels),
                m.normal(channels) if bias else None,
                state,
                sequences(m, drafted),
                silu,
            )

        def run(ops: Ops, *args: Argument) -> Tensor:
            return masked(ops.causal_conv(*args))

        name = f"{channels}x{width}{' bias' * bias}{' silu' * silu}{' drafts' * drafted}"
        return Case("causal_conv", name, make, run, written=(3,))

    def recurrence(
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        space: bool = False,
        drafted: bool = False,
        long: bool = False,
        beta_scale: float = 1.0,
        by_row: bool = False,
        bound: float = 0.0,
        by_channel: bool = False,
    ) -> Case:
        def make(m: Maker) -> Arguments:
            of = (long_sequences if long else sequences)(m, drafted)
            tokens = int(of.starts[-1])
            channels = 2 * key_heads * key_dim + value_heads * value_dim
            state = m.normal(5, value_heads, key_dim, value_dim, dtype=torch.float32)
            state[0] = float("nan")
            decays = value_heads * (key_dim if by_row else value_dim if by_channel else 1)
            columns = decays if space else value_heads + decays
            log = m.normal(5, most_drafts * drafted, channels + columns, dtype=torch.float32)
            rates, skips = (value_heads,), (value_heads,)
            if by_channel:
                rates, skips = (value_heads, key_dim, value_dim), (decays,)
            decay = m.normal(*rates, dtype=torch.float32)
            skip = [m.normal(*skips, dtype=torch.float32)] if space else []
            bias = m.normal(decays, dtype=torch.float32)
            heads = StateHeads(decay, bias, key_heads, *skip, beta_scale=beta_scale, bound=bound)
            wide, gates = m.normal(tokens, channels + 3), m.normal(tokens, columns)
            if long:
                wide *= 0.5
                decay[-1], gates = 5.0, gates * 3  # many tokens forget everything, others nothing
                wide[65:100] = wide[64]  # equal keys
            return wide[:, 1 : channels + 1], gates, heads, state, log, of

        def run(ops: Ops, *args: Argument) -> Tensor:
            y = ops.recurrence(*args)
            return y if long else masked(y)

        name = f"{key_heads}/{value_heads} of {key_dim}x{value_dim}"
        name += " space" * space + " drafts" * drafted + " long" * long
        name += " reversing" * (beta_scale > 1) + " by row" * by_row
        name += " by channel" * by_channel + " bounded" * (bound < 0)
        return Case("recurrence", name, make, run, written=(3, 4), product=True)

    def gated(rows: int, dim: int, by: str, gates: int, fp32: bool = False) -> Case:
        def make(m: Maker) -> Arguments:
            wide = m.normal(rows, 3 * dim, scale=3.0)
            gate = m.normal(rows, gates, dtype=torch.float32) if fp32 else wide[:, :gates]
            return wide[:, dim : 2 * dim], gate, by

        return Case("gated", f"{rows}x{dim} {by} {gates}{' fp32' * fp32}", make)

    return [
        *(convolution(*sizes) for sizes in ((1, 2, False, False), (70, 3, True, True))),
        *(convolution(300, 4, False, True, drafted) for drafted in (False, True)),
        convolution(70, 2, True, True, drafted=True),
        recurrence(1, 2, 128, 64, space=True, long=True),
        recurrence(1, 2, 32, 32, drafted=True, long=True),
        recurrence(1, 1, 128, 40, beta_scale=2.0, long=True),
        *(
            recurrence(*sizes, space=space, drafted=drafted)
            for sizes in ((1, 1, 4, 3), (2, 4, 24, 40), (1, 3, 17, 70))
            for space in (False, True)
            for drafted in (False, True)
        ),
        *(recurrence(2, 4, 24, 40, beta_scale=2.0, drafted=drafted) for drafted in (False, True)),
        *(recurrence(3, 3, 17, 70, by_row=True, drafted=drafted) for drafted in (False, True)),
        recurrence(1, 2, 128, 40, by_row=True, long=True),
        recurrence(3, 3, 17, 70, by_row=True, bound=-5.0, drafted=True),
        recurrence(1, 2, 24, 40, by_row=True, bound=-0.5, long=True),
        recurrence(1, 2, 16, 70, space=True, by_channel=True, long=True),
        *(
            recurrence(*sizes, space=True, by_channel=True, drafted=drafted)
            for sizes in ((1, 1, 1, 40), (2, 4, 5, 3), (1, 1, 16, 133))
            for drafted in (False, True)
        ),
        *(gated(1, 1, by, 1) for by in GATES),
        *(gated(7, 133, by, gates) for by in GATES for gates in (1, 7, 133)),
        *(gated(7, 133, "none", gates, fp32=True) for gates in (1, 133)),
    ]


def _drawings() -> list[Case]:
    def make(n: int, vocab: int, m: Maker) -> Arguments:
        def uniform(low: float, high: float, dtype: torch.dtype) -> Tensor:
            drawn = torch.rand(n, dtype=torch.float64, generator=m.generator)
            return (drawn * (high - low) + low).to(m.device, dtype)

        rules = Truncation(
            top_k=m.integers(1, vocab, n, dtype=torch.int64),
            top_p=uniform(0.2, 1.1, torch.float64).clamp(max=1),
            min_p=uniform(-0.2, 0.2, torch.float32).clamp(min=0),
            typical_p=uniform(0.5, 1.5, torch.float64).clamp(max=1),
        )
        temperature = uniform(0.2, 2.0, torch.float32)
        logits = m.normal(n, vocab, scale=3.0)
        return logits, Draws(temperature, uniform(0, 1, torch.float64), rules)

    def probabilities(ops: Ops, logits: Tensor, draws: Draws) -> Tensor:
        return ops.probabilities(logits, draws.temperature, draws.truncation)

    sizes = ((1, 1), (9, 70), (40, 1003))
    return [
        *(Case("draw", f"{n}x{vocab}", partial(make, n, vocab), exact=True) for n, vocab in sizes),
        *(
            Case("probabilities", f"{n}x{vocab}", partial(make, n, vocab), probabilities)
            for n, vocab in sizes
        ),
    ]


CASES = (
    *_products(),
    *_experts(),
    *_rows(),
    *_rules(),
    *_drawings(),
    *_norms(),
    *_rotaries(),
    *_activations(),
    *_states(),
    *_caches(),
)
