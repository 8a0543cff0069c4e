"""Kinds of weights by name and back."""

from __future__ import annotations

import pytest
import torch

from kvik.kernels.weights import (
    FloatKind,
    Fp8Kind,
    Int4Kind,
    Int4MinKind,
    Int8Kind,
    OrderedKind,
    WeightKind,
)
from kvik.nn.storage import kind_named, name_of_kind

NAMES: dict[str, WeightKind] = {
    "bfloat16": FloatKind(torch.bfloat16),
    "float32": FloatKind(torch.float32),
    "float16": FloatKind(torch.float16),
    "w8a8 group 0": Int8Kind(True),
    "int8 group 32": Int8Kind(False, 32),
    "int4 group 128 zeros": Int4Kind(128, True),
    "int4 group 64": Int4Kind(64, False),
    "int4min group 32": Int4MinKind(32),
    "fp8 group 0": Fp8Kind(),
    "fp8 group 0 token": Fp8Kind(0, "token"),
    "fp8 group 128 groups": Fp8Kind(128, "group"),
    "fp8 group 32 static": Fp8Kind(32, "static"),
    "int4 group 64 ordered": OrderedKind(Int4Kind(64, False)),
    "int4 group 64 zeros ordered": OrderedKind(Int4Kind(64, True)),
}


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str) -> None:
    assert name_of_kind(NAMES[name]) == name
    assert kind_named(name) == NAMES[name]


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
    assert kind_named(name) is None
