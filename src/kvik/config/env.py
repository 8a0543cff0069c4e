"""The only place that reads the environment. KVIK_MAX_MODEL_LEN=4096 sets `max_model_len`.

What else the system alone knows is read here too: a seed nobody can foresee.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvik.config.config import EngineConfig
from kvik.config.server_config import ServerConfig
from kvik.errors import ConfigError
from kvik.options import Option, options_of, unknown

PREFIX = "KVIK_"
# What Kubernetes sets in every pod beside a service that is called kvik: KVIK_PORT=tcp://10.0.0.1:80
# and more of the kind.
SERVICE_LINK = re.compile(r"KVIK_(SERVICE|PORT_\d+)_\w+=.*|KVIK_PORT=\w+://.*", re.DOTALL)


def environment_options(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """Fields of EngineConfig that KVIK_ variables set.

    Raises:
        ConfigError: a KVIK_ variable that does not exist, or text of the wrong type.
    """
    return _options(EngineConfig, environ)


def server_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Fields of ServerConfig that KVIK_ variables set; raises as `environment_options` does."""
    return _options(ServerConfig, environ)


def client_key(environ: Mapping[str, str] | None = None) -> str:
    """The API key that a command sends to a server: the first of KVIK_API_KEY, or "".

    Raises:
        ConfigError: as `environment_options`.
    """
    keys: tuple[str, ...] = server_environment(environ).get("api_key", ("",))
    return keys[0]


def _options(kind: type, environ: Mapping[str, str] | None) -> dict[str, Any]:
    kinds: tuple[type, ...] = (EngineConfig, ServerConfig)
    tables = {cls: _variables(cls) for cls in kinds}
    options: dict[str, Any] = {}
    for variable, text in (os.environ if environ is None else environ).items():
        if not variable.startswith(PREFIX) or SERVICE_LINK.fullmatch(f"{variable}={text}"):
            continue
        if not any(variable in table for table in tables.values()):
            known = [name for table in tables.values() for name in table]
            raise ConfigError(variable, unknown(variable, "variable of kvik", known))
        option = tables[kind].get(variable)
        if option is None:
            continue  # of the other kind
        try:
            options[option.name] = _parse(option, text)
        except ValueError:
            raise ConfigError(variable, f"must be {option.expects}, not {text[:60]!r}") from None
    return options


def _variables(kind: type) -> dict[str, Option]:
    return {PREFIX + option.name.upper(): option for option in options_of(kind)}


def _parse(option: Option, text: str) -> object:
    if not option.kind.repeats:
        return option.parse(text)
    entries = tuple(option.parse(part.strip()) for part in text.split(",") if part.strip())
    if not entries:  # whose key did not come where it should is not served without one
        raise ValueError(text)
    return entries


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[int, ...] | None:
    """Devices that CUDA_VISIBLE_DEVICES leaves, in its order; None if it says nothing by number."""
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    numbers = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if part.startswith("-"):  # as CUDA reads it: nothing after an invalid number counts
            break
        if not part.isdecimal():
            return None
        numbers.append(int(part))
    return tuple(numbers)


def draw_seed() -> int:
    """A seed for a start that was given none: other than the last, and short enough to copy."""
    return secrets.randbits(32)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where kvik keeps what it can make again: $XDG_CACHE_HOME/kvik or ~/.cache/kvik; for a user
    without a home, as in many containers, a folder of its own among the temporary files.

    Raises:
        ConfigError: somebody else could write to that folder, so what it holds cannot be trusted.
    """
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    # the specification ignores a relative path
    if os.path.isabs(base):
        return Path(base) / "kvik"
    try:
        return Path.home() / ".cache" / "kvik"
    except RuntimeError:
        return _private_folder(Path(tempfile.gettempdir()) / f"kvik-{os.getuid()}")


def _private_folder(folder: Path) -> Path:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # a link is somebody's way to have us write elsewhere
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    if not private or found.st_uid != os.getuid():
        raise ConfigError(
            "XDG_CACHE_HOME",
            f"must be set: you have no home folder, and {folder} is not yours alone to write to",
        )
    return folder
