"""The files of an engine folder beside what its manifest says of them."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from kvik.config.engine_manifest import (
    MANIFEST,
    SEAL_BYTES,
    WEIGHTS,
    Built,
    FileFacts,
    Manifest,
    is_engine_folder,
    read_manifest,
    rebuild,
)
from kvik.config.errors import ModelError

CHUNK = 1 << 22  # bytes read at a time


def read_built(folder: Path) -> Built | None:
    """Of an engine folder, checked as far as is quick; None: it is none.

    Raises:
        ModelError: the folder is damaged, or not for this version or machine.
    """
    if not is_engine_folder(folder):
        return None
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return Built(
        manifest.kernels,
        manifest.packing,
        manifest.dtype,
        manifest.quantization,
        manifest.weight_bytes,
    )


def check_seal(folder: Path, found: bytes, manifest: Manifest) -> None:
    """
    Raises:
        ModelError: weights that begin with `found` are of another build.
    """
    if found.hex() != manifest.seal:
        raise ModelError(WEIGHTS, f"is not of the same build as {MANIFEST}. {rebuild(folder)}")


def check_files(folder: Path, manifest: Manifest) -> None:
    """Quickly: the size of each file, the seal of the weights, and the hashes of all others.

    Raises:
        ModelError: a file is missing, was cut or altered.
    """
    for name, facts in manifest.files.items():
        _check_size(folder, name, facts)
        if name == WEIGHTS:
            check_seal(folder, _begin(folder), manifest)
        else:
            _check_hash(folder, name, facts)


def verify(folder: Path) -> int:
    """Read every byte of an engine folder: how many they are.

    Raises:
        ModelError: something is not as it was built.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    _check_hash(folder, WEIGHTS, manifest.files[WEIGHTS])
    return sum(facts.size for facts in manifest.files.values())


def file_facts(path: Path) -> FileFacts:
    """
    Raises:
        OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(size, digest.hexdigest())


def _check_size(folder: Path, name: str, facts: FileFacts) -> None:
    try:
        found = (folder / name).stat()
    except OSError as error:
        raise ModelError(name, f"cannot be read ({error.strerror}). {rebuild(folder)}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(name, f"is no file. {rebuild(folder)}")
    if found.st_size != facts.size:
        raise ModelError(
            name, f"has {found.st_size} bytes, {facts.size} by {MANIFEST}. {rebuild(folder)}"
        )


def _check_hash(folder: Path, name: str, facts: FileFacts) -> None:
    try:
        found = file_facts(folder / name)
    except OSError as error:
        raise ModelError(name, f"cannot be read ({error.strerror}). {rebuild(folder)}") from None
    if found != facts:
        raise ModelError(name, f"was altered since it was built. {rebuild(folder)}")


def _begin(folder: Path) -> bytes:
    """What stands where the seal of the weights should."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            return file.read(SEAL_BYTES)
    except OSError as error:
        raise ModelError(WEIGHTS, f"cannot be read ({error.strerror}). {rebuild(folder)}") from None
