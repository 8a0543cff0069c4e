"""Reads safetensors headers, which are validated completely before any data is used; writes files.

A file is an 8-byte little-endian header length, a JSON header, and the data. The header maps each
tensor's name to its dtype, shape and byte range within the data; the ranges must tile the data
without gap or overlap.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.files import regular, writing_whole

FLOATS = ("F32", "BF16", "F16", "F64")  # dtypes that are interchangeable
# By their names in headers.
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
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: `size` bytes from byte `start` of the file."""

    name: str
    dtype: str  # as the file says: "BF16", "F32", ..
    shape: tuple[int, ...]
    start: int
    size: int
    # (first, all): its rows are columns first.. of a matrix with `all` columns that begins at
    # `start`; None: it is a whole tensor of the file.
    columns: tuple[int, int] | None = None

    @property
    def span(self) -> tuple[int, int]:
        """First byte and number of bytes to read for it."""
        if self.columns is None:
            return self.start, self.size
        return self.start, self.size // self.shape[0] * self.columns[1]

    def values(self, data: Tensor) -> Tensor:
        """Return its values, given the bytes of its span as uint8."""
        numbers = data.view(TORCH_DTYPES[self.dtype])
        if self.columns is None:
            return numbers.view(self.shape)
        first, width = self.columns
        return numbers.view(-1, width)[:, first : first + self.shape[0]].t()


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """Return the tensors of a file, in the order of their data.

    Raises:
        ModelError: the file cannot be read or is not a valid safetensors file.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            file_size = path.stat().st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelError(path.name, f"must start with 8 bytes of length, has {len(prefix)}")
            length, limit = int.from_bytes(prefix, "little"), min(file_size - 8, MAX_HEADER_BYTES)
            if length > limit:
                raise ModelError(
                    path.name, f"its header must have at most {limit} bytes, it claims {length}"
                )
            header = file.read(length)
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None
    return _entries(path.name, header, 8 + length, file_size)


def _entries(file: str, header: bytes, data_start: int, file_size: int) -> tuple[TensorEntry, ...]:
    tensors = _parse(file, header)
    metadata = tensors.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ModelError(file, f"__metadata__ must map names to strings, not {shown(metadata)}")
    if len(tensors) > MAX_TENSORS:
        raise ModelError(file, f"at most {MAX_TENSORS} tensors, not {len(tensors)}")
    entries = sorted(
        (_entry(file, name, facts, data_start) for name, facts in tensors.items()),
        key=lambda entry: (entry.start, entry.size),
    )
    end = data_start
    for entry in entries:
        if entry.start != end:
            reason = "overlaps the one" if entry.start < end else "leaves a gap"
            raise ModelError(file, f"tensor {shown(entry.name)} {reason} before it")
        end += entry.size
    if end != file_size:
        need, size = end - data_start, file_size - data_start
        raise ModelError(file, f"its tensors need {need} bytes of data, {size} are there")
    return tuple(entries)


def _parse(file: str, header: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) != len(pairs):
            [(name, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise ModelError(file, f"its header names {shown(name)} twice")
        return values

    try:
        values = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except ModelError:
        raise
    except (RecursionError, ValueError):
        raise ModelError(file, "its header is not valid JSON") from None
    if not isinstance(values, dict):
        raise ModelError(file, f"its header must be a JSON object, not {shown(values)}")
    return values


def _entry(file: str, name: str, facts: object, data_start: int) -> TensorEntry:
    def wrong(reason: str) -> ModelError:
        return ModelError(file, f"tensor {shown(name)}: {reason}")

    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise wrong("must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise wrong(f"dtype must be one of {', '.join(TORCH_DTYPES)}, not {shown(dtype)}")
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise wrong(f"shape must be at most {MAX_DIMENSIONS} sizes, not {shown(shape)}")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets must be [begin, end] with begin <= end, not {shown(offsets)}")
    begin, end = offsets
    size = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    if end - begin != size:
        raise wrong(f"{dtype} {shown(shape)} takes {size} bytes, data_offsets span {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, size)


def _sizes(value: object) -> bool:
    """Return whether a JSON value is a list of integers from 0 to 2^63 - 1."""
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in value
    )


# Writing safetensors files: from memory, or copied chunk by chunk from other files.

# Some readers require the library that wrote the tensors.
METADATA = {"format": "pt"}
ALIGNMENT = 8  # of the data
CHUNK = 8 << 20  # bytes copied at a time


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor in a safetensors file."""

    path: Path
    entry: TensorEntry

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """Return its values, or those of `count` rows.

        Raises:
            ModelError: they cannot be read.
        """
        entry, rows = self.entry, self.entry.shape[0]
        some, size = rows - first if count is None else count, entry.size // max(1, rows)
        data = bytearray(some * size)
        try:
            with open(self.path, "rb", opener=regular) as file:
                file.seek(entry.start + first * size)
                complete = file.readinto(data) == len(data)
        except OSError as error:
            raise ModelError(self.path.name, f"cannot be read ({error.strerror})") from None
        if not complete:
            raise ModelError(self.path.name, "became shorter while it was read")
        values = torch.frombuffer(data, dtype=TORCH_DTYPES[entry.dtype])
        return values.view(some, *entry.shape[1:])


def write_safetensors(path: Path, tensors: Mapping[str, Tensor | Stored]) -> int:
    """Write a file, whole or not at all. The bytes do not depend on the order of `tensors`: they
    are sorted by width of the dtype, widest first so that all are aligned, then by name.

    Returns:
        Bytes of the tensors.

    Raises:
        OSError: the file cannot be written, or a source file cannot be read.
    """
    dtypes = {name: _dtype(tensor) for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: (-TORCH_DTYPES[dtypes[name]].itemsize, name))
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
            for chunk in _chunks(tensors[name]):
                file.write(chunk)
    return end


def _dtype(tensor: Tensor | Stored) -> str:
    if isinstance(tensor, Stored):
        return tensor.entry.dtype
    return next(name for name, dtype in TORCH_DTYPES.items() if dtype == tensor.dtype)


def _extent(tensor: Tensor | Stored) -> tuple[list[int], int]:
    """Return shape and bytes."""
    if isinstance(tensor, Stored):
        return list(tensor.entry.shape), tensor.entry.size
    return list(tensor.shape), tensor.nbytes


def _chunks(tensor: Tensor | Stored) -> Iterator[bytes | memoryview]:
    if isinstance(tensor, Tensor):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
        return
    start, num_bytes = tensor.entry.span
    with tensor.path.open("rb") as source:
        source.seek(start)
        if tensor.entry.columns is not None:
            data = torch.frombuffer(bytearray(source.read(num_bytes)), dtype=torch.uint8)
            yield from _chunks(tensor.entry.values(data))
            return
        while num_bytes:
            chunk = source.read(min(CHUNK, num_bytes))
            if not chunk:
                raise OSError(f"{tensor.path} ended early")
            num_bytes -= len(chunk)
            yield chunk
