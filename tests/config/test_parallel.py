"""What cannot be divided among processes is refused, by name."""

from __future__ import annotations

import pytest

from kvik.config.config import EngineConfig
from kvik.config.hardware import NATIVE_ISAS, Hardware
from kvik.config.resolve import resolve
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.models.public import public_configs

MACHINE = Hardware("large", 64, 1 << 40, "RAM", frozenset(NATIVE_ISAS["avx2"]), native=True)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-3.2-1b", {"kernels": "torch"}, "must be 1 with torch kernels"),
        ("llama-3.2-1b", {"tensor_parallel_size": 33}, "at most 32, its heads of queries"),
        ("llama-3.2-1b", {"threads": 1}, "at most 1, as there are threads"),
        ("llama-3.2-1b", {"engine_cache": "somewhere"}, "an engine folder"),
        ("llama-3.2-1b", {"tensor_parallel_size": 0}, "must be an integer in"),
    ],
)
def test_refusals(model, options, message) -> None:
    config = EngineConfig(**{"device": "cpu", "tensor_parallel_size": 2, "threads": 64, **options})
    with pytest.raises(ConfigError, match=message) as caught:
        spec = ModelSpec.from_config(public_configs()[model])
        resolve(config, spec, MACHINE, "")
    assert caught.value.field == "tensor_parallel_size"
