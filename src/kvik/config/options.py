"""The fields of an options dataclass as a table: how each is written as text, and what it means.

Command-line flags and environment variables are both made from it, so an option is declared once.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvik.config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """One field.

    Attributes:
        name: of the field.
        parse: text -> value; raises ValueError.
        expects: what the text must be, to finish the sentence "must be ...".
        metavar: short placeholder of a value.
        default: of the field.
        help: its lines in the class docstring's "Attributes".
        is_flag: a bool.
        repeats: may be given several times; each text is one entry.
    """

    name: str
    parse: Callable[[str], object]
    expects: str
    metavar: str
    default: object
    help: str
    is_flag: bool = False
    repeats: bool = False


def options_of(cls: type) -> tuple[Option, ...]:
    """The options of a dataclass whose docstring describes its fields."""
    hints = get_type_hints(cls)
    notes = _attributes(inspect.getdoc(cls) or "")
    table = []
    for field in fields(cls):
        kind, optional = _without_none(hints[field.name])
        parse, expects, metavar, repeats = _READERS[kind]
        if optional:
            parse, expects = _or_none(parse), f"{expects} or none"
        default = None if field.default is MISSING else field.default
        table.append(
            Option(
                name=field.name,
                parse=parse,
                expects=expects,
                metavar=metavar,
                default=default,
                help=notes.get(field.name, ""),
                is_flag=kind is bool,
                repeats=repeats,
            )
        )
    return tuple(table)


def parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def parse_int(text: str) -> int:
    """An integer, with k, m or g for 2^10, 2^20, 2^30 (sizes are long to write in bytes)."""
    match = re.fullmatch(r"\s*([+-]?\d{1,30})\s*([kKmMgG]?)\s*", text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def parse_ids(text: str) -> tuple[int, ...]:
    """ "1,2,3" -> (1, 2, 3)."""
    return tuple(parse_int(part) for part in text.split(","))


def parse_biases(text: str) -> dict[int, float]:
    """ "12:-5,99:2.5" -> {12: -5.0, 99: 2.5}."""
    pairs = (part.partition(":") for part in text.split(","))
    return {parse_int(token): float(bias) for token, _, bias in pairs}


def parse_object(text: str) -> dict[str, object]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(text) from None
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


# Type of a field (None aside) -> reader, "must be ...", placeholder, one entry per use.
_READERS: Mapping[Any, tuple[Callable[[str], object], str, str, bool]] = {
    str: (str, "text", "TEXT", False),
    int: (parse_int, "an integer", "N", False),
    float: (float, "a number", "X", False),
    bool: (parse_bool, "true or false", "true|false", False),
    tuple[str, ...]: (str, "text", "TEXT", True),
    tuple[int, ...]: (parse_ids, "integers separated by commas", "N,N", False),
    tuple[str | tuple[int, ...], ...]: (str, "text", "TEXT", True),
    Mapping[str, object]: (parse_object, "a JSON object", "JSON", False),
    Mapping[int, float]: (parse_biases, "ID:BIAS pairs separated by commas", "ID:BIAS,..", False),
}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` -> X, True; X -> X, False."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    return next(kind for kind in get_args(hint) if kind is not type(None)), True


def _or_none(parse: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: None if text.strip().lower() == "none" else parse(text)


def _attributes(doc: str) -> dict[str, str]:
    """Field name -> description, from the "Attributes:" part of a docstring."""
    notes: dict[str, str] = {}
    names: list[str] = []
    for line in doc.partition("Attributes:")[2].splitlines():
        entry = re.fullmatch(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            notes |= dict.fromkeys(names, entry[2].strip())
        elif line.startswith(" " * 8):
            notes |= {name: f"{notes[name]} {line.strip()}" for name in names}
        elif line.strip():
            names = []
    return notes


TEXT = "text"  # what an option expects that takes any


def read_option_file(path: str, kinds: Sequence[type]) -> dict[type, dict[str, object]]:
    """The fields of each of the dataclasses that the file sets. The names of all are different.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or has an unknown key or a wrong value.
    """
    try:
        values = tomllib.loads(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise ConfigError("config", f"{path!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("config", f"{path!r} is not TOML: {error}") from None
    owners = {option.name: (kind, option) for kind in kinds for option in options_of(kind)}
    found: dict[type, dict[str, object]] = {kind: {} for kind in kinds}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in owners:
            known = ", ".join(owners)
            raise ConfigError("config", f"{path!r} has the unknown key {key!r} (known: {known})")
        kind, option = owners[name]
        if name in found[kind]:
            raise ConfigError("config", f"{path!r} sets {name} twice")
        found[kind][name] = _value(path, option, value)
    return found


def _value(path: str, option: Option, value: object) -> object:
    try:
        return _parse(option, value)
    except (ValueError, TypeError):
        message = f"{option.name} in {path!r} must be {option.expects}, not {str(value)[:60]!r}"
        # What stands there may be a key.
        secret = option.name == "api_key"
        hidden = f"{option.name} in {path!r} must be a list of texts"
        raise ConfigError("config", hidden if secret else message) from None


def _parse(option: Option, value: object) -> object:
    """As `Option.parse`, which reads text; what TOML knows the type of has to be of that type."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError
        return value
    if isinstance(value, list):
        if option.repeats:
            return tuple(_text(option, entry) for entry in value)
        if option.expects.startswith(TEXT):
            raise ValueError
        return option.parse(",".join(str(entry) for entry in value))
    if option.repeats:
        return (_text(option, value),)
    if isinstance(value, Mapping):
        return option.parse(json.dumps(value))
    if isinstance(value, str):
        return option.parse(value)
    if isinstance(value, bool) or option.expects.startswith(TEXT):
        raise ValueError
    return option.parse(str(value))


def _text(option: Option, value: object) -> object:
    if not isinstance(value, str):
        raise ValueError
    return option.parse(value)
