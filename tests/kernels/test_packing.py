"""Matrices stored in parts, as in files, multiply to the same bits."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from helpers.kernel_cases import filled_matrix
from helpers.optional_native import NATIVE
from helpers.optional_triton import TRITON, device

from kvik.kernels.ops import Ops
from kvik.kernels.packing import PLAIN, Packing
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import (
    Activation,
    Matrix,
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

ROWS, INPUTS, GROUP = 70, 64, 32


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    """Return mixed integers, the same in every version of torch."""
    count = torch.arange(torch.Size(shape).numel())
    return (count * 7919 // 13 % (high - low) + low).view(shape)


def plain_weights() -> dict[str, Weight]:
    """Return weights of numbers that are exact in every kind and on every machine."""
    scales = 2.0 ** integers(-4, 4, ROWS).float()
    groups = 2.0 ** integers(-4, 4, ROWS, INPUTS // GROUP).float()
    whole = integers(-8, 8, ROWS, INPUTS)
    bytes_ = integers(0, 256, ROWS, INPUTS // 2).to(torch.uint8)
    zeros = integers(0, 16, ROWS, INPUTS // GROUP)
    return {
        "float32": float_weight(whole.float()),
        "bfloat16": float_weight(whole.bfloat16()),
        "w8a8": int8_weight(whole.to(torch.int8), scales, True),
        "int8": int8_weight(whole.to(torch.int8), groups, False, GROUP),
        "int4": int4_weight(bytes_, groups, zeros.to(torch.uint8), GROUP),
        "symmetric int4": int4_weight(bytes_, groups, None, GROUP),
        "int4 with minima": int4_min_weight(bytes_, groups, zeros.float(), GROUP),
        "mxfp4": mxfp4_weight(bytes_, (zeros + 120).to(torch.uint8)),
        "nvfp4": nvfp4_weight(bytes_, groups, GROUP),
        "iq4": table_weight("iq4", bytes_, groups, GROUP),
        "nf4": table_weight("nf4", bytes_, 112 * groups, GROUP),
        "fp8": fp8_weight(whole.float().to(torch.float8_e4m3fn), scales),
        "fp8 in groups": fp8_weight(whole.float().to(torch.float8_e4m3fn), groups, GROUP),
        "fp8, static": fp8_weight(
            whole.float().to(torch.float8_e4m3fn), scales, 0, "static", torch.tensor([0.25])
        ),
    }


def weights() -> dict[str, Weight]:
    plain = plain_weights()
    order = (torch.arange(INPUTS) * 37 % INPUTS).to(torch.int32)
    return {**plain, "ordered int4": ordered_weight(plain["int4"], order)}


def implementation(name: str) -> tuple[Ops, Packing]:
    if name == "torch":
        return TORCH, PLAIN
    if name == "triton":
        from kvik.kernels.triton.ops import triton_ops
        from kvik.kernels.triton.packed import GPU

        return triton_ops(device()), GPU
    from kvik.kernels.cpu.matrix import TILES
    from kvik.kernels.cpu.native import Native
    from kvik.kernels.cpu.ops import native_ops

    return native_ops(Native(1)), TILES


def made(ops: Ops, weight: Weight, activation: Activation | None = None) -> Matrix:
    return filled_matrix(ops, weight, integers(-8, 8, ROWS).float(), activation, torch.float32)


# Triton's only in its interpreter: everything here is on the CPU.
INTERPRETED = TRITON and device().type == "cpu"
IMPLEMENTATIONS = [
    "torch",
    *(["native"] if NATIVE else []),
    *(["triton"] if INTERPRETED else []),
]


@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
@pytest.mark.parametrize("kind", weights())
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_packed_matrix_multiplies_to_the_same_bits(
    name: str, kind: str, activation: Activation | None
) -> None:
    ops, packing = implementation(name)
    matrix = made(ops, weights()[kind], activation)
    parts = packing.parts(matrix)
    layout = packing.layout(matrix.spec)
    assert {k: (v.shape, v.dtype) for k, v in parts.items()} == {
        k: (v.shape, v.dtype) for k, v in layout.items()
    }
    assert all(part.device.type == "meta" for part in layout.values())
    again = packing.over(matrix.spec, {k: v.clone() for k, v in parts.items()})
    x = integers(-8, 8, 5, INPUTS).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    assert torch.equal(ops.linear(x, again, None), ops.linear(x, matrix, None))


def digest(packing: Packing, matrix: Matrix) -> str:
    whole = hashlib.sha256()
    for name, part in sorted(packing.parts(matrix).items()):
        whole.update(name.encode())
        whole.update(part.contiguous().flatten().view(torch.uint8).numpy())
    return whole.hexdigest()


# If this fails, the packed bytes have changed, and existing folders would be misread: rename the
# packing.
BYTES = {
    "gpu-1": "e6910aaf2df2a221bca57efe42ac0b8bb6b30b7aa85406a2cf7c2edb86fe80b7",
    "plain-1": "5a43d4d39909d3f41a7127751fe26a690916268cc9a97296f8adde5801202049",
    "tiles-1": "3146c2a0d86b0d3d1d084ce99eca2e705f4c584c3e862e3edc9f9b47ca2155e3",
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_changed_bytes_need_another_name(name: str) -> None:
    whole = hashlib.sha256()
    for weight in weights().values():
        ops, packing = implementation(name)
        whole.update(digest(packing, made(ops, weight)).encode())
    assert whole.hexdigest() == BYTES[packing.name]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("wrong", [-1, INPUTS, 0])
def test_an_order_outside_of_the_inputs_is_refused(name: str, wrong: int) -> None:
    ops, packing = implementation(name)
    matrix = made(ops, weights()["ordered int4"])
    parts = {k: v.clone() for k, v in packing.parts(matrix).items()}
    parts["order"][parts["order"] == 5] = wrong
    with pytest.raises(ValueError, match="not a permutation"):
        packing.over(replace(matrix.spec), parts)
