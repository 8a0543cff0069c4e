"""Options from a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvik.config.config import EngineConfig
from kvik.config.errors import ConfigError
from kvik.config.option_file import read_option_file
from kvik.config.server_config import ServerConfig

KINDS = (EngineConfig, ServerConfig)


def read(folder: Path, text: str) -> dict[type, dict[str, object]]:
    file = folder / "kvik.toml"
    file.write_text(text)
    return read_option_file(str(file), KINDS)


def test_each_type_is_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        model = "owner/name"
        max-model-len = "4k"
        max_num_seqs = 8
        memory_utilization = 0.5
        max-wait = 1
        enable-prefix-caching = false
        kv_cache_dtype_skip_layers = [0, 1]
        num_blocks = "none"
        port = 80
        api-key = ["a", "b,c"]
        cors_origin = "https://a.example"
        [speculative_config]
        method = "ngram"
        num_speculative_tokens = 8
        """,
    )
    assert found[EngineConfig] == {
        "model": "owner/name",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "memory_utilization": 0.5,
        "max_wait": 1.0,
        "enable_prefix_caching": False,
        "kv_cache_dtype_skip_layers": (0, 1),
        "num_blocks": None,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 8},
    }
    assert found[ServerConfig] == {
        "port": 80,
        "api_key": ("a", "b,c"),
        "cors_origin": ("https://a.example",),
    }


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prot = 80", "unknown key 'prot' (known: model, "),
        ("[server]\nport = 80", "unknown key 'server'"),
        ('port = "eighty"', "port in "),
        ("port = 80.5", "must be an integer"),
        ("port = true", "must be an integer"),
        ("port = [80]\nhost = 1", "must be text"),
        ("enable_prefix_caching = 1", "must be true or false"),
        ('enable_prefix_caching = "yes"', "must be true or false"),
        ("host = 127", "must be text"),
        ("cors_origin = [1]", "must be text"),
        ("host = ['a', 'b']", "must be text"),
        ("speculative_config = 1", "must be a JSON object"),
        ("max_num_seqs = 2024-01-01", "must be an integer"),
        ("port = 1\nport = 2", "is not TOML"),
        ("max-model-len = 1\nmax_model_len = 2", "sets max_model_len twice"),
        ("port =", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert error.value.field == "config"
    assert part in error.value.message
    assert "\n" not in error.value.message


def test_a_key_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "api_key = [12345]")
    assert "12345" not in error.value.message


def test_no_file() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_option_file("/no/such/file.toml", KINDS)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_option_file(str(tmp_path / "x"), KINDS)
