"""Writes the weights of an engine folder in their layout in memory, and maps them."""

from __future__ import annotations

import hashlib
import mmap
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.kernels.packing import Packing
from kvik.kernels.weights import Matrix, MatrixSpec
from kvik.nn.parts import FreshStorage
from kvik.spec.engine_folder import (
    ALIGNMENT,
    HEAD_BYTES,
    ITEM_BYTES,
    MANIFEST,
    SEAL_BYTES,
    WEIGHTS,
    Entry,
    FileFacts,
    Manifest,
    Place,
    check_seal,
    read_manifest,
    rebuild,
)
from kvik.spec.weight_kind import WeightKind

TENSOR = "tensor"  # the only part of a weight that is not a matrix
PIECE = 8 << 20  # bytes written at a time


class MappedStorage:
    """The mapped weights of a folder: nothing is copied, and processes that use the same folder
    share the pages. If the file is truncated while it is mapped, the process crashes; `kvik build`
    replaces files and never writes into them."""

    def __init__(self, folder: Path, packing: Packing) -> None:
        """
        Raises:
            ModelError: the folder is damaged, or was built for other kernels.
        """
        self._folder = folder
        self._packing = packing
        manifest = read_manifest(folder)
        if manifest.packing != packing.name:
            raise ModelError(
                MANIFEST,
                f"its weights are packed as {shown(manifest.packing)}, and the kernels here take "
                f"{packing.name!r}. {rebuild(folder)}",
            )
        self._entries = manifest.tensors
        self._bytes = _mapped(folder, manifest)

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def matrix(self, name: str, spec: MatrixSpec) -> Matrix:
        """Return a matrix, of the kind that the folder was built with."""
        entry = self._entry(name)
        kind = WeightKind.named(entry.kind)
        if kind is None:
            raise self._damaged(name, f"is of an unknown kind, {shown(entry.kind)}")
        spec = replace(spec, kind=kind)
        try:
            like = {
                part: (tuple(t.shape), _NAMES[t.dtype])
                for part, t in self._packing.layout(spec).items()
            }
            layout = {part: (place.shape, place.dtype) for part, place in entry.parts.items()}
            if layout != like:
                raise ValueError(f"does not have the parts of its kind ({entry.kind}) and size")
            parts = {part: self._view(place) for part, place in entry.parts.items()}
            return self._packing.over(spec, parts)
        except ValueError as error:
            raise self._damaged(name, str(error)) from None

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        place = self._entry(name).parts.get(TENSOR)
        if place is None or place.shape != shape or _DTYPES[place.dtype] != dtype:
            raise self._damaged(name, f"must be {_NAMES[dtype]} {list(shape)}")
        return self._view(place).to(device)

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise self._damaged(name, "is missing")
        return entry

    def _view(self, place: Place) -> Tensor:
        data = self._bytes[place.offset : place.offset + place.size]
        return data.view(_DTYPES[place.dtype]).view(place.shape)

    def _damaged(self, name: str, reason: str) -> ModelError:
        return ModelError(MANIFEST, f"tensor {shown(name)} {reason}. {rebuild(self._folder)}")


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: the seal, the size and hash of the file, and the places of the tensors."""

    seal: str
    facts: FileFacts
    tensors: dict[str, Entry]


def write_weights(
    file: BinaryIO, storage: FreshStorage, packing: Packing, advance: Callable[[int], None]
) -> Written:
    """Write all weights of `storage`.

    Args:
        advance: called with the number of bytes of each piece that was written.

    Raises:
        OSError: they cannot be written.
    """
    seal = secrets.token_bytes(SEAL_BYTES)
    out = _Hashed(file, advance)
    out.write(seal)
    entries: dict[str, Entry] = {}
    for name, kind, parts in _all(storage, packing):
        places = {}
        for part, tensor in parts.items():
            out.pad(HEAD_BYTES if out.size < HEAD_BYTES else ALIGNMENT)
            places[part] = Place(out.size, _NAMES[tensor.dtype], tuple(tensor.shape))
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            for start in range(0, len(data), PIECE):
                out.write(data[start : start + PIECE].data)
        entries[name] = Entry(kind, places)
    out.pad(ALIGNMENT)
    return Written(seal.hex(), FileFacts(out.size, out.digest.hexdigest()), entries)


def stored_bytes(storage: FreshStorage, packing: Packing) -> int:
    """Return about the number of bytes that `write_weights` will write, without padding."""
    return sum(part.nbytes for *_, parts in _all(storage, packing) for part in parts.values())


def _all(storage: FreshStorage, packing: Packing) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    for name, matrix in storage.matrices.items():
        yield name, matrix.spec.kind.name, dict(packing.parts(matrix))
    for name, tensor in storage.tensors.items():
        yield name, "", {TENSOR: tensor}


class _Hashed:
    def __init__(self, file: BinaryIO, advance: Callable[[int], None]) -> None:
        self._file = file
        self._advance = advance
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)
        self._advance(len(data))

    def pad(self, multiple: int) -> None:
        self.write(bytes(-self.size % multiple))


def _mapped(folder: Path, manifest: Manifest) -> Tensor:
    """Map the file as [bytes] uint8. Pages are private, so that writes do not reach the file."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            mapping = mmap.mmap(file.fileno(), manifest.weight_bytes, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelError(WEIGHTS, f"cannot be mapped ({error}). {rebuild(folder)}") from None
    check_seal(folder, mapping[:SEAL_BYTES], manifest)  # a build may have replaced it meanwhile
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))


_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
