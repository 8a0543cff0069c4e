"""From how many tokens on torch's attention reads a fresh prompt faster than Triton's, by GPU.

It is measured once (`kvik calibrate`) and kept in a file, not found out at each start: answers
would depend on which of the two happened to be faster at that moment.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from kvik.config.env import cache_folder
from kvik.config.errors import ConfigError
from kvik.config.files import write_whole

PACKAGES = ("kvik", "torch", "triton")  # of other versions a measurement tells nothing

Thresholds = tuple[tuple[int, int], ...]
"""(head_dim, tokens), by head_dim; a head_dim for which torch's never is faster is missing."""


def prompt_attention_path() -> Path:
    """Where it is kept."""
    return cache_folder() / "prompt-attention.json"


def load(gpu: str, path: Path) -> Thresholds:
    """What was measured of GPUs of this name with the installed packages; () if nothing was, or
    what the file holds is nothing of the kind."""
    try:
        measured = json.loads(path.read_bytes())[gpu]
        if measured["versions"] != _versions():
            return ()
        pairs = sorted((int(dim), int(least)) for dim, least in measured["torch_from"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return ()
    except RecursionError:  # of thousands of brackets
        return ()
    return tuple((dim, least) for dim, least in pairs if dim > 0 and least > 0)


def save(gpu: str, found: Thresholds, path: Path) -> None:
    """What is kept of other GPUs stays.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        kept = {}
    every = kept if isinstance(kept, dict) else {}
    torch_from = {str(dim): least for dim, least in found}
    every[gpu] = {"versions": _versions(), "torch_from": torch_from}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(every, indent=2).encode() + b"\n")
    except OSError as error:
        raise ConfigError("calibration", f"cannot write {str(path)!r} ({error.strerror})") from None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from its sources
            found[name] = ""
    return found
