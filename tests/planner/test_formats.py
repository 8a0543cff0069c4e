"""The sizes of formats, and the units that multiply them."""

from __future__ import annotations

import pytest

from kvik.errors import ConfigError
from kvik.planner.formats import WEIGHT_FORMATS, arithmetic, kv_facts, weight_facts, weight_format
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.weights import SCHEMES


def test_every_scheme_and_dtype_of_the_engine_is_a_format() -> None:
    for dtype in DTYPE_BYTES:
        assert WEIGHT_FORMATS[weight_format(dtype)].dtype == dtype
        for scheme in set(SCHEMES) - {"none"}:
            assert WEIGHT_FORMATS[weight_format(dtype, scheme)].quantization == scheme


@pytest.mark.parametrize(
    ("name", "cpu", "cuda"),
    [
        ("fp16", "fp16", "fp16"),
        ("int8-weight-only", "bf16", "bf16"),
        ("int4", "int8", "bf16"),
        ("fp8", "bf16", "fp8"),
    ],
)
def test_the_unit_of_a_format(name: str, cpu: str, cuda: str) -> None:
    assert arithmetic(name, "cpu") == cpu
    assert arithmetic(name, "cuda") == cuda


def test_an_unknown_format_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^dtype: must be one of fp32, bf16, .*, not 'int3'$"):
        weight_facts("int3")
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: must be one of fp32, .*, not 'int3'$"):
        kv_facts("int3")
