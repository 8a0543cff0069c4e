"""Chooses the engines of a comparison: from a TOML file, or those that this Python can import.

An example of the file, with paths of the user's machine:

    threads = 2                         # optional

    [engines.openvino-int8]
    adapter = "openvino"                # a name below, or the path of an adapter of your own
    format = "int8"                     # what weights are read as; ratios are within a format.
                                        # fp32, bf16 and fp16 set the dtype of every engine whose
                                        # model file does not, as llama.cpp's does
    python = "/envs/openvino/bin/python"    # left out: the one that runs kvik
    model = "/models/{model}/int8"      # {model}: its name; default: {folder}, where MODEL is
    options = { }                       # for the adapter, whose file says what it takes
    env = { NAME = "value" }            # for the process
    together = false                    # true: one process a round for all workloads, not one
                                        # each; for an engine that takes a minute to start
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from kvik.errors import ConfigError

FOLDER = Path(__file__).parent / "engines"
OWN = "kvik"  # the adapter that others are compared with
NO_FORMATS: Mapping[str, Mapping[str, Any]] = {}
DTYPES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
}
PLAIN = "{folder}"  # the model as it was given, not converted


@dataclass(frozen=True, slots=True)
class Adapter:
    """An engine that can be run."""

    module: str  # that its Python must have; "": it is a program
    # Format -> options; empty: its model file decides.
    formats: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: NO_FORMATS)
    needs: str = ""  # the kind of model it needs instead of a plain folder
    any_format: bool = False  # its options can select other formats


ADAPTERS: Mapping[str, Adapter] = {
    OWN: Adapter(
        "kvik",
        {
            **DTYPES,
            "int8": {"dtype": "bfloat16", "quantization": "int8"},
            "int4": {"dtype": "bfloat16", "quantization": "int4"},
        },
        any_format=True,
    ),
    "transformers": Adapter("transformers", DTYPES),
    "transformers-batching": Adapter("transformers", DTYPES),
    "vllm": Adapter("vllm", DTYPES, any_format=True),
    "openvino": Adapter(
        "openvino_genai",
        {
            form: {"properties": {"INFERENCE_PRECISION_HINT": hint}}
            for form, hint in (("fp32", "f32"), ("bf16", "bf16"), ("fp16", "f16"))
        },
        needs="a folder that optimum-cli made",
    ),
    "llama.cpp": Adapter("llama_cpp", needs="a GGUF file"),
    "llama.cpp-bench": Adapter("", needs="a GGUF file and the path of llama-batched-bench"),
}


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine in one format; see the module's docstring."""

    adapter: str
    format: str
    python: str = sys.executable
    model: str = PLAIN
    options: dict[str, Any] = {}
    env: dict[str, str] = {}
    together: bool = False

    @property
    def script(self) -> Path:
        if self.adapter not in ADAPTERS:
            return Path(self.adapter)
        return FOLDER / (re.sub(r"[.-]", "_", self.adapter) + ".py")

    def model_path(self, folder: Path, name: str) -> str:
        return self.model.replace("{model}", name).replace(PLAIN, str(folder))


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines to run."""

    entries: Mapping[str, EngineEntry]
    # Requested engine that cannot be run -> the reason.
    absent: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()  # adapters that were not requested and cannot be run
    threads: int | None = None  # from the file


def installed_engines(
    requested: Sequence[str], formats: Sequence[str], modules: Iterable[str] | None = None
) -> Engines:
    """Return kvik and the engines that this Python can import, with a plain model folder, in each
    format.

    Args:
        requested: names of adapters; none: all that can be run.
        modules: modules that can be imported; None: determined here.

    Raises:
        ConfigError: an adapter or format is unknown.
    """
    _check("engines", requested, ADAPTERS)
    _check("format", formats, ADAPTERS[OWN].formats)
    if modules is None:
        modules = [a.module for a in ADAPTERS.values() if a.module and find_spec(a.module)]
    present = {*modules}
    names = dict.fromkeys([OWN, *(requested or ADAPTERS)])
    entries: dict[str, EngineEntry] = {}
    absent: dict[str, str] = {}
    left_out: list[str] = []
    for form in formats:
        for name in names:
            adapter = ADAPTERS[name]
            if adapter.needs:
                reason = f"needs {adapter.needs} (--config)"
            elif adapter.module not in present:
                reason = "is not installed here (--config names other Pythons)"
            elif form not in adapter.formats:
                reason = f"cannot read a plain folder as {form} (--config names converted models)"
            else:
                options = dict(adapter.formats[form])
                entries[f"{name}-{form}"] = EngineEntry(adapter=name, format=form, options=options)
                continue
            if name in requested:
                absent[f"{name}-{form}"] = reason
            elif name not in left_out:
                left_out.append(name)
    return Engines(entries, absent, left_out)


def engines_of_file(path: Path, requested: Sequence[str], formats: Sequence[str]) -> Engines:
    """Return the engines of a file; kvik is added to every format in which the file has none.

    Args:
        requested: names of entries or adapters; empty: all.
        formats: formats of the entries; empty: all.

    Raises:
        ConfigError: the file or a field in it is invalid, or it has no wanted engine.
    """
    entries, threads = _read(path)
    _check("engines", requested, [OWN, *entries, *(entry.adapter for entry in entries.values())])
    _check("format", formats, {entry.format: None for entry in entries.values()})
    chosen = {
        name: entry
        for name, entry in entries.items()
        if not formats or entry.format in formats
        if not requested or name in requested or entry.adapter in requested
    }
    kvik_formats = {entry.format for entry in chosen.values()}  # formats in which kvik is needed
    chosen = {
        name: entry
        for name, entry in entries.items()
        if name in chosen or (entry.adapter == OWN and entry.format in kvik_formats)
    }
    added = {}
    for form in dict.fromkeys(entry.format for entry in chosen.values()):
        if any(e.adapter == OWN for e in chosen.values() if e.format == form):
            continue
        if form not in ADAPTERS[OWN].formats:
            raise ConfigError("config", f"needs an entry of kvik for format {form!r}")
        options = dict(ADAPTERS[OWN].formats[form])
        added[f"{OWN}-{form}"] = EngineEntry(adapter=OWN, format=form, options=options)
    return Engines({**added, **chosen}, threads=threads)


def _read(path: Path) -> tuple[dict[str, EngineEntry], int | None]:
    try:
        config = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError("config", f"{path} cannot be read ({reason})") from None
    _check("config", config, ("threads", "engines"))
    threads, tables = config.get("threads"), config.get("engines")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ConfigError("threads", f"must be a number from 1 on, not {threads!r}")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError("engines", "must be at least one table, [engines.NAME]")
    return {name: _entry(name, table, path.parent) for name, table in tables.items()}, threads


def _entry(name: str, table: object, folder: Path) -> EngineEntry:
    try:
        entry = msgspec.convert(table, EngineEntry)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise ConfigError(f"engines.{name}{where.rstrip('`')}", message) from None
    if entry.adapter in ADAPTERS:
        options = _options_in(entry, f"engines.{name}")
        return msgspec.structs.replace(entry, options=options)
    script = folder / entry.adapter
    if script.suffix != ".py" or not script.is_file():
        names = ", ".join(ADAPTERS)
        raise ConfigError(
            f"engines.{name}.adapter",
            f"must be one of {names}, or a Python file, not {entry.adapter[:60]!r}",
        )
    return msgspec.structs.replace(entry, adapter=str(script.resolve()))


def _options_in(entry: EngineEntry, where: str) -> dict[str, Any]:
    """Return the options of an entry with the options implied by its format.

    Raises:
        ConfigError: the engine does not support the format, or the options give another dtype.
    """
    adapter, form = ADAPTERS[entry.adapter], entry.format
    if form in DTYPES:
        implied = adapter.formats.get(form, {})
        _check_same(implied, entry.options, form, f"{where}.options")
        return _merged(implied, entry.options)
    if entry.model != PLAIN or not adapter.formats:  # as its model is stored
        return entry.options
    if form in adapter.formats:
        return _merged(adapter.formats[form], entry.options)
    if entry.options and adapter.any_format:
        return entry.options
    names = ", ".join(adapter.formats)
    raise ConfigError(
        f"{where}.format",
        f"must be of {names} for {entry.adapter} with a plain folder, or name a converted model "
        f"(model = ...), not {form[:60]!r}",
    )


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables recursively; `above` takes precedence."""
    made = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            made[key] = _merged(below[key], above[key])
    return made


def _check_same(
    implied: Mapping[str, Any], options: Mapping[str, Any], form: str, where: str
) -> None:
    """Raise ConfigError if an option contradicts the format."""
    for key in implied.keys() & options.keys():
        expected, value = implied[key], options[key]
        if isinstance(expected, Mapping) and isinstance(value, Mapping):
            _check_same(expected, value, form, f"{where}.{key}")
        elif value not in (expected, form):
            raise ConfigError(
                f"{where}.{key}",
                f"must be {expected!r} or left out in format {form}, not {value!r}",
            )


def _check(name: str, values: Iterable[str], allowed_names: Iterable[str]) -> None:
    unknown = [word for word in values if word not in [*allowed_names]]
    if unknown:
        names = ", ".join(dict.fromkeys(allowed_names))
        raise ConfigError(name, f"must be of {names}, not {unknown[0][:60]!r}")
