"""The header of a safetensors file, checked completely before a byte of data is believed.

A file is an 8-byte little-endian header length, a JSON header, and the data. The header maps each
tensor's name to its dtype, shape and byte range within the data; the ranges must tile the data
without gap or overlap.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvik.errors import ModelError, shown
from kvik.files import regular

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: `size` bytes from byte `start` of the file."""

    name: str
    dtype: str  # as the file says: "BF16", "F32", ...
    shape: tuple[int, ...]
    start: int
    size: int


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a file, in the order of their data.

    Raises:
        ModelError: the file cannot be read or is not a valid safetensors file.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            file_size = path.stat().st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelError(path.name, f"must start with 8 bytes of length, has {len(prefix)}")
            length, most = int.from_bytes(prefix, "little"), min(file_size - 8, MAX_HEADER_BYTES)
            if length > most:
                raise ModelError(
                    path.name, f"its header must have at most {most} bytes, it claims {length}"
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
            what = "overlaps the one" if entry.start < end else "leaves a gap"
            raise ModelError(file, f"tensor {shown(entry.name)} {what} before it")
        end += entry.size
    if end != file_size:
        need, there = end - data_start, file_size - data_start
        raise ModelError(file, f"its tensors need {need} bytes of data, {there} are there")
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
    def wrong(what: str) -> ModelError:
        return ModelError(file, f"tensor {shown(name)}: {what}")

    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise wrong("must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise wrong(f"dtype must be one of {', '.join(DTYPE_BITS)}, not {shown(dtype)}")
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise wrong(f"shape must be at most {MAX_DIMENSIONS} sizes, not {shown(shape)}")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets must be [begin, end] with begin <= end, not {shown(offsets)}")
    begin, end = offsets
    size = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != size:
        raise wrong(f"{dtype} {shown(shape)} takes {size} bytes, data_offsets span {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, size)


def _sizes(value: object) -> bool:
    """Whether a JSON value is a list of sizes that a machine can count."""
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in value
    )
