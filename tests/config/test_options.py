"""The table of options that flags and variables are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from kvik.config.config import EngineConfig
from kvik.config.errors import ConfigError
from kvik.config.options import (
    options_of,
    parse_biases,
    parse_bool,
    parse_ids,
    parse_int,
    parse_object,
    read_option_file,
)
from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams


@dataclass
class Example:
    """Some options.

    Attributes:
        size: first line,
            second line.
        left, right: both sides.

    Not a field: something else.
    """

    size: int | None = None
    left: float = 0.5
    right: bool = True
    words: tuple[str, ...] = ()
    bias: Mapping[int, float] | None = None


def test_types_and_notes() -> None:
    table = {option.name: option for option in options_of(Example)}
    assert table["size"].help == "first line, second line."
    assert table["left"].help == table["right"].help == "both sides."
    assert table["words"].help == ""
    assert table["right"].is_flag
    assert table["words"].repeats
    assert table["left"].default == 0.5
    assert table["bias"].parse("1:2.5") == {1: 2.5}
    assert table["size"].parse("None") is None
    with pytest.raises(ValueError, match="none"):
        table["left"].parse("none")


@pytest.mark.parametrize("options", [EngineConfig, SamplingParams])
def test_every_real_option_is_described(options: type) -> None:
    table = options_of(options)
    assert [option.name for option in table] == [field.name for field in fields(options)]
    assert [option.name for option in table if not option.help] == []


def test_readers() -> None:
    assert [parse_int(t) for t in ("7", " -3 ", "4k", "2M", "1g")] == [
        7,
        -3,
        4096,
        2 << 20,
        1 << 30,
    ]
    assert [parse_bool(t) for t in ("1", "Yes", "on", "0", "False")] == [True] * 3 + [False] * 2
    assert parse_ids("1,2") == (1, 2)
    assert parse_biases("7:-1.5,8:2") == {7: -1.5, 8: 2.0}


@pytest.mark.parametrize("text", ["", "4kk", "0x10", "1e3", "9" * 40, "1 2"])
def test_what_is_no_integer(text: str) -> None:
    with pytest.raises(ValueError, match=text[:5] or "^$"):
        parse_int(text)


def test_an_object_is_one_however_deep() -> None:
    assert parse_object('{"a": [1]}') == {"a": [1]}
    for text in ("[1]", "{", '{"a": ' + "[" * 100_000):
        with pytest.raises(ValueError):
            parse_object(text)


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
