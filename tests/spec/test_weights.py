"""Weight kinds: their choice by layer, their bytes, and their names in engine folders."""

from __future__ import annotations

import pytest

from kvik.spec.weight_kind import WeightKind
from kvik.spec.weights import layer_kind

W8A8 = WeightKind("int8", activations="token")


@pytest.mark.parametrize(
    ("quantization", "inputs", "head", "scheme"),
    [
        ("none", 128, False, None),
        ("none", 128, True, None),
        ("int8", 100, False, W8A8),
        ("int8", 100, True, W8A8),
        ("int8-weight-only", 128, False, WeightKind("int8")),
        ("int8-weight-only", 128, True, WeightKind("int8")),
        ("int4", 4864, False, WeightKind("int4", 128, "zeros")),
        ("int4", 704, False, WeightKind("int4", 64, "zeros")),
        ("int4", 288, False, WeightKind("int4", 32, "zeros")),
        ("int4", 100, False, W8A8),
        ("int4", 128, True, W8A8),
        ("mxfp4", 704, False, WeightKind("mxfp4", 32)),
        ("mxfp4", 100, False, W8A8),
        ("mxfp4", 128, True, W8A8),
        ("fp8", 100, False, WeightKind("fp8")),
        ("fp8", 128, True, WeightKind("fp8")),
    ],
)
def test_the_kind_of_a_layer(
    quantization: str, inputs: int, head: bool, scheme: WeightKind | None
) -> None:
    assert layer_kind(quantization, inputs, head=head) == scheme


def test_bytes_of_a_layer() -> None:
    assert WeightKind("int8").weight_bytes(100, 7) == 700 + 4 * 7
    assert WeightKind("int4", 32, "zeros").weight_bytes(96, 7) == 48 * 7 + 3 * 7 * (4 + 1)


def test_the_native_kernels_keep_groups_in_two_bytes() -> None:
    """In addition to four bytes per output; minima are stored like scales, zero points in a
    byte."""
    for scheme, of_group in (
        (WeightKind("int8", 32), 2),
        (WeightKind("int4", 32), 2),
        (WeightKind("int4", 32, "zeros"), 2 + 1),
        (WeightKind("int4", 32, "minima"), 2 + 2),
        (WeightKind("fp8", 32), 4),
        (WeightKind("mxfp4", 32), 1),
        (WeightKind("iq4", 32), 2),
        (WeightKind("nf4", 32), 2),
        (WeightKind("nvfp4", 32), 2),
    ):
        values = 96 * 7 * scheme.bits // 8
        expected = values + 4 * 7 + 3 * 7 * of_group
        assert scheme.weight_bytes(96, 7, "native") == expected
    assert WeightKind("int8").weight_bytes(100, 7, "native") == 700 + 4 * 7
    assert WeightKind("int4", 32, "minima").weight_bytes(96, 7) == 48 * 7 + 3 * 7 * 8
    assert WeightKind("mxfp4", 32).weight_bytes(96, 7) == 48 * 7 + 3 * 7


# Names of weight kinds.

NAMES: dict[str, WeightKind] = {
    "bfloat16": WeightKind("bfloat16"),
    "float32": WeightKind("float32"),
    "float16": WeightKind("float16"),
    "w8a8 group 0": WeightKind("int8", activations="token"),
    "int8 group 32": WeightKind("int8", 32),
    "int4 group 128 zeros": WeightKind("int4", 128, "zeros"),
    "int4 group 64": WeightKind("int4", 64),
    "int4min group 32": WeightKind("int4", 32, "minima"),
    "fp8 group 0": WeightKind("fp8"),
    "fp8 group 0 token": WeightKind("fp8", activations="token"),
    "fp8 group 128 groups": WeightKind("fp8", 128, activations="group"),
    "fp8 group 32 static": WeightKind("fp8", 32, activations="static"),
    "mxfp4 group 32": WeightKind("mxfp4", 32),
    "nvfp4 group 16": WeightKind("nvfp4", 16),
    "iq4 group 32": WeightKind("iq4", 32),
    "nf4 group 64": WeightKind("nf4", 64),
    "bnb_fp4 group 64": WeightKind("bnb_fp4", 64),
    "mxfp4 group 32 ordered": WeightKind("mxfp4", 32, ordered=True),
    "int4 group 64 ordered": WeightKind("int4", 64, ordered=True),
    "int4 group 64 zeros ordered": WeightKind("int4", 64, "zeros", ordered=True),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_kinds_are_read_back(name: str) -> None:
    assert NAMES[name].name == name
    assert WeightKind.named(name) == NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        *("", "int8", "int4 group -8", "int4 group 0", "int4min group 0", "int8 group 8 zeros"),
        *("int2 group 8", "float64", " ordered", "int4 group 64 ordered ordered"),
        *("int4 group 9999999999", "fp8 group 0\n", "int8 group ٣"),
        *("mxfp4 group 16", "mxfp4 group 0", "mxfp4 group 32 zeros", "iq4 group 0"),
        *("fp8 group 0 groups", "fp8 group 0 zeros", "int8 group 0 token"),
    ],
)
def test_unknown_names_have_no_kind(name: str) -> None:
    assert WeightKind.named(name) is None
