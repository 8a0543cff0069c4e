"""Options from a TOML file: `max_model_len = 4096`, or `max-model-len = 4096`, as the flags are."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvik.config.errors import ConfigError
from kvik.config.options import Option, options_of

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
