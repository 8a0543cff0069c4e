from __future__ import annotations

import pytest
import torch
from helpers.optional_triton import NO_TRITON

from kvik.attention.reference import ReferenceAttention
from kvik.attention.sdpa import SdpaAttention
from kvik.attention.select import BACKENDS, NATIVE, TRITON, TRITON_SDPA, select
from kvik.config.config import EngineConfig
from kvik.errors import ConfigError
from kvik.kernels.reference.ops import REFERENCE
from kvik.options import OneOf, options_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_name(dtype: torch.dtype) -> None:
    assert isinstance(select("reference", REFERENCE, CPU, dtype), ReferenceAttention)
    assert isinstance(select("sdpa", REFERENCE, CPU, dtype), SdpaAttention)


def test_every_backend_can_be_requested() -> None:
    names = {backend.caps.name for backend in BACKENDS}
    (kind,) = (one.kind for one in options_of(EngineConfig) if one.name == "attention_backend")
    allowed = kind.allowed if isinstance(kind, OneOf) else ()
    assert {"auto", NATIVE, TRITON, TRITON_SDPA, *names} == set(allowed)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="^attention_backend: .*'sdpa', 'reference', not 'flash'"):
        select("flash", REFERENCE, CPU, torch.float32)


def test_the_native_backend_needs_native_kernels() -> None:
    with pytest.raises(ConfigError, match="^attention_backend: .*'cpu' needs the native"):
        select("cpu", REFERENCE, CPU, torch.float32)


def test_a_backend_refuses_dtypes_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match="'sdpa' cannot serve float64 on cpu"):
        select("sdpa", REFERENCE, CPU, torch.float64)


def test_triton_is_for_gpus() -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    with pytest.raises(ConfigError, match="'triton' cannot serve float32 on cpu"):
        select("triton", REFERENCE, CPU, torch.float32)


def test_a_missing_triton_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvik.attention.select.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'triton' needs Triton: install kvik\[gpu\]"):
        select("triton", REFERENCE, torch.device("cuda"), torch.float32)
