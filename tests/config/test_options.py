"""The table of options that flags and variables are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import pytest

from kvik.config.config import EngineConfig
from kvik.config.options import (
    options_of,
    parse_biases,
    parse_bool,
    parse_ids,
    parse_int,
    parse_object,
)
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
