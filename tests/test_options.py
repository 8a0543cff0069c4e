"""The table of options that flags and variables are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvik.config.config import EngineConfig
from kvik.config.server_config import ServerConfig
from kvik.config.speculative import SpeculativeConfig
from kvik.core.sampling_params import SamplingParams
from kvik.errors import ConfigError
from kvik.options import (
    Choice,
    Flag,
    Integer,
    Integers,
    JsonObject,
    Number,
    Text,
    Texts,
    normalised,
    option,
    options_of,
    read_option_file,
    unknown,
)


@dataclass
class Example:
    """Some options."""

    size: int | None = option(None, Integer(1, 9), "bytes.", {"unit": "B"})
    left: float = option(0.5, Number(0, 1, above=True), "one side.")
    right: bool = option(True, Flag(), "the other side.")
    word: str = option("a", Choice(("a", "b"), {"c": "b"}, {"d": "must not be d"}), "a letter.")
    words: tuple[str, ...] = option((), Texts(Text("lower case", "[a-z]+")), "several.")
    places: tuple[int, ...] = option((), Integers(Integer(0, 3), "places"), "several.")
    rest: Mapping[str, object] | None = option(None, JsonObject("{}"), "what else.")


TABLE = {one.name: one for one in options_of(Example)}


def test_a_declaration_is_a_row() -> None:
    assert list(TABLE) == [field.name for field in fields(Example)]
    assert TABLE["size"].help == "bytes." and TABLE["size"].facts == {"unit": "B"}
    assert TABLE["left"].default == 0.5
    assert TABLE["size"].optional and not TABLE["left"].optional
    assert TABLE["size"].parse("None") is None
    assert TABLE["size"].expects == "an integer or none"
    with pytest.raises(ValueError, match="none"):
        TABLE["left"].parse("none")


@pytest.mark.parametrize("options", [EngineConfig, ServerConfig, SpeculativeConfig, SamplingParams])
def test_every_real_option_is_declared_and_its_default_allowed(options: type) -> None:
    table = options_of(options)
    assert [one.name for one in table] == [field.name for field in fields(options)]
    assert [one.name for one in table if not one.help] == []
    assert [one.name for one in table if one.checked(one.default) != one.default] == []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("size", t, v) for t, v in (("7", 7), (" -3 ", -3), ("4k", 4096), ("2M", 2 << 20))),
        ("size", "1g", 1 << 30),
        ("left", "1e3", 1000.0),
        *(("right", text, True) for text in ("1", "Yes", "on")),
        *(("right", text, False) for text in ("0", "False")),
        ("places", "1,2", (1, 2)),
        ("rest", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_values_are_read_from_text(name: str, text: str, value: object) -> None:
    assert TABLE[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("size", text) for text in ("", "4kk", "0x10", "1e3", "9" * 40, "1 2")),
        *(("right", text) for text in ("", "2", "maybe")),
        *(("rest", text) for text in ("[1]", "{", '{"a": ' + "[" * 100_000)),
        ("places", "1,,2"),
    ],
)
def test_text_of_another_type_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError):
        TABLE[name].parse(text)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", 10, "must be an integer in [1, 9], not 10"),
        ("size", True, "must be an integer in [1, 9], not True"),
        ("left", 0, "must be a number in (0, 1], not 0"),
        ("left", None, "must be a number in (0, 1], not None"),
        ("right", 1, "must be true or false, not 1"),
        ("word", "e", "must be one of a, b, c, not 'e'"),
        ("word", "d", "must not be d"),
        ("word", ["a"], "must be one of a, b, c, not ['a']"),
        ("words", ("a", "B"), "must be lower case, not 'B'"),
        ("words", "ab", "must be a tuple of strings, not 'ab'"),
        ("places", (0, 4), "must be an integer in [0, 3], not 4"),
        ("places", [0], "must be a tuple of places, not [0]"),
        ("rest", 3, "must be an object such as {}, not 3"),
        ("word", "x" * 1000, "must be one of a, b, c, not '" + "x" * 56 + "..."),
    ],
)
def test_a_value_that_is_not_allowed_says_what_is(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        normalised(replace(Example(), **{name: value}), ConfigError)
    assert (error.value.field, error.value.message) == (name, message)


def test_values_are_normalised() -> None:
    assert normalised(Example(), ConfigError) == {}
    assert normalised(Example(word="c"), ConfigError) == {"word": "b"}


def test_an_unknown_name_comes_with_the_nearest() -> None:
    assert unknown("topp", "option", ["top_k", "top_p"]) == (
        "is no option (did you mean top_p? known: top_k, top_p)"
    )
    assert unknown("colour", "option", ["top_k"]) == "is no option (known: top_k)"


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
        ("prot = 80", "unknown key 'prot', which is no option (did you mean port? known: model, "),
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
