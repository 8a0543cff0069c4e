from __future__ import annotations

import pytest
import torch

from kvik.attention.reference import ReferenceAttention
from kvik.attention.sdpa import SdpaAttention
from kvik.attention.select import select
from kvik.config.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_name(dtype: torch.dtype) -> None:
    assert isinstance(select("reference", CPU, dtype), ReferenceAttention)
    assert isinstance(select("sdpa", CPU, dtype), SdpaAttention)


def test_auto_is_the_fastest() -> None:
    assert isinstance(select("auto", CPU, torch.bfloat16), SdpaAttention)


def test_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match="'auto', 'sdpa', 'reference', not 'flash'") as error:
        select("flash", CPU, torch.float32)
    assert error.value.field == "attention_backend"


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_what_nothing_can_serve(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot serve float64 on cpu"):
        select(name, CPU, torch.float64)
