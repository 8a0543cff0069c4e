"""The meaning of each kind of weight, element by element."""

from __future__ import annotations

import pytest
import torch
from helpers.kernel_cases import INTEGERS

from kvik.kernels.weights import (
    NUMBERS,
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

INT8 = int8_weight(
    torch.tensor([[-127, 3], [5, 127], [0, -1]], dtype=torch.int8),
    torch.tensor([0.5, 2.0, 1.0]),
    quantize_activations=True,
)
# Two outputs, eight inputs, groups of four; the even input is in the low half of a byte.
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
# Every four-bit code, once with the smallest power of two and once with a half.
MXFP4 = mxfp4_weight(
    torch.tensor([list(range(0x10, 0x100, 0x22))], dtype=torch.uint8).repeat(1, 4),
    torch.tensor([[0, 126]], dtype=torch.uint8),
)
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
# As bitsandbytes stores them in `quant_map`.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
BNB_FP4 = [
    *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
    *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
    *(-0.0, -0.0052083334885537624, -0.6666666865348816, -1.0),
    *(-0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
# Weights of each kind, and their values.
MEANT: dict[str, tuple[Weight, list[list[float]]]] = {
    "int8 scales each output": (INT8, [[-63.5, 1.5], [10, 254], [0, -1]]),
    "int4 counts from zero points in groups of inputs": (
        INT4,
        [[0, 1, 2, 3, 0, 10, 20, 30], [0, -7.5, -7.5, 0, 4, 0, 0, 4]],
    ),
    "int4 without zero points counts from 8": (
        int4_weight(INT4.values[:1], INT4.scales[:1], None, 4),
        [[-8, -7, -6, -5, -40, -30, -20, -10]],
    ),
    "int4 with minima counts from them": (
        INT4_MIN,
        [[-0.5, 0.5, 1.5, 2.5, 41, 51, 61, 71], [0, -7.5, -7.5, 0, 20, 16, 16, 20]],
    ),
    "int8 scales groups of inputs": (INT8_GROUPS, [[-63.5, 1.5, 8], [5, 127, 128]]),
    "fp8 scales groups of inputs": (FP8, [[2, -896, 1], [0, 3.5, 1]]),
    "fp8 scales outputs": (
        fp8_weight(FP8.values, torch.tensor([1.0, 2.0])),
        [[1, -448, 2**-9], [0, 7, 4]],
    ),
    "mxfp4 scales groups of 32 inputs by powers of two": (
        MXFP4,
        [[size * 2.0**power for power in (-127, -1) for size in 2 * E2M1]],
    ),
    "nvfp4 scales groups of inputs": (
        nvfp4_weight(MXFP4.values, torch.tensor([[3.0, -0.5]]), 32),
        [[size * scale for scale in (3.0, -0.5) for size in 2 * E2M1]],
    ),
    "iq4 scales numbers of a table": (
        table_weight("iq4", MXFP4.values, torch.tensor([[1.0, -0.5]]), 32),
        [[number * scale for scale in (1.0, -0.5) for number in 2 * IQ4]],
    ),
    "nf4 scales numbers of a table": (
        table_weight("nf4", MXFP4.values, torch.tensor([[1.0, -0.5]]), 32),
        [[number * scale for scale in (1.0, -0.5) for number in 2 * NF4]],
    ),
    "fp4 of bitsandbytes is not that of E2M1": (
        table_weight("bnb_fp4", MXFP4.values, torch.tensor([[1.0, -0.5]]), 32),
        [[number * scale for scale in (1.0, -0.5) for number in 2 * BNB_FP4]],
    ),
    "an order gives the place of each input": (
        ordered_weight(INT8_GROUPS, torch.tensor([2, 0, 1], dtype=torch.int32)),
        [[1.5, 8, -63.5], [127, 128, 5]],
    ),
}


@pytest.mark.parametrize("rule", MEANT)
def test_dequantised_values_of_each_kind(rule: str) -> None:
    weight, meant = MEANT[rule]
    assert weight.dequantized().tolist() == meant


@pytest.mark.parametrize(
    "weight",
    [
        float_weight(torch.arange(6.0).view(3, 2).bfloat16()),
        *(INT8, INT4, INT4_MIN, INT8_GROUPS, FP8),
        mxfp4_weight(
            MXFP4.values.repeat(2, 1), torch.tensor([[3, 9], [0, 254]], dtype=torch.uint8)
        ),
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


@pytest.mark.parametrize(
    ("codes", "of_codes", "of_integers"), [("nf4", 0.092, 0.0049), ("bnb_fp4", 0.122, 0.0035)]
)
def test_integers_of_a_table_change_weights_little(codes, of_codes, of_integers):
    """Root mean squares of the changes of normal weights in groups of 64, by the codes and then by
    the integers, relative to that of the weights: the figures of docs/quantisation.md."""
    weights = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    scale, integers = INTEGERS[codes]
    numbers, rounded = torch.tensor(NUMBERS[codes]), torch.tensor(integers) / scale
    units = weights.abs().amax(1, keepdim=True)
    nearest = ((weights / units)[..., None] - numbers).abs().argmin(-1)
    exact = numbers[nearest] * units

    def size(change: torch.Tensor) -> float:
        return (change.square().mean() / weights.square().mean()).sqrt().item()

    assert size(exact - weights) == pytest.approx(of_codes, rel=0.02)
    assert size(rounded[nearest] * units - exact) == pytest.approx(of_integers, rel=0.02)
