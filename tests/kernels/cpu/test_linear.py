"""The native linear layer compared with the product in fp64, for every kind of matrix."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.native import Runtime, normal, runtimes
from helpers.native_matrix import (
    BNB_FP4,
    CLAMPED_SWIGLU,
    FP4,
    FP8_X,
    GELU,
    GELU_AND_MUL,
    GELU_TANH,
    GELU_TANH_AND_MUL,
    I4,
    I8,
    IQ4,
    KINDS,
    MXFP4,
    NF4,
    NO_ACTIVATION,
    NUMBERS,
    ONE_OF_EACH,
    PAIRED,
    RELU,
    SILU_AND_MUL,
    NativeMatrix,
    Values,
    linear,
    pack,
    random_matrix,
)
from torch import Tensor

# [outputs, inputs] of a matrix, and rows: odd sizes, one tile, several, and several pieces of
# inputs.
SHAPES = [(1, 1, 1), (33, 7, 2), (32, 64, 3), (70, 130, 5), (45, 259, 13), (64, 96, 27)]
DEEP = (34, 4500, 14)
EVERY_PAIR = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
MIXED_PAIRS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]


def quantised(x: Tensor, group: int) -> Tensor:
    """Round x [rows, inputs] to eight bits per group of inputs, in fp64."""
    parts = []
    for part in x.float().split(group, dim=1):
        scale = part.abs().amax(1, keepdim=True) / 127
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        parts.append((part / scale).round().double() * scale.double())
    return torch.cat(parts, 1)


def nearest_e4m3(x: Tensor, group: int, static: Tensor | None) -> Tensor:
    """Round x [rows, inputs] to E4M3 per group of inputs, by torch."""
    parts = []
    for part in x.float().split(group, dim=1):
        scale = part.abs().amax(1, keepdim=True) / 448 if static is None else static[:, None]
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        rounded = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        parts.append(rounded.double() * scale.double())
    return torch.cat(parts, 1)


def as_multiplied(x: Tensor, matrix: NativeMatrix) -> Tensor:
    """Return x as rounded for the kind's products, in fp64."""
    if matrix.fp8_x:
        group = matrix.group if matrix.fp8_x == FP8_X["group"] else 0
        return nearest_e4m3(x, group or max(matrix.inputs, 1), matrix.x_scale)
    match matrix.kind:
        case 0:
            return x.double()
        case 2 | 4 | 5 | 7 | 8 | 9 | 10 | 11:
            return quantised(x, matrix.group or max(matrix.inputs, 1))
        case _:
            return x.bfloat16().double()


SILU = -1  # without a factor


def activated(y: Tensor, activation: int) -> Tensor:
    if activation in PAIRED:
        gate, up = y.chunk(2, dim=1)
        if activation == CLAMPED_SWIGLU:
            gate = gate.clamp(max=7)
            return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
        alone = {GELU_TANH_AND_MUL: GELU_TANH, GELU_AND_MUL: GELU}.get(activation, SILU)
        return activated(gate, alone) * up
    if activation == SILU:
        return torch.nn.functional.silu(y)
    if activation == RELU:
        return y.relu()
    if activation == GELU:
        return torch.nn.functional.gelu(y)
    if activation == GELU_TANH:
        return torch.nn.functional.gelu(y, approximate="tanh")
    return y


def assert_near(y: Tensor, expected: Tensor, size: Tensor) -> None:
    """size: sum of the absolute products, to which the error is relative."""
    unit = 2.0**-8 if y.dtype == torch.bfloat16 else 0.0
    error = (y.double() - expected).abs()
    assert bool((error <= 2e-6 * size + unit * expected.abs() + 1e-9).all()), error.max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runtime", runtimes(threads=[1, 5]))
def test_products(runtime: Runtime, kind: str) -> None:
    pairs = itertools.cycle(EVERY_PAIR + MIXED_PAIRS)
    for seed, (outputs, inputs, rows) in enumerate([*SHAPES, DEEP]):
        dtype, out_dtype = next(pairs)
        matrix = random_matrix(runtime, kind, outputs, inputs, seed=seed)
        x = normal(rows, inputs + 5, seed=seed + 100, dtype=dtype)[:, :inputs]
        y = linear(runtime, x, matrix, out_dtype=out_dtype)
        exact, weight = as_multiplied(x, matrix), matrix.dequantized.double()
        assert_near(y, exact @ weight.T, exact.abs() @ weight.abs().T)


