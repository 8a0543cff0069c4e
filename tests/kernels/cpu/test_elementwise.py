"""Norms, activations, rotary, sums and copies compared with torch, on every instruction set and
team."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from helpers.native import FLOATS, Poisoned, Runtime, Value, call, normal, runtimes
from torch import Tensor

from kvik.kernels.weights import ACTIVATIONS, PAIRED, Activation

# Errors of one rounding to the dtype, and of the sums before it.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-8}

each_runtime = pytest.mark.parametrize("runtime", runtimes())
one_thread = pytest.mark.parametrize("runtime", runtimes((1,)))
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=["f32", "bf16"])

# Rows and columns: none, less than a vector, multiples of it and one more, and enough for all
# threads in one row and in several.
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
    """Return the same numbers with NaN between the rows, and the stride."""
    copy = Poisoned(*x.shape, dtype=x.dtype, gap=gap)
    copy.view.copy_(x)
    return copy.view, copy.stride


def weight_of(x: Tensor) -> Tensor:
    return normal(x.shape[1], seed=7, dtype=x.dtype)


def wide_of(x: Tensor) -> Tensor:
    return normal(x.shape[1], seed=9, dtype=torch.float32)


def bias_of(x: Tensor) -> Tensor:
    return normal(x.shape[1], seed=8, dtype=x.dtype)


@dataclass(frozen=True)
class Operation:
    """A kernel whose result has the shape of x, [rows, dim].

    Attributes:
        arguments: the kernel's, except x, the result, their strides, rows, columns and dtype.
        expected: the result in fp64.
        source: the rows that the kernel reads, made from x.
        result, dim: the names of the kernel's arguments for its result and its columns.
    """

    kernel: str
    arguments: Callable[[Tensor], dict[str, Value]]
    expected: Callable[[Tensor], Tensor]
    source: Callable[[Tensor], Tensor] = Tensor.clone
    result: str = "y"
    dim: str = "dim"
    name: str = ""

    def __call__(self, runtime: Runtime, x: Tensor, gap: int = 0) -> Tensor:
        """Run the kernel on rows `gap` numbers apart."""
        out = Poisoned(*x.shape, dtype=x.dtype, gap=gap)
        source, stride = strided(self.source(x), gap)
        own: dict[str, Value] = {self.result: out.view, f"{self.result}_stride": out.stride}
        call(
            runtime, self.kernel, x=source, x_stride=stride, rows=len(x), dtype=x.dtype,
            **{self.dim: x.shape[1]}, **own, **self.arguments(x),
        )  # fmt: skip
        out.assert_rest_untouched()
        return out.view


def expected_rms_norm(x: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight_of(x).double()


def expected_layer_norm(x: Tensor) -> Tensor:
    weight, bias = weight_of(x).double(), bias_of(x).double()
    return torch.nn.functional.layer_norm(x.double(), x.shape[1:], weight, bias, 1e-5)


def expected_gelu_tanh(x: Tensor) -> Tensor:
    wide = x.double()  # 1 + tanh u = 2 / (1 + e^-2u): the sum would cancel even here
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide.pow(3))
    return wide / (1 + torch.exp(-2 * u))


def added(x: Tensor) -> dict[str, Value]:
    other, stride = strided(x.flip(-1), 8)
    return {"y": other, "y_stride": stride}


IN_ONE_ROW: dict[str, Value] = {"x_inner_stride": 0, "y_inner_stride": 0, "inner": 1}
IN_ONE_ROW["weight_stride"] = 0
rms_norm = Operation(
    "rms_norm",
    lambda x: IN_ONE_ROW | {"weight": weight_of(x), "weight_dtype": x.dtype, "eps": 1e-5},
    expected_rms_norm,
)
wide_rms_norm = Operation(
    "rms_norm",
    lambda x: IN_ONE_ROW | {"weight": wide_of(x), "weight_dtype": torch.float32, "eps": 1e-5},
    lambda x: expected_rms_norm(x) / weight_of(x).double() * wide_of(x).double(),
)
layer_norm = Operation(
    "layer_norm",
    lambda x: (
        IN_ONE_ROW | {"weight": weight_of(x), "bias": bias_of(x), "weight_stride": 0, "eps": 1e-5}
    ),
    expected_layer_norm,
)


def expected_gelu(x: Tensor) -> Tensor:
    wide = x.double()  # by erfc: the sum of 1 and erf would cancel
    return wide * 0.5 * torch.special.erfc(-wide / math.sqrt(2))


def activation(
    name: Activation,
    expected: Callable[[Tensor], Tensor],
    factor: Callable[[Tensor], Tensor] = lambda up: up,
) -> Operation:
    number: dict[str, Value] = {"activation": ACTIVATIONS[name]}
    if name not in PAIRED:
        return Operation("activate", lambda x: number, expected, dim="columns", name=name)
    return Operation(
        "activate",
        lambda x: number,
        lambda x: expected(x) * factor(x.flip(-1).double()),
        source=lambda x: torch.cat((x, x.flip(-1)), -1),
        dim="columns",
        name=name,
    )


def expected_clamped_gate(x: Tensor) -> Tensor:
    wide = x.double().clamp(max=7)
    return wide * torch.sigmoid(1.702 * wide)


def expected_clipped_gate(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x.double()).clamp(max=7)


silu_and_mul = activation("silu_and_mul", lambda x: torch.nn.functional.silu(x.double()))
gelu_tanh = activation("gelu_tanh", expected_gelu_tanh)
gelu = activation("gelu", expected_gelu)
ACTIVATED = (
    *(silu_and_mul, gelu_tanh, activation("gelu_tanh_and_mul", expected_gelu_tanh), gelu),
    activation("gelu_and_mul", expected_gelu),
    activation("relu", lambda x: x.double().relu()),
    activation("relu_squared", lambda x: x.double().relu().square()),
    activation("tanh", lambda x: x.double().tanh()),
    activation("clamped_swiglu", expected_clamped_gate, lambda up: up.clamp(-7, 7) + 1),
    activation(
        "limited_swiglu",
        lambda x: torch.nn.functional.silu(x.double().clamp(max=10)),
        lambda up: up.clamp(-10, 10),
    ),
    activation("clipped_swiglu", expected_clipped_gate, lambda up: up.clamp(-7, 7)),
)


CUTTING = ("clamped_swiglu", "limited_swiglu", "clipped_swiglu", "tanh")


def expected_xielu(x: Tensor) -> Tensor:
    wide = x.double()
    curved = torch.where(wide > 0, 0.7 * wide.square(), 1.4 * (wide.expm1() - wide))
    return curved + wide / 2


xielu = Operation("xielu", lambda x: {"positive": 0.7, "negative": 1.4}, expected_xielu)
scaled = Operation("scaled", lambda x: {"factor": 0.3}, lambda x: x.double() * 0.3)
clipped = Operation("clipped", lambda x: {"limit": 0.7}, lambda x: x.double().clamp(-0.7, 0.7))


def expected_rescaled(x: Tensor) -> Tensor:
    wide, wanted = x.double(), (3 * x.flip(-1)).to(x.dtype).double()
    square = wide.square().mean(-1, keepdim=True).clamp(min=0.5)
    return wide * (wanted.square().mean(-1, keepdim=True) / square).sqrt()


def expected_activate_top(x: Tensor) -> Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    std = centred.square().mean(-1, keepdim=True).sqrt()
    return expected_gelu_tanh((centred - 0.3 * std).relu()) * x.flip(-1).double()


def weights(x: Tensor) -> Tensor:
    """Return two numbers for each row, which depend on its content."""
    return torch.stack((x[:, 0].float() + 0.5, x[:, -1].float() - 0.5), 1).contiguous()


def expected_sums(x: Tensor) -> Tensor:
    first, second = weights(x).double().unbind(1)
    wide = x.double()
    return x.flip(-1).double() + first[:, None] * wide + second[:, None] * wide.flip(-1)


def like(x: Tensor) -> dict[str, Value]:
    other, stride = strided((3 * x.flip(-1)).to(x.dtype), 8)
    one_row = {"x_inner_stride": 0, "y_inner_stride": 0, "inner": 1}
    return {**one_row, "like": other, "like_stride": stride, "least": 0.5}


rescaled = Operation("rescaled", like, expected_rescaled)
activate_top = Operation(
    "activate_top",
    lambda x: {"activation": ACTIVATIONS["gelu_tanh_and_mul"], "deviations": 0.3},
    expected_activate_top,
    source=lambda x: torch.cat((x, x.flip(-1)), -1),
    dim="columns",
)
weighted_sums = Operation(
    "weighted_sums",
    lambda x: {
        **{"weights": weights(x), "weights_stride": 2, "parts": 2, "sums": 1},
        **dict(zip(("residual", "residual_stride"), strided(x.flip(-1), 8), strict=True)),
    },
    expected_sums,
    source=lambda x: torch.cat((x, x.flip(-1)), -1),
    result="out",
)
add = Operation("add", added, lambda x: x.double() + x.flip(-1).double(), result="out")
each_operation = pytest.mark.parametrize(
    "operation",
    [
        *(rms_norm, wide_rms_norm, layer_norm, *ACTIVATED, xielu, scaled, clipped, add),
        *(rescaled, activate_top, weighted_sums),
    ],
    ids=lambda o: o.name or o.kernel,
)


@each_operation
@each_dtype
@each_runtime
def test_matches_torch(runtime: Runtime, dtype: torch.dtype, operation: Operation) -> None:
    for rows, dim in SHAPES:
        x = normal(rows, dim, seed=dim, dtype=dtype)
        for gap in (0, 5):
            found = operation(runtime, x, gap).double()
            torch.testing.assert_close(found, operation.expected(x), rtol=RTOL[dtype], atol=2e-6)


@each_operation
@each_dtype
@pytest.mark.parametrize("runtime", runtimes((1, 5)))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    runtime: Runtime, dtype: torch.dtype, operation: Operation
) -> None:
    for rows, dim in ((9, 33), (13, 1024), (3, 5000)):
        x = normal(rows, dim, seed=dim, dtype=dtype)
        together = operation(runtime, x, 3)
        for row in range(rows):
            assert torch.equal(operation(runtime, x[row : row + 1])[0], together[row])


@each_runtime
def test_softcap(runtime: Runtime) -> None:
    """In place, with the same accuracy for small and large numbers; infinity is capped."""
    for rows, dim in SHAPES:
        x = normal(rows, dim, seed=dim) * torch.logspace(-6, 3, dim)
        x[rows // 2 : rows // 2 + 1, -1] = math.inf
        expected = 30 * (x.double() / 30).tanh()
        rowwise, stride = strided(x)
        call(runtime, "softcap", x=rowwise, x_stride=stride, rows=rows, dim=dim, cap=30.0)
        torch.testing.assert_close(rowwise.double(), expected, rtol=6e-7, atol=0)
    spoilt = torch.tensor([[1.0, math.nan, 2.0]])
    call(runtime, "softcap", x=spoilt, x_stride=3, rows=1, dim=3, cap=30.0)
    assert spoilt.isnan().tolist() == [[False, True, False]]


@each_operation
@each_dtype
@one_thread
def test_nan_and_infinity_stay_in_their_row(
    runtime: Runtime, dtype: torch.dtype, operation: Operation
) -> None:
    x = normal(5, 70, dtype=dtype)
    clean = operation(runtime, x).clone()
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = x.clone()
        spoilt[2, 65] = bad
        found = operation(runtime, spoilt)
        assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
        # GELU of minus infinity is 0.
        limited = operation in (gelu_tanh, gelu) or operation.name.startswith("relu")
        cuts = operation is clipped or operation.name in CUTTING
        assert not found[2].isfinite().all() or (limited and bad < 0) or (cuts and math.isinf(bad))


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
    bias = normal(50, seed=8, dtype=dtype)  # the result of a row without variance
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
        weight_stride=0, y=out.view, y_stride=out.stride, y_inner_stride=dim + 1, rows=rows,
        inner=heads, dim=dim, eps=1e-5, dtype=dtype, weight_dtype=dtype,
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
        runtime, "rms_norm", x=x, x_stride=77, x_inner_stride=0, weight=weight, weight_stride=0,
        y=x, y_stride=77, y_inner_stride=0, rows=3, inner=1, dim=77, eps=1e-5, dtype=dtype,
        weight_dtype=dtype,
    )  # fmt: skip
    assert torch.equal(x, expected)


def silu_of(runtime: Runtime, x: Tensor) -> Tensor:
    """silu, with a factor of one."""
    out = torch.empty_like(x)
    call(
        runtime, "activate", x=torch.cat((x, torch.ones_like(x))), x_stride=0, y=out, y_stride=0,
        rows=1, columns=len(x), activation=ACTIVATIONS["silu_and_mul"], dtype=x.dtype,
    )  # fmt: skip
    return out


def gelu_of(runtime: Runtime, x: Tensor) -> Tensor:
    return gelu(runtime, x[None])[0]


def gelu_tanh_of(runtime: Runtime, x: Tensor) -> Tensor:
    return gelu_tanh(runtime, x[None])[0]


@one_thread
def test_silu_is_accurate(runtime: Runtime) -> None:
    """To 1e-6 wherever e^-x is finite, as accurate as the exponential."""
    x = torch.linspace(-86, 88, 20001)
    exact = x.double() / (1 + torch.exp(-x.double()))
    error = (silu_of(runtime, x).double() - exact).abs() / exact.abs().clamp(min=1e-300)
    assert error.max() < 5e-7
    assert silu_of(runtime, torch.tensor([1e-20])) == torch.tensor(0.5e-20)  # e^0 is exactly 1


@one_thread
def test_gelu_is_accurate(runtime: Runtime) -> None:
    x = torch.cat([torch.linspace(-30, 30, 20001), torch.linspace(-0.1, 0.1, 2001)])
    error = (gelu_of(runtime, x).double() - expected_gelu(x)).abs()
    assert (error / x.abs().clamp(min=1)).max() < 2e-7
    small = (x.abs() < 1) & (x != 0)
    assert (error / expected_gelu(x).abs())[small].max() < 1e-6


@one_thread
def test_gelu_tanh_is_accurate(runtime: Runtime) -> None:
    """To 1e-6, except where the exponential amplifies the rounding of its argument."""
    x = torch.linspace(-9.5, 30, 20001)
    exact = expected_gelu_tanh(x)
    argument = 2 * math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double().pow(3))
    error = (gelu_tanh_of(runtime, x).double() - exact).abs() / exact.abs().clamp(min=1e-300)
    assert (error / (1 + argument.clamp(max=0).abs())).max() < 4e-7
    assert error[x > -1].max() < 1e-6


@pytest.mark.parametrize("function", [silu_of, gelu_of, gelu_tanh_of])
@each_dtype
@one_thread
def test_activations_of_extremes(
    runtime: Runtime, dtype: torch.dtype, function: Callable[[Runtime, Tensor], Tensor]
) -> None:
    large = torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, math.inf, large, 1e5, -1e5, -large, -math.inf, math.nan]).to(dtype)
    found = function(runtime, x)
    assert torch.equal(found[:5], x[:5]) and bool(found[1].signbit())
    assert found[5:8].abs().max() < (2e-7 if function is gelu_of else 2e-36)  # the limit is 0
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
        expected = [rotated(x.view, rotation) for x in (q, k)]
        call(
            runtime, "rotary", q=q.view, q_stride=q.stride, heads=heads, k=k.view,
            k_stride=k.stride, kv_heads=kv_heads, rotation=rotation, rows=rows, head_dim=dim,
            dtype=dtype,
        )  # fmt: skip
        for x, wanted in zip((q, k), expected, strict=True):
            assert torch.equal(x.view, wanted)
            x.assert_rest_untouched()


@each_runtime
def test_rotations(runtime: Runtime) -> None:
    for rows, low_rows, dim in ((0, 4, 8), (1, 1, 2), (5, 16, 64), (300, 7, 70), (3, 4, 5000)):
        high, low = normal(9, dim, seed=3), normal(low_rows, dim, seed=4)
        generator = torch.Generator().manual_seed(dim)
        positions = torch.randint(9 * low_rows, (rows,), generator=generator)
        out = Poisoned(rows, dim, dtype=torch.float32, gap=0)
        call(
            runtime, "rotations", high=high, low=low, low_rows=low_rows, positions=positions,
            last=7 * low_rows, out=out.view, rows=rows, head_dim=dim,
        )  # fmt: skip
        positions = positions.clamp(max=7 * low_rows)
        a, b = (
            torch.complex(*table[at].chunk(2, -1))
            for table, at in ((high, positions // low_rows), (low, positions % low_rows))
        )
        product = a.to(torch.complex128) * b
        expected = torch.cat((product.real, product.imag), -1).float()
        torch.testing.assert_close(out.view, expected, rtol=0, atol=2e-6)
        out.assert_rest_untouched()


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    cosines, sines = rotation[:, None, :].chunk(2, -1)
    low, high = x.float().chunk(2, -1)
    rotated = torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)
    return rotated.to(x.dtype)


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
