"""The weights of a model folder: every tensor by name, read through a memory map."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.config.errors import ModelError
from kvik.config.fields import Fields, read_json, shown
from kvik.nn.safetensors import TensorEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The validated headers of a model's safetensors files; data is read only by `tensors`."""

    files: tuple[tuple[Path, tuple[TensorEntry, ...]], ...]

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return {entry.name: entry for _, entries in self.files for entry in entries}

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for _, entries in self.files for entry in entries)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor in the order of the files, as a view that is valid until the next one.

        Pages that were read are given back as it goes, so that reading a file never adds its size
        to the memory in use.
        """
        for path, entries in self.files:
            data = _map(path)
            for entry in entries:
                yield entry.name, _view(data, entry)
                first = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
                if entry.size:
                    data.madvise(mmap.MADV_DONTNEED, first, entry.start + entry.size - first)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Find and validate the weights in a folder: one file, or several with an index.

    Raises:
        ModelError: nothing that can be loaded, or a malformed header or index.
    """
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return Checkpoint(((folder / SINGLE, read_header(folder / SINGLE)),))
    if (folder / INDEX).is_file():
        return _open_sharded(folder)
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if name.endswith(PICKLED):
            raise ModelError(
                "model",
                f"{shown(name)} is a pickle, which runs code when it is opened; "
                "convert it to safetensors",
            )
    raise ModelError("model", f"must hold {SINGLE} or {INDEX}; {str(folder)!r} has neither")


def _open_sharded(folder: Path) -> Checkpoint:
    index = Fields(read_json(folder / INDEX), INDEX)
    owners = index.mapping("weight_map")
    if not owners:
        raise index.error("weight_map", "must map tensor names to files")
    for file in owners.values():
        good = isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file
        if not good:
            raise index.error("weight_map", f"must name files of its folder, not {shown(file)}")
    files = []
    for file in sorted({str(file) for file in owners.values()}):
        entries = read_header(folder / file)
        for entry in entries:
            owner = owners.get(entry.name)
            if owner != file:
                where = f"puts it in {shown(owner)}" if owner else "does not list it"
                raise ModelError(file, f"tensor {shown(entry.name)}: {INDEX} {where}")
        files.append((folder / file, entries))
    present = {entry.name for _, entries in files for entry in entries}
    for name, file in owners.items():
        if name not in present:
            raise index.error("weight_map", f"puts tensor {shown(name)} in {file}, which lacks it")
    return Checkpoint(tuple(files))


def _map(path: Path) -> mmap.mmap:
    """The file in memory; closed with the last tensor on it. Private, because tensors are made on
    writable memory only; nobody writes."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None


def _view(data: mmap.mmap, entry: TensorEntry) -> Tensor:
    dtype = TORCH_DTYPES[entry.dtype]
    if not entry.size:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.size // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start).view(entry.shape)
