"""Packed matrices unpack to the input, for any division of the packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.native import FLOATS, Poisoned, Runtime, call, normal, runtimes
from helpers.native_matrix import (
    BF16,
    F32,
    KINDS,
    NUMBERS,
    NativeMatrix,
    Values,
    linear,
    pack,
    random_values,
)
from torch import Tensor

from kvik.kernels.weights import mxfp4_weight

SHAPES = [(1, 1), (31, 7), (33, 64), (64, 130), (100, 259)]


def matrix_rows(runtime: Runtime, m: NativeMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    out = Poisoned(len(ids), m.inputs, dtype=dtype, gap=3)
    call(
        runtime,
        "matrix_rows",
        ids=ids,
        first=0,
        out=out.view,
        out_stride=out.stride,
        rows=len(ids),
        dtype=dtype,
        **m.arguments,
    )
    out.assert_rest_untouched()
    return out.view


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runtime", runtimes(threads=[1, 5]))
def test_rows_are_unpacked(runtime: Runtime, kind: str) -> None:
    for outputs, inputs in SHAPES:
        values = random_values(kind, outputs, inputs)
        matrix = pack(runtime, values)
        ids = torch.arange(outputs).flip(0).repeat(2)
        for dtype in FLOATS:
            rows = matrix_rows(runtime, matrix, ids, dtype)
            assert torch.equal(rows, values.dequantized[ids].to(dtype))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runtime", runtimes(threads=[2]))
def test_packing_rows_in_parts_gives_the_same_matrix(
    runtime: Runtime, kind: str, paired: bool
) -> None:
    for outputs in (2, 34, 70, 128):
        values = random_values(kind, outputs, 75)
        whole = pack(runtime, values, paired=paired, fill=0x11)
        parts = pack(runtime, values, paired=paired, fill=0x11, pieces=7)
        assert torch.equal(whole.weight, parts.weight)
        assert torch.equal(whole.scales, parts.scales)
        if whole.zeros is not None:
            assert parts.zeros is not None and torch.equal(whole.zeros, parts.zeros)


@pytest.mark.parametrize("kind", KINDS)
def test_all_machines_have_the_same_layout(kind: str) -> None:
    values = random_values(kind, 45, 66)
    first, *others = (pack(p.values[0], values, paired=False) for p in runtimes(threads=[2]))
    for other in others:
        assert torch.equal(first.weight, other.weight)
        assert torch.equal(first.scales, other.scales)
        assert first.zeros is None or torch.equal(first.zeros, other.zeros)


@pytest.mark.parametrize("runtime", runtimes(threads=[2]))
def test_a_pair_shares_a_tile(runtime: Runtime) -> None:
    values = random_values(F32, 2 * 20, 3)
    matrix = pack(runtime, values, paired=True)
    packed = matrix.weight[:-64].view(torch.float32).view(2, 3, 2, 16)  # [tile, input, half, lane]
    gate, up = values.source.chunk(2)
    expected = torch.zeros_like(packed)
    for tile, columns in enumerate((slice(0, 16), slice(16, 20))):
        for half, rows in enumerate((gate, up)):
            part = rows[columns].T
            expected[tile, :, half, : part.shape[1]] = part
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
@pytest.mark.parametrize("kind", [F32, BF16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_of_either_float(runtime: Runtime, kind: str, dtype: torch.dtype) -> None:
    values = random_values(kind, 33, 9, dtype=dtype)
    rows = matrix_rows(runtime, pack(runtime, values), torch.arange(33), torch.float32)
    expected = normal(33, 9, dtype=dtype).float()
    assert torch.equal(rows, expected.bfloat16().float() if kind == BF16 else expected)


def one_in_each_group(scales: Tensor, minima: Tensor | None = None) -> Values:
    """Return weights of 1 in groups of 8, by `scales` and `minima` [outputs, groups]."""
    outputs, groups = scales.shape
    ones = torch.full((outputs, 4 * groups), 0x99 if minima is None else 0x11, dtype=torch.uint8)
    meant = scales if minima is None else scales - minima
    meant = meant.repeat_interleave(8, dim=1)
    kind = NUMBERS["int4" if minima is None else "int4-min"]
    return Values(meant, meant, ones, scales, minima, 8, kind)


@pytest.mark.parametrize("runtime", runtimes(threads=[2]))
def test_every_fp16_number_is_a_scale(runtime: Runtime) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = halves[halves.isfinite()].float()
    scales = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    values = one_in_each_group(scales.view(-1, 31))
    ids = torch.arange(len(values.source))
    rows = matrix_rows(runtime, pack(runtime, values), ids, torch.float32)
    assert torch.equal(rows, values.dequantized)


@pytest.mark.parametrize("size", [2.0**-130, 1e-30, 1e-6, 1.0, 3e4, 1e30, 2.0**120])
@pytest.mark.parametrize("with_minima", [False, True])
@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_scales_of_any_size(runtime: Runtime, with_minima: bool, size: float) -> None:
    """bfloat16 scales are kept exactly, others with eleven binary digits."""
    drawn = (normal(9, 4) * size).bfloat16().float()
    for scales, error in ((drawn, 0.0), (drawn * 1.001, 2.0**-11)):
        minima = scales.flip(0) / 4 if with_minima else None
        values = one_in_each_group(scales, minima)
        rows = matrix_rows(runtime, pack(runtime, values), torch.arange(9), torch.float32)
        off = (rows - values.dequantized).abs()
        allowed = scales.abs() if minima is None else scales.abs() + minima.abs()
        assert bool((off <= error * allowed.repeat_interleave(8, 1) + 2.0**-140).all())


@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_nan_scales_only_affect_their_output(runtime: Runtime) -> None:
    scales = normal(5, 3).half().float()
    scales[1, 2], scales[3, 0] = float("nan"), float("inf")
    values = one_in_each_group(scales)
    rows = matrix_rows(runtime, pack(runtime, values), torch.arange(5), torch.float32)
    assert torch.equal(rows[[0, 2, 4]], values.dequantized[[0, 2, 4]])
    assert not bool(rows[1, 16:].isfinite().any()) and not bool(rows[3, :8].isfinite().any())


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_every_number_of_eight_bits(runtime: Runtime, group: int) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)[:, :127].contiguous()
    values = every.view(torch.float8_e4m3fn)
    scales = torch.ones(2, 2) if group else torch.ones(2)
    meant = values.float()
    fp8 = Values(meant, meant, values, scales, None, group, NUMBERS["fp8"])
    rows = matrix_rows(runtime, pack(runtime, fp8), torch.arange(2), torch.float32)
    assert torch.equal(rows, meant) and bool(rows.signbit()[1].all())
    picked = linear(runtime, torch.eye(127), pack(runtime, fp8))
    assert torch.equal(picked, meant.T)


@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_every_number_of_four_bits_with_every_power_of_two(runtime: Runtime) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    weight = mxfp4_weight((codes | codes.flip(0) << 4).repeat(255, 1), torch.arange(255)[:, None])
    meant = weight.dequantized()
    values = Values(meant, meant, weight.values, weight.scales.byte(), None, 32, NUMBERS["mxfp4"])
    matrix = pack(runtime, values)
    assert torch.equal(matrix_rows(runtime, matrix, torch.arange(255), torch.float32), meant)
    # Two inputs whose products fit an int8 each, except those that overflow fp32.
    x = torch.zeros(1, 32)
    x[0, 3], x[0, 8] = 127, -3
    expected = x.double() @ meant[2:240].double().T
    assert torch.equal(linear(runtime, x, matrix)[:, 2:240].double(), expected)


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_fp8_nan_only_affects_its_output(runtime: Runtime, nan: int) -> None:
    stored = torch.full((3, 9), 0x38, dtype=torch.uint8)  # 1
    stored[1, 8] = nan
    values = stored.view(torch.float8_e4m3fn)
    meant = values.float()
    fp8 = Values(meant, meant, values, torch.ones(3), None, 0, NUMBERS["fp8"])
    y = linear(runtime, torch.ones(2, 9), pack(runtime, fp8))
    assert bool(y[:, 1].isnan().all()) and bool((y[:, [0, 2]] == 9).all())


@pytest.mark.parametrize("runtime", runtimes(threads=[1]))
def test_rows_are_unpacked_in_the_order_of_the_layer(runtime: Runtime) -> None:
    values = random_values("int4/32-zeros", 33, 75)
    order = torch.randperm(75, generator=torch.Generator().manual_seed(0))
    matrix = replace(pack(runtime, values), order=order.int())
    rows = matrix_rows(runtime, matrix, torch.arange(33), torch.float32)
    assert torch.equal(rows[:, order], values.dequantized)
