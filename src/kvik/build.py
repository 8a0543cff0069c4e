"""Builds an engine folder from a model, completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvik.config.config import EngineConfig
from kvik.config.model_source import DESCRIPTION, MODULE
from kvik.config.speculative import MTP
from kvik.errors import ConfigError, shown
from kvik.files import can_write, writing_whole_folder
from kvik.launch import build_weights, resolve_config
from kvik.model_files import model_files
from kvik.spec.engine_folder import (
    MANIFEST,
    WEIGHTS,
    FileFacts,
    Manifest,
    file_facts,
    is_engine_folder,
)


def build_engine(
    config: EngineConfig, output: Path, advance: Callable[[int, int], None]
) -> tuple[Path, Manifest]:
    """Write the engine folder of a model; return its path and its manifest.

    Args:
        output: a folder that does not exist yet, is empty, or is an engine folder to replace.
        advance: called with the number of bytes of each piece that was written, and the total.

    Raises:
        KvikError: the model, an option or the output cannot be used; nothing was written.
    """
    check_output(output)
    resolved = resolve_config(config)
    if resolved.model.fallback is not None:
        raise ConfigError("fallback", "must be none: transformers has its own form of weights")
    if resolved.model.built is not None:
        raise ConfigError("model", "is an engine folder already; name the model it was built from")
    if config.load_format != "safetensors":
        raise ConfigError("load_format", "must be safetensors: random weights are not stored")
    if resolved.speculation is not None and resolved.speculation.method != MTP:
        reason = f"must be {MTP} or left out: only the model's own head is in its engine folder"
        raise ConfigError("spec_method", reason)
    files = model_files(Path(resolved.runner.model_path)).descriptions()

    try:
        with writing_whole_folder(output) as folder:
            facts: dict[str, FileFacts] = {}
            for name, data in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(data)
                facts[name] = file_facts(folder / name)
            with (folder / WEIGHTS).open("wb") as file:
                manifest = build_weights(resolved, file, advance)
            manifest = replace(manifest, files={**facts, **manifest.files})
            (folder / MANIFEST).write_text(json.dumps(manifest.as_json(), indent=1))
            check_output(output)  # again: loading takes a while, and the folder is replaced now
    except OSError as error:
        raise ConfigError("output", f"cannot be written ({error.strerror})") from None
    return output.resolve(), manifest


def check_output(output: Path) -> None:
    """Check that an engine folder may be written there.

    Raises:
        ConfigError: it is a file, cannot be written, or is a folder with files that do not belong
            to an engine folder.
    """
    if not output.exists():
        if not can_write(output / MANIFEST, parents=True):
            raise ConfigError("output", f"{str(output)!r} must be a folder to write to")
        return
    if not output.is_dir():
        raise ConfigError("output", f"must be a folder; {str(output)!r} is a file")
    is_engine = is_engine_folder(output)
    other = [path.name for path in output.iterdir() if not (is_engine and _is_of_engine(path))]
    if other:
        raise ConfigError(
            "output",
            f"must be new, empty or an engine folder; {str(output)!r} holds {shown(min(other))}",
        )


def _is_of_engine(path: Path) -> bool:
    """Return whether a path inside an engine folder belongs to it, and may be deleted with it."""
    if path.is_dir():
        return all(inner.match(MODULE) for inner in path.iterdir())
    described = any(path.match(pattern) for pattern in DESCRIPTION)
    return path.is_file() and (described or path.name == WEIGHTS)
