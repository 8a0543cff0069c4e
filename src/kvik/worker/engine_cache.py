"""The cache of engine folders (`engine_cache`): weights are loaded once, stored with their layout
in memory, and mapped at the next start.

An entry is a folder with weights.bin and engine.json, as `kvik build` makes them, and source.json,
which names what it was made from. Its name contains the hash of that. An entry that cannot be used
is made again; a folder that cannot be written only makes the next start slow. Both only warn.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvik.config.config import ResolvedConfig, RunnerConfig
from kvik.config.hardware import detect
from kvik.config.model_source import model_name
from kvik.errors import START_LOG, ModelError
from kvik.files import ADAPTER_FILES, gguf_parts, writing_whole_folder
from kvik.kernels.packing import Packing
from kvik.models.model_spec import ModelSpec
from kvik.nn.engine_folder import MappedStorage, Written, write_weights
from kvik.nn.parts import FreshStorage
from kvik.spec.engine_folder import (
    FORMAT,
    MANIFEST,
    WEIGHTS,
    Manifest,
    check_files,
    file_facts,
    is_engine_folder,
    read_manifest,
)
from kvik.version import __version__

SOURCE = "source.json"
ENDS = 1 << 20  # bytes hashed at the beginning and at the end of a file of weights
DESCRIPTION = ("config.json", "model.safetensors.index.json")  # small, so hashed whole

log = logging.getLogger(START_LOG)


class EngineCache:
    """The entry of one model, loaded with certain options."""

    def __init__(self, folder: Path, source: dict[str, object]) -> None:
        self._folder = folder
        self._source = source

    def stored(self, packing: Packing) -> MappedStorage | None:
        """Return the weights of the entry; None: it does not exist or cannot be used."""
        if not self._folder.exists():
            return None
        try:
            if not is_engine_folder(self._folder):
                raise ModelError(MANIFEST, "is missing")
            check_files(self._folder, read_manifest(self._folder))
            if json.loads((self._folder / SOURCE).read_bytes()) != self._source:
                raise ModelError(SOURCE, "names other files or options")
            return MappedStorage(self._folder, packing)
        except ModelError as error:
            self.is_bad(str(error))
        except (OSError, ValueError) as error:
            self.is_bad(f"{SOURCE}: {error}")
        return None

    def is_bad(self, reason: str) -> None:
        """Warn that the entry cannot be used and is made again."""
        reason = reason.partition(". Build it again")[0]
        log.warning("engine_cache: %s cannot be used and is made again (%s)", self._folder, reason)

    def keep(
        self, runner: RunnerConfig, quantization: str, storage: FreshStorage, packing: Packing
    ) -> None:
        """Write the loaded weights as the entry, replacing an existing one."""
        try:
            with writing_whole_folder(self._folder) as draft:
                with (draft / WEIGHTS).open("wb") as file:
                    written = write_weights(file, storage, packing, lambda size: None)
                (draft / SOURCE).write_text(json.dumps(self._source, indent=1))
                manifest = manifest_of(runner, quantization, packing, written)
                facts = {**manifest.files, SOURCE: file_facts(draft / SOURCE)}
                manifest = replace(manifest, files=facts)
                (draft / MANIFEST).write_text(json.dumps(manifest.as_json(), indent=1))
        except OSError as error:
            reason = error.strerror or error
            message = "engine_cache: %s cannot be written (%s); the engine continues without it"
            log.warning(message, self._folder, reason)
        else:
            log.info("kept in %s for the next start", self._folder)


def manifest_of(
    runner: RunnerConfig, quantization: str, packing: Packing, written: Written
) -> Manifest:
    """Return the manifest of weights that were loaded with these options and written here. Its only
    file is that of the weights."""
    return Manifest(
        kvik=__version__,
        kernels=runner.kernels,
        packing=packing.name,
        instruction_set=detect().native_isa,
        byte_order=sys.byteorder,
        dtype=runner.dtype,
        quantization=quantization,
        seal=written.seal,
        files={WEIGHTS: written.facts},
        tensors=written.tensors,
    )


def cache_of(
    runner: RunnerConfig, path: Path, spec: ModelSpec, quantization: str, packing: Packing
) -> EngineCache | None:
    """Return the cache entry of a model; None: there is no cache.

    Args:
        path: the model's folder or GGUF file.
        spec, quantization: of this model, which may be a draft model.

    Raises:
        ModelError: a file of the model cannot be read.
    """
    if runner.engine_cache is None:
        return None
    source: dict[str, object] = {
        "format": FORMAT,
        "kvik": __version__,
        "torch": torch.__version__,
        "kernels": runner.kernels,
        "packing": packing.name,
        "byte_order": sys.byteorder,
        "dtype": runner.dtype,
        "quantization": quantization,
        "files": _fingerprints(path, runner.lora, modules_of(spec)),
        "adapters": sorted(runner.adapter_ranks),  # their activations are not fused
    }
    key = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:16]
    name = model_name(path).replace("/", "--")
    return EngineCache(Path(runner.engine_cache).expanduser() / f"{name}-{key}", source)


def fingerprints(config: ResolvedConfig) -> str:
    """Return a digest of the files that are loaded, the same for copies of them; "": weights are
    random.

    Raises:
        ModelError: a file of the model cannot be read.
    """
    runner = config.runner
    if runner.load_format != "safetensors":
        return ""
    return digest_of(Path(runner.model_path), runner.lora, modules_of(config.model))


def digest_of(path: Path, lora: str | None = None, modules: Sequence[str] = ()) -> str:
    """Return a digest of the files of a model or head, and of an adapter.

    Args:
        modules: see `modules_of`.

    Raises:
        ModelError: a file cannot be read.
    """
    by_file = _fingerprints(path, lora, modules)
    for facts in by_file.values():
        del facts["changed_ns"]
    return hashlib.sha256(json.dumps(by_file, sort_keys=True).encode()).hexdigest()


def modules_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the folders of modules with separate weights."""
    return () if spec.pooling is None else spec.pooling.modules


def _fingerprints(
    path: Path, lora: str | None, modules: Sequence[str]
) -> dict[str, dict[str, object]]:
    """Return the fingerprints of the files of a model and of its adapter, by name."""
    by_file = {file.name: _fingerprint(file) for file in _files(path)}
    for module in modules:
        by_file |= {f"{module}/{file.name}": _fingerprint(file) for file in _files(path / module)}
    adapter = () if lora is None else (Path(lora) / name for name in ADAPTER_FILES)
    return by_file | {f"lora/{file.name}": _fingerprint(file) for file in adapter}


def _files(path: Path) -> Iterator[Path]:
    """Yield the files that determine what is loaded."""
    if path.is_file():
        yield from (part for part in gguf_parts(path) if part.is_file())
        return
    yield from (path / name for name in DESCRIPTION if (path / name).is_file())
    yield from sorted(file for file in path.glob("*.safetensors") if file.is_file())


def _fingerprint(path: Path) -> dict[str, object]:
    """Return size, time of the last change, and the hash of both ends; reading everything would
    take as long as loading.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        status = path.stat()
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(ENDS))
            file.seek(max(ENDS, status.st_size - ENDS))
            digest.update(file.read(ENDS))
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None
    return {"size": status.st_size, "changed_ns": status.st_mtime_ns, "sha256": digest.hexdigest()}
