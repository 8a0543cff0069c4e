"""Declarations of options, from which flags and environment variables are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from kvik.config.config import EngineConfig
from kvik.config.server_config import ServerConfig
from kvik.config.speculative import SpeculativeConfig
from kvik.core.sampling_params import SamplingParams
from kvik.errors import ConfigError
from kvik.options import (
    Flag,
    Integer,
    Integers,
    JsonObject,
    Number,
    OneOf,
    Text,
    TextList,
    normalised,
    option,
    options_of,
    unknown,
)


@dataclass
class Example:
    """Example options."""

    size: int | None = option(None, Integer(1, 9), "bytes.", {"unit": "B"})
    left: float = option(0.5, Number(0, 1, above=True), "one side.")
    right: bool = option(True, Flag(), "the other side.")
    word: str = option("a", OneOf(("a", "b"), {"c": "b"}, {"d": "must not be d"}), "a letter.")
    words: tuple[str, ...] = option((), TextList(Text("lower case", "[a-z]+")), "several.")
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
def test_an_invalid_value_names_what_is_allowed(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        normalised(replace(Example(), **{name: value}), ConfigError)
    assert (error.value.field, error.value.message) == (name, message)


def test_values_are_normalised() -> None:
    assert normalised(Example(), ConfigError) == {}
    assert normalised(Example(word="c"), ConfigError) == {"word": "b"}


def test_an_unknown_name_suggests_the_nearest() -> None:
    assert unknown("topp", "option", ["top_k", "top_p"]) == (
        "is not an option (did you mean top_p?)"
    )
    assert unknown("colour", "option", ["top_k"]) == "is not an option (known: top_k)"
