"""Kinds of weights by name and back."""

from __future__ import annotations

import pytest

from kvik.spec.weight_kind import WeightKind

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
    "int4 group 64 ordered": WeightKind("int4", 64, ordered=True),
    "int4 group 64 zeros ordered": WeightKind("int4", 64, "zeros", ordered=True),
}


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str) -> None:
    assert NAMES[name].name == name
    assert WeightKind.named(name) == NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        *("", "int8", "int4 group -8", "int4 group 0", "int4min group 0", "int8 group 8 zeros"),
        *("int2 group 8", "float64", " ordered", "int4 group 64 ordered ordered"),
        *("int4 group 9999999999", "fp8 group 0\n", "int8 group ٣"),
        *("fp8 group 0 groups", "fp8 group 0 zeros", "int8 group 0 token"),
    ],
)
def test_no_kind(name: str) -> None:
    assert WeightKind.named(name) is None
