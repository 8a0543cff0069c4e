"""Options from outside the program: KVIK_ variables (KVIK_MAX_MODEL_LEN=4096 sets `max_model_len`)
and a TOML file.

No other module reads the environment. Other values from the system are read here too, such as a
random seed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvik.config.config import EngineConfig
from kvik.config.server_config import ServerConfig
from kvik.config.synonyms import synonym_options, translated
from kvik.errors import MAX_SHOWN, ConfigError
from kvik.options import Flag, Kind, Option, options_of, unknown

KINDS = (EngineConfig, ServerConfig)  # whose options all have different names
OWNERS = {one.name: (kind, one) for kind in KINDS for one in options_of(kind)}
OTHERS = {one.name: (EngineConfig, one) for one in synonym_options()}  # names of other engines
PREFIX = "KVIK_"
VARIABLES = {PREFIX + name.upper(): owner for name, owner in OWNERS.items()}
# Variables that Kubernetes sets in pods for services named kvik or kvik-NAME, such as
# KVIK_PORT=tcp://10.0.0.1:80.
SERVICE_LINK = re.compile(
    r"KVIK_(\w+_)?((SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_\w+)=.*|PORT=\w+://.*)", re.DOTALL
)


def environment_options(
    environ: Mapping[str, str] | None = None, kind: type = EngineConfig
) -> dict[str, Any]:
    """Return the fields of EngineConfig, or of ServerConfig, that KVIK_ variables set.

    Raises:
        ConfigError: a KVIK_ variable does not exist, or its text has the wrong type.
    """
    options: dict[str, Any] = {}
    for variable, text in (os.environ if environ is None else environ).items():
        if not variable.startswith(PREFIX) or SERVICE_LINK.fullmatch(f"{variable}={text}"):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if variable not in VARIABLES and name not in OTHERS:
            raise ConfigError(variable, unknown(variable, "variable of kvik", VARIABLES))
        owner, option = VARIABLES.get(variable) or OTHERS[name]
        if owner is not kind:
            continue
        try:
            options[option.name] = _parse(option, text)
        except ValueError:
            reason = f"must be {option.expects}, not {text[:60]!r}"
            if option.kind.repeats:  # no entry
                reason = "is set, but empty: unset it for the default"
            raise ConfigError(variable, reason) from None
    return translated(options) if kind is EngineConfig else options


def set_variable(name: str) -> str | None:
    """Return the variable of an option, if it is set; other names have none."""
    variable = PREFIX + name.upper()
    return variable if (name in OWNERS or name in OTHERS) and variable in os.environ else None


def client_key() -> str:
    """Return the API key that a command sends to a server: the first of KVIK_API_KEY, or "". Raises
    ConfigError as `environment_options`."""
    keys: tuple[str, ...] = environment_options(kind=ServerConfig).get("api_key", ("",))
    return keys[0]


def _parse(option: Option, text: str) -> object:
    if not option.kind.repeats:
        return option.parse(text)
    entries = tuple(option.parse(part.strip()) for part in text.split(",") if part.strip())
    if not entries:  # an empty KVIK_API_KEY must not open the server
        raise ValueError(text)
    return entries


def read_option_file(path: str) -> dict[type, dict[str, Any]]:
    """Read the options that a TOML file sets: `max_model_len = 4096`, or `max-model-len = 4096`,
    like the flag.

    Returns:
        The fields of EngineConfig and of ServerConfig.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an unknown key or a wrong value.
    """
    try:
        values = tomllib.loads(Path(path).expanduser().read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError("config", f"{path!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("config", f"{path!r} is not TOML: {error}") from None
    options: dict[type, dict[str, Any]] = {kind: {} for kind in KINDS}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in OWNERS and name not in OTHERS:
            text = unknown(name, "option", OWNERS)
            raise ConfigError("config", f"{path!r} has the unknown key {key!r}, which {text}")
        kind, owner = OWNERS.get(name) or OTHERS[name]
        if name in options[kind]:
            raise ConfigError("config", f"{path!r} sets {name} twice")
        try:
            options[kind][name] = _toml_value(owner, value)
        except (ValueError, TypeError):
            text = f"{name} in {path!r} must be {owner.expects}, not {str(value)[:MAX_SHOWN]!r}"
            if name == "api_key":  # the value may be a key
                text = f"{name} in {path!r} must be a list of texts"
            raise ConfigError("config", text) from None
    options[EngineConfig] = translated(options[EngineConfig])
    return options


def _toml_value(option: Option, value: object) -> object:
    """Return a TOML value in the form of the option; its TOML type must match the option's."""
    kind = option.kind
    if isinstance(kind, Flag):
        if not isinstance(value, bool):
            raise ValueError
        return value
    if kind.repeats:
        entries: list[Any] = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str) for entry in entries):
            raise ValueError
        return tuple(option.parse(entry) for entry in entries)
    if isinstance(value, str):
        return option.parse(value)
    if isinstance(value, bool) or kind.expects == Kind.expects:
        raise ValueError
    if isinstance(value, list):
        return option.parse(",".join(map(str, value)))
    return option.parse(json.dumps(value) if isinstance(value, Mapping) else str(value))


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[int, ...] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES lists, in its order; None if it has entries that
    are not numbers."""
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    numbers = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if part.startswith("-"):  # like CUDA: entries after an invalid number are ignored
            break
        if not part.isdecimal():
            return None
        numbers.append(int(part))
    return tuple(numbers)


def wants_colour() -> bool:
    """Return whether to print colours: not with NO_COLOR (no-color.org), nor on a dumb terminal."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def draw_seed() -> int:
    """Return a random seed for a start without one: unpredictable, and short enough to copy."""
    return secrets.randbits(32)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder: $XDG_CACHE_HOME/kvik or ~/.cache/kvik; for a user without a home, as
    in many containers, a private folder in the temporary directory.

    Raises:
        ConfigError: other users could write to that folder, so its contents cannot be trusted.
    """
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if os.path.isabs(base):
        return Path(base) / "kvik"
    try:
        return Path.home() / ".cache" / "kvik"
    except RuntimeError:
        return _private_folder(Path(tempfile.gettempdir()) / f"kvik-{os.getuid()}")


def _private_folder(folder: Path) -> Path:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()  # lstat: a link could redirect our writes
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    if not private or status.st_uid != os.getuid():
        raise ConfigError(
            "XDG_CACHE_HOME",
            f"must be set: you have no home folder, and others may write to {folder}",
        )
    return folder
