"""Options from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvik.config.env import cache_folder, environment_options
from kvik.config.errors import ConfigError


def test_each_type_is_read() -> None:
    environ = {
        "KVIK_MODEL": "owner/name",
        "KVIK_MAX_MODEL_LEN": "4k",
        "KVIK_MAX_NUM_SEQS": "none",
        "KVIK_MEMORY_UTILIZATION": "0.5",
        "KVIK_ENABLE_PREFIX_CACHING": "off",
        "KVIK_KV_CACHE_MEMORY": "2G",
        "HOME": "/",
        "kvik_seed": "3",
    }
    assert environment_options(environ) == {
        "model": "owner/name",
        "max_model_len": 4096,
        "max_num_seqs": None,
        "memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "kv_cache_memory": 2 << 30,
    }


def test_the_real_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIK_BLOCK_SIZE", "8")
    assert environment_options()["block_size"] == 8


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
        environment_options({variable: text})
    assert error.value.field == variable
    assert part in error.value.message
    assert "\n" not in str(error.value)


def test_the_cache_folder_follows_the_specification() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/some/where"}) == Path("/some/where/kvik")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(environ) == Path.home() / ".cache" / "kvik"


def test_a_user_without_a_home_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder({}).name.startswith("kvik-") and cache_folder({}).is_absolute()
    assert cache_folder({"XDG_CACHE_HOME": "/some/where"}) == Path("/some/where/kvik")
