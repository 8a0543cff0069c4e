"""Options from the environment and by name."""

from __future__ import annotations

import pytest

from kvik.config.config import EngineConfig
from kvik.config.env import engine_config
from kvik.config.errors import ConfigError


def test_options_beat_the_environment_and_it_beats_the_defaults() -> None:
    environ = {"KVIK_BLOCK_SIZE": "8", "KVIK_MAX_MODEL_LEN": "4k", "HOME": "/", "kvik_seed": "3"}
    config = engine_config({"block_size": 32}, environ)
    assert config == EngineConfig(block_size=32, max_model_len=4096)


def test_each_type_is_read() -> None:
    environ = {
        "KVIK_MEMORY_UTILIZATION": "0.5",
        "KVIK_ENABLE_PREFIX_CACHING": "off",
        "KVIK_KV_CACHE_MEMORY": "2G",
        "KVIK_POLICY": "static",
    }
    assert engine_config({}, environ) == EngineConfig(
        memory_utilization=0.5,
        enable_prefix_caching=False,
        kv_cache_memory=2 << 30,
        policy="static",
    )


@pytest.mark.parametrize(
    ("variable", "text", "part"),
    [
        ("KVIK_BLOCK_SIZE", "big", "must be an integer"),
        ("KVIK_BLOCK_SIZE", "", "must be an integer"),
        ("KVIK_BLOCK_SIZE", "1.5", "must be an integer"),
        ("KVIK_MAX_WAIT", "soon", "must be a number"),
        ("KVIK_ENABLE_PREFIX_CACHING", "maybe", "must be true or false"),
        ("KVIK_BLOKC_SIZE", "8", "is no variable of kvik (known: KVIK_MODEL"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_config({}, {variable: text})
    assert error.value.field == variable
    assert part in error.value.message
    assert "\n" not in str(error.value)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="^tensor_parallel: is no engine option"):
        engine_config({"tensor_parallel": 2}, {})
