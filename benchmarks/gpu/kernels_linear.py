"""The matrix products of one layer of Llama-3-8B in each format: QKV, O, gate and up, down.

Few tokens: the bytes of the weights, scales included, over time, as a share of bandwidth. Many: the
operations, as a share of the tensor cores in the format that they multiply in. The time is that of
all four, in a CUDA graph, alternating between two layers so that no weight is in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from clock import Call, Timer, timed
from helpers.kernel_cases import filled_matrix
from notes import Notes
from place import DEVICE, release, sized
from torch import Tensor

from kvik.kernels.rounding import round_int4, round_int8, round_to_fp8
from kvik.kernels.triton.ops import triton_ops
from kvik.kernels.weights import Activation, Matrix, Weight, float_weight, fp8_weight

LAYER: tuple[tuple[int, int, Activation | None], ...] = sized(
    (
        (4096, 6144, None),
        (4096, 4096, None),
        (4096, 28672, "silu_and_mul"),
        (14336, 4096, None),
    ),
    ((128, 64, None), (128, 64, "silu_and_mul")),
)
TOKENS = sized((1, 64, 8192, 8, 512, 128), (1, 65))  # most important first
FEW = 64  # up to this many tokens, reading weights takes longer than multiplying
LAYERS = sized(2, 1)
SQUARE = 128  # side of a block of weights that shares a scale


def measure(notes: Notes, time: Timer = timed, formats: Sequence[str] | None = None) -> None:
    """Time the products. formats: None: all."""
    ops = triton_ops(DEVICE)
    for name in formats or FORMATS:
        make, tensor_cores = FORMATS[name]
        layers: list[list[Matrix]] = []
        moved: list[int] = []

        def fill(make=make, layers=layers, moved=moved) -> None:
            for _ in range(LAYERS):
                weights = [make(outputs, inputs) for inputs, outputs, _ in LAYER]
                moved[:] = [_bytes(weight) for weight in weights]
                layers.append(
                    [
                        filled_matrix(ops, weight, None, activation, torch.bfloat16)
                        for weight, (_, _, activation) in zip(weights, LAYER, strict=True)
                    ]
                )

        if notes.attempt(f"{name} weights", fill):
            for tokens in TOKENS:
                measured = partial(
                    _products,
                    notes,
                    time,
                    ops.linear,
                    layers,
                    name,
                    tokens,
                    sum(moved),
                    tensor_cores,
                )
                notes.attempt(f"layer {name}, {tokens} tokens", measured)
        layers.clear()
        release()


def _products(
    notes: Notes,
    time: Timer,
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor],
    layers: Sequence[Sequence[Matrix]],
    name: str,
    tokens: int,
    moved: float,
    tensor_cores: str,
) -> None:
    xs = {
        inputs: torch.randn(tokens, inputs, device=DEVICE).bfloat16()
        for inputs in {inputs for inputs, _, _ in LAYER}
    }
    calls = [
        _call(linear, xs[inputs], matrix)
        for layer in layers
        for (inputs, _, _), matrix in zip(LAYER, layer, strict=True)
    ]
    found = time(calls)
    seconds = found.seconds * len(LAYER)
    title = f"layer {name}, {tokens} tokens"
    if tokens <= FEW:
        # inputs read and outputs written
        moved += 2 * tokens * sum(i + (o // 2 if act else o) for i, o, act in LAYER)
        notes.rate(title, seconds, "read", moved=moved, captured=found.captured)
        return
    done = 2.0 * tokens * sum(inputs * outputs for inputs, outputs, _ in LAYER)
    notes.rate(title, seconds, tensor_cores, operations=done, captured=found.captured)


def _call(
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor], x: Tensor, matrix: Matrix
) -> Call:
    return lambda: linear(x, matrix, None)


def _floats(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, device=DEVICE).mul_(inputs**-0.5).bfloat16()


def _bf16(outputs: int, inputs: int) -> Weight:
    return float_weight(_floats(outputs, inputs))


def _int4(outputs: int, inputs: int) -> Weight:
    return round_int4(_floats(outputs, inputs), 128)


def _int8(outputs: int, inputs: int) -> Weight:
    return round_int8(_floats(outputs, inputs), False)


def _w8a8(outputs: int, inputs: int) -> Weight:
    return round_int8(_floats(outputs, inputs), True)


def _fp8(outputs: int, inputs: int) -> Weight:
    return round_to_fp8(_floats(outputs, inputs))


def _fp8_token(outputs: int, inputs: int) -> Weight:
    rounded = round_to_fp8(_floats(outputs, inputs))
    return fp8_weight(rounded.values, rounded.scales, 0, "token")


def _fp8_blocks(outputs: int, inputs: int) -> Weight:
    """Return fp8 weights with a scale for 128 x 128 weights, and for 128 inputs of a token."""
    rounded = round_to_fp8(_floats(outputs, inputs))
    squares = rounded.scales[::SQUARE].repeat_interleave(SQUARE)[:outputs, None]
    scales = squares.expand(outputs, -(-inputs // SQUARE)).contiguous()
    return fp8_weight(rounded.values, scales, SQUARE, "group")


def _fp8_one(outputs: int, inputs: int) -> Weight:
    """Return fp8 weights with one scale for all weights, and one for all tokens."""
    rounded = round_to_fp8(_floats(outputs, inputs))
    scales = rounded.scales[:1].expand(outputs).contiguous()
    return fp8_weight(rounded.values, scales, 0, "static", torch.full((1,), 0.01, device=DEVICE))


def _bytes(weight: Weight) -> int:
    """Return the needed bytes: scales of groups count 16 bits and their zero points four, as they
    carry no more information."""
    values, scales, kind = weight.values.nbytes, weight.scales, weight.kind
    if scales is None:
        return values
    if kind.codes == "int4":
        return values + 2 * scales.numel() + scales.numel() // 2
    if kind.codes == "fp8" and kind.group:
        return values + 4 * scales.numel() // SQUARE
    return values + 4 * scales.numel()


# The function that makes the weights, and the ceiling of products with many tokens.
FORMATS: dict[str, tuple[Callable[[int, int], Weight], str]] = {
    "bf16": (_bf16, "bf16"),
    "int4": (_int4, "bf16"),
    "fp8": (_fp8, "bf16"),
    "fp8, tokens too": (_fp8_token, "fp8"),
    "fp8, blocks": (_fp8_blocks, "fp8"),
    "fp8, one scale": (_fp8_one, "fp8"),
    "int8": (_int8, "bf16"),
    "int8, tokens too": (_w8a8, "int8"),
}