@pytest.mark.parametrize(
    "kind",
    [
        *("int4/8", "int4/40-zeros", "int4/256-zeros", "int4/272", "int4-min/8", "int4-min/272"),
        *("int8/4", "int8/20", "int8/2048", "int8-weight-only/4", "int8-weight-only/1100"),
        *("fp8/4", "fp8/20", "fp8/2048", "fp8/4-group", "fp8/20-group", "fp8/128-token"),
    ],
)
@pytest.mark.parametrize("runtime", runtimes(threads=[1, 5]))
def test_groups_that_are_no_whole_vectors(runtime: Runtime, kind: str) -> None:
    """The last one may end at the end of a row's memory."""
    for rows, inputs in ((1, 64), (3, 64), (7, 700), (2, 1088)):
        matrix = random_matrix(runtime, kind, 40, inputs)
        x = normal(rows, inputs)
        exact, weight = as_multiplied(x, matrix), matrix.dequantized.double()
        y = linear(runtime, x, matrix)
        assert_near(y, exact @ weight.T, exact.abs() @ weight.abs().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "activation",
    [
        *(NO_ACTIVATION, SILU_AND_MUL, GELU_TANH, GELU_TANH_AND_MUL, GELU, GELU_AND_MUL, RELU),
        CLAMPED_SWIGLU,
    ],
)
@pytest.mark.parametrize("kind", ONE_OF_EACH)
@pytest.mark.parametrize("runtime", runtimes(threads=[2]))
def test_bias_activation_and_residual_follow_the_product(
    runtime: Runtime, kind: str, activation: int, dtype: torch.dtype
) -> None:
    paired = activation in PAIRED
    for outputs, rows in ((90, 3), (32, 1), (2, 2), (66, 15)):
        matrix = random_matrix(runtime, kind, outputs, 65, paired=paired)
        columns = outputs // 2 if paired else outputs
        x = normal(rows, 65, seed=1, dtype=dtype)
        bias = normal(outputs, seed=2)
        residual = normal(rows, columns + 9, seed=3, dtype=dtype)[:, :columns]
        y = linear(
            runtime, x, matrix, activation=activation, bias=bias, residual=residual, out_dtype=dtype
        )
        exact, weight = as_multiplied(x, matrix), matrix.dequantized.double()
        product = exact @ weight.T + bias.double()
        expected = activated(product, activation) + residual.double()
        size = exact.abs() @ weight.abs().T + bias.abs()
        size = size.chunk(2, 1)[0] * size.chunk(2, 1)[1] + size.chunk(2, 1)[1] if paired else size
        assert_near(y, expected, size + expected.abs() + residual.double().abs())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runtime", runtimes(threads=[2]))
def test_a_row_does_not_depend_on_the_batch(runtime: Runtime, kind: str) -> None:
    rows, inputs = 40, 2312  # several pieces of inputs for many rows, one for few
    matrix = random_matrix(runtime, kind, 35, inputs)
    x = normal(rows, inputs, dtype=torch.bfloat16)
    together = linear(runtime, x, matrix)
    for few in (*range(6), 9, 13, 25):
        for first in {few % 3, rows - few}:
            alone = linear(runtime, x[first : first + few], matrix)
            assert torch.equal(alone, together[first : first + few]), (few, first)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_a_bit(kind: str) -> None:
    results: dict[str, Tensor] = {}  # by instruction set
    for parameter in runtimes():
        runtime = parameter.values[0]
        matrix = random_matrix(runtime, kind, 300, 200)
        y = torch.cat([linear(runtime, normal(rows, 200), matrix) for rows in (1, 3, 30)])
        assert torch.equal(results.setdefault(runtime.isa, y), y)


