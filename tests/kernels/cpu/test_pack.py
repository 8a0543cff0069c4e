"""Packed matrices: what goes in comes out again, however it is handed over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.native import FLOATS, Poisoned, Runtime, call, normal, runtimes
from tests.helpers.native_matrix import BF16, F32, KINDS, NativeMatrix, pack, random_values

SHAPES = [(1, 1), (31, 7), (33, 64), (64, 130), (100, 259)]


def matrix_rows(runtime: Runtime, m: NativeMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    out = Poisoned(len(ids), m.inputs, dtype=dtype, gap=3)
    call(
        runtime,
        "matrix_rows",
        weight=m.weight,
        scales=m.scales,
        zeros=m.zeros,
        kind=m.kind,
        inputs=m.inputs,
        outputs=m.outputs,
        group=m.group,
        ids=ids,
        out=out.view,
        out_stride=out.stride,
        rows=len(ids),
        dtype=dtype,
    )
    out.assert_rest_untouched()
    return out.view


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runtime", runtimes(threads=[1, 5]))
def test_rows_come_back(runtime: Runtime, kind: str) -> None:
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
def test_pieces_make_the_same_matrix(runtime: Runtime, kind: str, paired: bool) -> None:
    for outputs in (2, 34, 70, 128):
        values = random_values(kind, outputs, 75)
        whole = pack(runtime, values, paired=paired, fill=0x11)
        parts = pack(runtime, values, paired=paired, fill=0x11, pieces=7)
        assert torch.equal(whole.weight, parts.weight)
        assert torch.equal(whole.scales, parts.scales)
        if whole.zeros is not None:
            assert parts.zeros is not None and torch.equal(whole.zeros, parts.zeros)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_is_that_of_every_machine(kind: str) -> None:
    values = random_values(kind, 45, 66)
    first, *others = (pack(p.values[0], values, paired=False) for p in runtimes(threads=[2]))
    for other in others:
        assert torch.equal(first.weight, other.weight)
        assert torch.equal(first.scales, other.scales)


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
