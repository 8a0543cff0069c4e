"""Norms, activations, rotary, sums and copies against torch, on every instruction set and team."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers.native import FLOATS, Poisoned, Runtime, call, normal, runtimes
from torch import Tensor

# What one rounding to the dtype costs, and the sums before it.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-8}

each_runtime = pytest.mark.parametrize("runtime", runtimes())
one_thread = pytest.mark.parametrize("runtime", runtimes((1,)))
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=["f32", "bf16"])

# Rows and columns: none, less than a vector, its multiples and one beside them, and enough for all
# threads in one row and in many.
SHAPES = [
    (0, 8),
    (1, 1),
    (1, 7),
    (3, 16),
    (2, 33),
    (5, 64),
    (1, 257),
    (2, 5000),
    (9, 1024),
    (40, 515),
]


def strided(x: Tensor, gap: int = 5) -> tuple[Tensor, int]:
    """The same with NaN between the rows, and the stride."""
    room = Poisoned(*x.shape, dtype=x.dtype, gap=gap)
    room.view.copy_(x)
    return room.view, room.stride


def rms_norm(runtime: Runtime, x: Tensor, gap: int = 0) -> Tensor:
    weight = normal(x.shape[1], seed=7, dtype=x.dtype)
    out, (source, stride) = Poisoned(*x.shape, dtype=x.dtype, gap=gap), strided(x, gap)
    call(
        runtime, "rms_norm", x=source, x_stride=stride, x_inner_stride=0, weight=weight, y=out.view,
        y_stride=out.stride, y_inner_stride=0, rows=len(x), inner=1, dim=x.shape[1], eps=1e-5,
        dtype=x.dtype,
    )  # fmt: skip
    out.assert_rest_untouched()
    return out.view


def expected_rms_norm(x: Tensor) -> Tensor:
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return wide * scale * normal(x.shape[1], seed=7, dtype=x.dtype).double()


def layer_norm(runtime: Runtime, x: Tensor, gap: int = 0) -> Tensor:
    weight, bias = (normal(x.shape[1], seed=seed, dtype=x.dtype) for seed in (7, 8))
    out, (source, stride) = Poisoned(*x.shape, dtype=x.dtype, gap=gap), strided(x, gap)
    call(
        runtime, "layer_norm", x=source, x_stride=stride, weight=weight, bias=bias, y=out.view,
        y_stride=out.stride, rows=len(x), dim=x.shape[1], eps=1e-5, dtype=x.dtype,
    )  # fmt: skip
    out.assert_rest_untouched()
    return out.view


def expected_layer_norm(x: Tensor) -> Tensor:
    weight, bias = (normal(x.shape[1], seed=seed, dtype=x.dtype).double() for seed in (7, 8))
    return torch.nn.functional.layer_norm(x.double(), x.shape[1:], weight, bias, 1e-5)


def silu_and_mul(runtime: Runtime, x: Tensor, gap: int = 0) -> Tensor:
    gate_up = torch.cat((x, x.flip(-1)), -1)
    out, (source, stride) = Poisoned(*x.shape, dtype=x.dtype, gap=gap), strided(gate_up, gap)
    call(
        runtime, "silu_and_mul", x=source, x_stride=stride, y=out.view, y_stride=out.stride,
        rows=len(x), inner=x.shape[1], dtype=x.dtype,
    )  # fmt: skip
    out.assert_rest_untouched()
    return out.view


def expected_silu_and_mul(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x.double()) * x.flip(-1).double()


def gelu_tanh(runtime: Runtime, x: Tensor, gap: int = 0) -> Tensor:
    out, (source, stride) = Poisoned(*x.shape, dtype=x.dtype, gap=gap), strided(x, gap)
    call(
        runtime, "gelu_tanh", x=source, x_stride=stride, y=out.view, y_stride=out.stride,
        rows=len(x), dim=x.shape[1], dtype=x.dtype,
    )  # fmt: skip
    out.assert_rest_untouched()
    return out.view


def expected_gelu_tanh(x: Tensor) -> Tensor:
    wide = x.double()  # with 1 + tanh u = 2 / (1 + e^-2u): the difference would cancel even here
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide.pow(3))
    return wide / (1 + torch.exp(-2 * u))


def add(runtime: Runtime, x: Tensor, gap: int = 0) -> Tensor:
    out, (source, stride) = Poisoned(*x.shape, dtype=x.dtype, gap=gap), strided(x, gap)
    other, other_stride = strided(x.flip(-1), gap + 3)
    call(
        runtime, "add", x=source, x_stride=stride, y=other, y_stride=other_stride, out=out.view,
        out_stride=out.stride, rows=len(x), dim=x.shape[1], dtype=x.dtype,
    )  # fmt: skip
    out.assert_rest_untouched()
    return out.view


def expected_add(x: Tensor) -> Tensor:
    return x.double() + x.flip(-1).double()


Operation = Callable[..., Tensor]
OPERATIONS = {
    "rms_norm": (rms_norm, expected_rms_norm),
    "layer_norm": (layer_norm, expected_layer_norm),
    "silu_and_mul": (silu_and_mul, expected_silu_and_mul),
    "gelu_tanh": (gelu_tanh, expected_gelu_tanh),
    "add": (add, expected_add),
}
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())


@each_operation
@each_dtype
@each_runtime
def test_matches_torch(
    runtime: Runtime, dtype: torch.dtype, operation: tuple[Operation, Operation]
) -> None:
    run, expected = operation
    for rows, dim in SHAPES:
        x = normal(rows, dim, seed=dim, dtype=dtype)
        for gap in (0, 5):
            torch.testing.assert_close(
                run(runtime, x, gap).double(), expected(x), rtol=RTOL[dtype], atol=2e-6
            )


@each_operation
@each_dtype
@pytest.mark.parametrize("runtime", runtimes((1, 5)))
def test_a_row_alone_and_in_a_batch_is_the_same_to_the_bit(
    runtime: Runtime, dtype: torch.dtype, operation: tuple[Operation, Operation]
) -> None:
    run, _ = operation
    for rows, dim in ((9, 33), (13, 1024), (3, 5000)):
        x = normal(rows, dim, seed=dim, dtype=dtype)
        together = run(runtime, x, 3)
        for row in range(rows):
            assert torch.equal(run(runtime, x[row : row + 1])[0], together[row])


@each_operation
@each_dtype
@one_thread
def test_nan_and_infinity_stay_in_their_row(
    runtime: Runtime, dtype: torch.dtype, operation: tuple[Operation, Operation]
) -> None:
    run, _ = operation
    x = normal(5, 70, dtype=dtype)
    clean = run(runtime, x).clone()
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = x.clone()
        spoilt[2, 65] = bad
        found = run(runtime, spoilt)
        assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
        # what an activation makes of minus infinity is a number
        assert not found[2].isfinite().all() or (run is gelu_tanh and bad < 0)


@each_dtype
@one_thread
def test_norms_of_extremes(runtime: Runtime, dtype: torch.dtype) -> None:
    for scale in (1e-38, 1e-20, 1e15):
        x = (normal(3, 100) * scale).to(dtype)
        torch.testing.assert_close(
            rms_norm(runtime, x).double(), expected_rms_norm(x), rtol=RTOL[dtype], atol=1e-37
        )
    assert (rms_norm(runtime, torch.zeros(2, 50, dtype=dtype)) == 0).all()
    assert rms_norm(runtime, torch.zeros(2, 0, dtype=dtype)).shape == (2, 0)
    bias = normal(50, seed=8, dtype=dtype)  # what is left of a row without variance
    assert torch.equal(layer_norm(runtime, torch.full((1, 50), 3.0, dtype=dtype))[0], bias)


@one_thread
def test_layer_norm_far_from_zero(runtime: Runtime) -> None:
    """The variance is that of the centred numbers, not a difference of large ones."""
    x = normal(3, 300) + 1000
    torch.testing.assert_close(
        layer_norm(runtime, x).double(), expected_layer_norm(x), rtol=0, atol=5e-4
    )


@each_dtype
@each_runtime
def test_rms_norm_of_heads_within_rows(runtime: Runtime, dtype: torch.dtype) -> None:
    rows, heads, dim = 6, 3, 40
    weight = normal(dim, seed=7, dtype=dtype)
    source, stride = strided(normal(rows, heads, 64, dtype=dtype))
    out = Poisoned(rows, heads, dim + 1, dtype=dtype, gap=7)
    call(
        runtime, "rms_norm", x=source, x_stride=stride, x_inner_stride=64, weight=weight,
        y=out.view, y_stride=out.stride, y_inner_stride=dim + 1, rows=rows, inner=heads, dim=dim,
        eps=1e-5, dtype=dtype,
    )  # fmt: skip
    flat = source[:, :, :dim].reshape(rows * heads, dim)
    expected = expected_rms_norm(flat).view(rows, heads, dim)
    found = out.view[:, :, :dim].double()
    torch.testing.assert_close(found, expected, rtol=RTOL[dtype], atol=2e-6)
    assert out.view[:, :, dim].isnan().all()  # the gap between two heads
    out.assert_rest_untouched()


@each_dtype
@one_thread
def test_rms_norm_in_place(runtime: Runtime, dtype: torch.dtype) -> None:
    x, weight = normal(3, 77, dtype=dtype), normal(77, seed=7, dtype=dtype)
    expected = rms_norm(runtime, x)
    call(
        runtime, "rms_norm", x=x, x_stride=77, x_inner_stride=0, weight=weight, y=x, y_stride=77,
        y_inner_stride=0, rows=3, inner=1, dim=77, eps=1e-5, dtype=dtype,
    )  # fmt: skip
    assert torch.equal(x, expected)


def silu_of(runtime: Runtime, x: Tensor) -> Tensor:
    """silu alone: times one."""
    out = torch.empty_like(x)
    call(
        runtime, "silu_and_mul", x=torch.cat((x, torch.ones_like(x))), x_stride=0, y=out,
        y_stride=0, rows=1, inner=len(x), dtype=x.dtype,
    )  # fmt: skip
    return out


def gelu_of(runtime: Runtime, x: Tensor) -> Tensor:
    return gelu_tanh(runtime, x[None])[0]


@one_thread
def test_silu_is_accurate(runtime: Runtime) -> None:
    """To 1e-6 wherever e^-x is a number; so the exponential is."""
    x = torch.linspace(-86, 88, 20001)
    exact = x.double() / (1 + torch.exp(-x.double()))
    error = (silu_of(runtime, x).double() - exact).abs() / exact.abs().clamp(min=1e-300)
    assert error.max() < 5e-7
    assert silu_of(runtime, torch.tensor([1e-20])) == torch.tensor(0.5e-20)  # e^0 is 1 exactly


@one_thread
def test_gelu_is_accurate(runtime: Runtime) -> None:
    """To 1e-6 where the exponential does not magnify the rounding of its argument."""
    x = torch.linspace(-9.5, 30, 20001)
    exact = expected_gelu_tanh(x)
    argument = 2 * math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double().pow(3))
    error = (gelu_of(runtime, x).double() - exact).abs() / exact.abs().clamp(min=1e-300)
    assert (error / (1 + argument.clamp(max=0).abs())).max() < 4e-7
    assert error[x > -1].max() < 1e-6


@pytest.mark.parametrize("function", [silu_of, gelu_of])
@each_dtype
@one_thread
def test_activations_of_extremes(runtime: Runtime, dtype: torch.dtype, function: Operation) -> None:
    large = torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, math.inf, large, 1e5, -1e5, -large, -math.inf, math.nan]).to(dtype)
    found = function(runtime, x)
    assert torch.equal(found[:5], x[:5]) and bool(found[1].signbit())
    assert found[5:8].abs().max() < 2e-36  # the limit is 0
    assert found[8].isnan()
    assert not function(runtime, normal(1000, dtype=dtype) * 1e30).isnan().any()


@each_dtype
@each_runtime
def test_rotary(runtime: Runtime, dtype: torch.dtype) -> None:
    for rows, heads, kv_heads, dim in ((0, 2, 1, 8), (1, 32, 8, 64), (7, 3, 1, 6), (11, 5, 5, 70)):
        q, k = (
            Poisoned(rows, heads, dim, dtype=dtype, gap=9),
            Poisoned(rows, kv_heads, dim, dtype=dtype),
        )
        q.view.copy_(normal(rows, heads, dim, dtype=dtype))
        k.view.copy_(normal(rows, kv_heads, dim, seed=1, dtype=dtype))
        angles = normal(rows, dim // 2, seed=2) * 10
        rotation = torch.cat((angles.cos(), angles.sin()), -1)
        expected = [turned(x.view, rotation) for x in (q, k)]
        call(
            runtime, "rotary", q=q.view, q_stride=q.stride, heads=heads, k=k.view,
            k_stride=k.stride, kv_heads=kv_heads, rotation=rotation, rows=rows, head_dim=dim,
            dtype=dtype,
        )  # fmt: skip
        for x, wanted in zip((q, k), expected, strict=True):
            assert torch.equal(x.view, wanted)
            x.assert_rest_untouched()


def turned(x: Tensor, rotation: Tensor) -> Tensor:
    cosines, sines = rotation[:, None, :].chunk(2, -1)
    low, high = x.float().chunk(2, -1)
    turned = torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)
    return turned.to(x.dtype)


@each_runtime
def test_gather_rows(runtime: Runtime) -> None:
    for rows, row_bytes in ((0, 8), (1, 1), (3, 63), (5, 64), (2, 100_001), (300, 130)):
        generator = torch.Generator().manual_seed(row_bytes)
        table = torch.randint(0, 255, (11, row_bytes + 3), dtype=torch.uint8, generator=generator)
        ids = torch.randint(0, 11, (rows,), generator=generator)
        out = Poisoned(rows, row_bytes, dtype=torch.uint8, gap=2)
        call(
            runtime, "gather_rows", table=table, table_stride=row_bytes + 3, ids=ids, out=out.view,
            out_stride=out.stride, rows=rows, row_bytes=row_bytes,
        )  # fmt: skip
        assert torch.equal(out.view, table[ids, :row_bytes])
        out.assert_rest_untouched()
