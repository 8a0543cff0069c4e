"""Writing safetensors files: from memory, or copied piece by piece from other files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.files import writing_whole
from kvik.nn.checkpoint import TORCH_DTYPES
from kvik.nn.safetensors import DTYPE_BITS, TensorEntry

# Readers beside kvik ask which library's tensors these are.
METADATA = {"format": "pt"}
ALIGNMENT = 8  # of the data
PIECE = 8 << 20  # bytes copied at a time


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of another safetensors file, taken over byte by byte."""

    path: Path
    entry: TensorEntry


def write_safetensors(path: Path, tensors: Mapping[str, Tensor | Stored]) -> int:
    """Writes a file, whole or not at all. The same tensors give the same bytes, however they are
    ordered: wide numbers come first, so that all are aligned, then names count.

    Returns:
        bytes of the tensors.

    Raises:
        OSError: a file cannot be written, or one that is copied from cannot be read.
    """
    dtypes = {name: _dtype(tensor) for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: (-DTYPE_BITS[dtypes[name]], name))
    header: dict[str, object] = {"__metadata__": METADATA}
    end = 0
    for name in names:
        tensor = tensors[name]
        shape, size = _extent(tensor)
        header[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with writing_whole(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in _pieces(tensors[name]):
                file.write(piece)
    return end


def _dtype(tensor: Tensor | Stored) -> str:
    if isinstance(tensor, Stored):
        return tensor.entry.dtype
    return next(name for name, dtype in TORCH_DTYPES.items() if dtype == tensor.dtype)


def _extent(tensor: Tensor | Stored) -> tuple[list[int], int]:
    """Shape and bytes."""
    if isinstance(tensor, Stored):
        return list(tensor.entry.shape), tensor.entry.size
    return list(tensor.shape), tensor.nbytes


def _pieces(tensor: Tensor | Stored) -> Iterator[bytes | memoryview]:
    if isinstance(tensor, Tensor):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
        return
    with tensor.path.open("rb") as source:
        source.seek(tensor.entry.start)
        left = tensor.entry.size
        while left:
            piece = source.read(min(PIECE, left))
            if not piece:
                raise OSError(f"{tensor.path} ended early")
            left -= len(piece)
            yield piece
