"""What each kind of weight means, written out element by element."""

from __future__ import annotations

import pytest
import torch

from kvik.kernels.weights import (
    Weight,
    float_weight,
    fp8_weight,
    int4_min_weight,
    int4_weight,
    int8_weight,
    ordered_weight,
)

INT8 = int8_weight(
    torch.tensor([[-127, 3], [5, 127], [0, -1]], dtype=torch.int8),
    torch.tensor([0.5, 2.0, 1.0]),
    quantize_activations=True,
)
# Two outputs, eight inputs, groups of four; a byte holds the even input in its low half.
INT4 = int4_weight(
    torch.tensor([[0x10, 0x32, 0x54, 0x76], [0x0F, 0xF0, 0x8A, 0xA8]], dtype=torch.uint8),
    torch.tensor([[1.0, 10.0], [0.5, 2.0]]),
    torch.tensor([[0, 4], [15, 8]], dtype=torch.uint8),
    group=4,
)
INT4_MIN = int4_min_weight(
    INT4.values, INT4.scales, torch.tensor([[0.5, -1.0], [7.5, 0.0]]), group=4
)
# Groups of two, the last one short.
INT8_GROUPS = int8_weight(
    torch.tensor([[-127, 3, 4], [5, 127, -128]], dtype=torch.int8),
    torch.tensor([[0.5, 2.0], [1.0, -1.0]]),
    quantize_activations=False,
    group=2,
)
FP8 = fp8_weight(
    torch.tensor([[1.0, -448.0, 0.001953125], [0.0, 3.5, 2.0]]).to(torch.float8_e4m3fn),
    torch.tensor([[2.0, 512.0], [1.0, 0.5]]),
    group=2,
)
INT4_VALUES = [
    [0, 1, 2, 3, 0, 10, 20, 30],
    [0, -7.5, -7.5, 0, 4, 0, 0, 4],
]


def test_int8_scales_each_output() -> None:
    assert INT8.dequantized().tolist() == [[-63.5, 1.5], [10, 254], [0, -1]]


def test_int4_counts_from_zero_points_in_groups_of_inputs() -> None:
    assert INT4.dequantized().tolist() == INT4_VALUES


def test_int4_without_zero_points_counts_from_8() -> None:
    found = int4_weight(INT4.values[:1], INT4.scales[:1], None, 4).dequantized()
    assert found.tolist() == [[-8, -7, -6, -5, -40, -30, -20, -10]]


def test_int4_with_minima_counts_from_them() -> None:
    assert INT4_MIN.dequantized().tolist() == [
        [-0.5, 0.5, 1.5, 2.5, 41, 51, 61, 71],
        [0, -7.5, -7.5, 0, 20, 16, 16, 20],
    ]


def test_int8_scales_groups_of_inputs() -> None:
    assert INT8_GROUPS.dequantized().tolist() == [[-63.5, 1.5, 8], [5, 127, 128]]


def test_fp8_scales_groups_of_inputs_or_outputs() -> None:
    assert FP8.dequantized().tolist() == [[2, -896, 1], [0, 3.5, 1]]
    whole = fp8_weight(FP8.values, torch.tensor([1.0, 2.0]))
    assert whole.dequantized().tolist() == [[1, -448, 2**-9], [0, 7, 4]]


def test_an_order_says_where_inputs_belong() -> None:
    ordered = ordered_weight(INT8_GROUPS, torch.tensor([2, 0, 1], dtype=torch.int32))
    assert ordered.dequantized().tolist() == [[1.5, 8, -63.5], [127, 128, 5]]


@pytest.mark.parametrize(
    "weight",
    [
        float_weight(torch.arange(6.0).view(3, 2).bfloat16()),
        *(INT8, INT4, INT4_MIN, INT8_GROUPS, FP8),
        ordered_weight(INT4, torch.arange(7, -1, -1).int()),
    ],
    ids=lambda w: type(w).__name__,
)
def test_rows_are_the_same_rows(weight: Weight) -> None:
    whole = weight.dequantized()
    assert whole.dtype == torch.float32
    assert (weight.outputs, weight.inputs) == whole.shape
    ids = torch.tensor([1, 0, 1])
    assert torch.equal(weight.rows(ids).dequantized(), whole[ids])
    assert torch.equal(weight.rows(slice(1, 9)).dequantized(), whole[1:])