@pytest.mark.parametrize("rows", range(1, 5))
@pytest.mark.parametrize(
    ("kind", "code", "weight"),
    [
        (I4, 15, 15.0),
        (MXFP4, 7, 6.0),
        (IQ4, 15, 113.0),
        (IQ4, 0, -127.0),
        (FP4, 7, 12.0),
        (NF4, 15, 112.0),
        (NF4, 0, -112.0),
        (BNB_FP4, 3, 120.0),
    ],
)
@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_the_largest_products_of_four_bits_fit_their_sums(
    runtime: Runtime, kind: str, code: int, weight: float, rows: int
) -> None:
    """All weights have the code of their largest number, all x are 127 eighths."""
    inputs, group = 264, 128 if kind == I4 else 32
    values = torch.full((40, inputs // 2), code * 17, dtype=torch.uint8)
    scales = torch.ones(40, -(-inputs // group))
    zeros = torch.zeros_like(scales, dtype=torch.uint8) if kind == I4 else None
    scales = (127 * scales).byte() if kind == MXFP4 else scales  # 2^0
    weights = torch.full((40, inputs), weight)
    matrix = pack(runtime, Values(weights, weights, values, scales, zeros, group, NUMBERS[kind]))
    for sign in (1.0, -1.0):
        y = linear(runtime, torch.full((rows, inputs), sign * 127 / 8), matrix)
        assert torch.equal(y, torch.full((rows, 40), sign * weight * inputs * 127 / 8))


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_the_largest_products_of_eight_bits_fit_their_sums(runtime: Runtime, rows: int) -> None:
    """With the most inputs of a matrix, and all weights and x the largest of one sign; and with
    signs that change half-way, so that sums come near both limits."""
    inputs = 65536
    values, scales = torch.full((2, inputs), 127, dtype=torch.int8), torch.ones(2, 1)
    values[1, inputs // 2 :] = -127
    matrix = pack(
        runtime, Values(values.float(), values.float(), values, scales, None, 0, NUMBERS[I8])
    )
    for sign in (1.0, -1.0):
        x = torch.full((rows, inputs), sign * 127.0)
        whole = sign * 127 * 127 * inputs
        assert torch.equal(linear(runtime, x, matrix), torch.tensor([[whole, 0.0]] * rows))
        x[:, inputs // 2 :] *= -1
        assert torch.equal(linear(runtime, x, matrix), torch.tensor([[0.0, whole]] * rows))


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1.0, 1e20, 1e36])
@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_x_is_rounded_to_eight_bits_as_by_a_division(runtime: Runtime, size: float) -> None:
    matrix = pack(
        runtime,
        Values(
            *(torch.eye(128) for _ in range(2)),
            torch.eye(128, dtype=torch.int8),
            torch.ones(128, 1),
            None,
            0,
            NUMBERS[I8],
        ),
    )
    x = normal(200, 128) * size
    scale = x.abs().amax(1, keepdim=True) / 127
    assert torch.equal(linear(runtime, x, matrix), (x / scale).round() * scale)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
@pytest.mark.parametrize("runtime", runtimes(threads=[2]))
def test_nan_and_infinity_stay_in_their_row(runtime: Runtime, kind: str) -> None:
    inputs = 130
    matrix = random_matrix(runtime, kind, 40, inputs)
    x = normal(7, inputs)
    calm = linear(runtime, x, matrix)
    wild = x.clone()
    wild[1, 5], wild[3, 7], wild[4, 129] = float("nan"), float("inf"), float("-inf")
    wild[6] = 0.0
    y = linear(runtime, wild, matrix)
    assert torch.equal(y[[0, 2, 5]], calm[[0, 2, 5]])
    assert not bool(y[1].isfinite().any())
    if matrix.x_scale is None:
        assert not bool(y[3].isfinite().any()) and not bool(y[4].isfinite().any())
    else:  # where infinity is cut like any large number
        assert bool(y[[3, 4]].isfinite().all())
    assert bool((y[6] == 0).all())


@pytest.mark.parametrize("scale", [1e-42, 1e-37, 1e-30, 1e30])
@pytest.mark.parametrize("kind", [kind for kind in ONE_OF_EACH if "static" not in kind])
@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_small_and_large_numbers(runtime: Runtime, kind: str, scale: float) -> None:
    matrix = random_matrix(runtime, kind, 40, 64)
    x = normal(3, 64)
    y = linear(runtime, x * scale, matrix)
    expected = x.double() @ matrix.dequantized.double().T * scale
    # Denormal numbers lose digits, and some units flush them to zero.
    assert bool(((y.double() - expected).abs() <= 0.05 * scale * 64 + 1e-37).all())


@pytest.mark.parametrize("kind", ONE_OF_EACH)
@pytest.mark.parametrize("runtime", runtimes(threads=[2]))
def test_without_inputs_the_bias_remains(runtime: Runtime, kind: str) -> None:
    bias = normal(33)
    matrix, before = (random_matrix(runtime, kind, 33, inputs) for inputs in (0, 64))
    for rows in (1, 4, 20):
        linear(runtime, torch.full((rows, 64), torch.nan), before)  # leaves NaN in the scratch
        y = linear(runtime, normal(rows, 1)[:, :0], matrix, bias=bias)
        assert torch.equal(y, bias.expand(rows, 33))


@pytest.mark.parametrize("kind", ONE_OF_EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("runtime", runtimes(threads=[1, 3]))
def test_inputs_in_another_order(runtime: Runtime, dtype: torch.dtype, kind: str) -> None:
    for rows, inputs in ((1, 130), (2, 64), (3, 65), (30, 700)):
        matrix = random_matrix(runtime, kind, 40, inputs)
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        ordered = replace(matrix, order=order.int())
        x = normal(rows, inputs + 3, dtype=dtype)[:, :inputs]
        expected = linear(runtime, x[:, order].contiguous(), matrix)
        assert torch.equal(linear(runtime, x, ordered), expected)
