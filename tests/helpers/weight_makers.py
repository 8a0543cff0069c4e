"""Random weights of each kind."""

from __future__ import annotations

from helpers.kernel_cases import (
    Maker,
    MakeWeight,
    random_float,
    random_fp8,
    random_int4,
    random_int4_min,
    random_int8,
    random_iq4,
    random_mxfp4,
    random_nvfp4,
    random_table,
)

from kvik.kernels.weights import Weight, ordered_weight

# One of each kind, for inputs that are multiples of 32.
WEIGHT_MAKERS: dict[str, MakeWeight] = {
    "float": random_float,
    "int8": random_int8(activations=False),
    "int8-32": random_int8(32, activations=False),
    "w8a8": random_int8(activations=True),
    "w8a8-32": random_int8(32, activations=True),
    "int4-32": random_int4(32, zeros=False),
    "int4-32-zeros": random_int4(32, zeros=True),
    "int4-min": random_int4_min,
    "mxfp4": random_mxfp4,
    "nvfp4": random_nvfp4,
    "iq4": random_iq4,
    "nf4": random_table("nf4", 32),
    "fp8": random_fp8(0),
    "fp8-32-group": random_fp8(32, "group"),
    "fp8-static": random_fp8(0, "static"),
}


def make_weight(kind: str, m: Maker, outputs: int, inputs: int) -> Weight:
    """Return a weight of a kind of `WEIGHT_MAKERS`; with "-ordered" after it, its inputs are
    permuted."""
    weight = WEIGHT_MAKERS[kind.removesuffix("-ordered")](m, outputs, inputs)
    if not kind.endswith("-ordered"):
        return weight
    return ordered_weight(weight, m.permutation(inputs).int())
