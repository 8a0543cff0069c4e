"""Reads the head of GGUF files, validating it completely before any data is used; writes files.

A file is a magic number, a version, the numbers of tensors and of metadata entries, the entries, a
directory of the tensors, and their data from the next multiple of the alignment on. A large model
may be split into several files, of which the first has the metadata.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import BinaryIO

from kvik.errors import ModelError, shown
from kvik.files import gguf_parts, regular, writing_whole
from kvik.gguf.types import (
    ALIGNMENTS,
    BLOCK_TYPES,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMENSIONS,
    STRUCT_CODES,
    UNREAD_TYPES,
    VERSIONS,
    Array,
    BlockType,
    Metadata,
    Value,
    ValueKind,
    shortest,
)

# Reading the head of a file forwards: every length is checked before it is used.

MAX_HEAD_BYTES = 128 << 20  # vocabularies of half a million tokens take about 20 MB
CHUNK_BYTES = 1 << 20  # smallest read
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a file that is read forwards, as far as needed and a little ahead."""

    def __init__(self, file: FileIO, name: str, size: int) -> None:
        """
        Args:
            name: of the file, for errors.
            size: of the file in bytes.
        """
        self._file = file
        self._name = name
        self._size = size
        self.data = bytearray()  # the bytes of the file read so far, from its start
        self.at = 0  # offset of the next byte

    @property
    def num_left(self) -> int:
        """Bytes from here to the end of the file."""
        return self._size - self.at

    def error(self, label: str, message: str) -> ModelError:
        return ModelError(self._name, f"{label} {message}")

    def need(self, count: int, label: str) -> int:
        """Read until the next `count` bytes are in `data`.

        Returns:
            Their offset in `data`.

        Raises:
            ModelError: the file ends before, or the head is too large.
        """
        if count > self.num_left:
            raise self.error(label, f"must have {count} more bytes, the file has {self.num_left}")
        end = self.at + count
        if end > MAX_HEAD_BYTES:
            raise self.error(label, f"must lie in the first {MAX_HEAD_BYTES >> 20} MiB of the file")
        while len(self.data) < end:
            ahead = max(end - len(self.data), min(CHUNK_BYTES, self._size - len(self.data)))
            piece = self._file.read(ahead)
            if not piece:
                raise self.error(label, "is cut off: the file has become shorter")
            self.data += piece
        return self.at

    def take(self, layout: struct.Struct, label: str) -> int | float:
        """Take one number."""
        place = self.need(layout.size, label)
        self.at += layout.size
        value: int | float = layout.unpack_from(self.data, place)[0]
        return value

    def integer(self, layout: struct.Struct, label: str) -> int:
        """Take one integer."""
        return int(self.take(layout, label))

    def name(self, label: str, limit: int) -> str:
        """Take a string of 1 to `limit` bytes."""
        text = self.string(label, limit)
        if not text:
            raise self.error(label, "must not be empty")
        return text

    def string(self, label: str, limit: int | None = None) -> str:
        """Take a string: its length, and that many bytes of UTF-8, at most `limit`."""
        length = self.integer(_U64, label)
        if limit is not None and length > limit:
            raise self.error(label, f"must have at most {limit} bytes, not {length}")
        place = self.need(length, label)
        self.at += length
        try:
            return self.data[place : place + length].decode()
        except UnicodeDecodeError:
            raw = bytes(self.data[place : place + min(length, 60)])
            raise self.error(label, f"must be valid UTF-8, not {shown(raw)}") from None

    def skip_strings(self, count: int, label: str) -> None:
        """Skip `count` strings without decoding them."""
        unpack, data, at = _U64.unpack_from, self.data, self.at
        for index in range(count):
            if at + 8 > len(data):
                self.at = at
                self.need(8, f"{label}[{index}]")
            (length,) = unpack(data, at)
            at += 8 + length
            if at > len(data):
                self.at = at - length
                self.need(length, f"{label}[{index}]")
        self.at = at


MAX_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 18
MAX_KEY_BYTES = (1 << 16) - 1  # of the format's description
MAX_NAME_BYTES = 256
MAX_DEPTH = 4  # of arrays within arrays
MAX_PARTS = (1 << 16) - 1
# Keys of a file that is split: the number of this part (from 0), of the parts, of all tensors.
PART, NUM_PARTS, NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
MIN_ENTRY_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_U32 = struct.Struct("<I")
_LAYOUTS = {kind: struct.Struct("<" + code) for kind, code in STRUCT_CODES.items()}
_KINDS = {int(kind): kind for kind in ValueKind}
_TYPES = {known.code: known for known in BLOCK_TYPES.values()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file: `size` bytes from byte `start` of the file."""

    path: Path  # of the file
    name: str
    type: BlockType
    # The outermost dimension first; the last one counts the weights of a row.
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The contents of a file's head, and of those of the other parts if it is split."""

    path: Path
    metadata: Metadata
    tensors: tuple[GgufTensor, ...]  # in the order of their data

    def tensor(self, name: str) -> GgufTensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def read(self, tensor: GgufTensor, limit: int) -> bytes:
        """Read all bytes of a small tensor.

        Raises:
            ModelError: it has more than `limit` bytes, or the file cannot be read.
        """
        if tensor.size > limit:
            message = (
                f"tensor {shown(tensor.name)} must have at most {limit} bytes, not {tensor.size}"
            )
            raise ModelError(tensor.path.name, message)
        try:
            with open(tensor.path, "rb", buffering=0, opener=regular) as file:
                file.seek(tensor.start)
                data = file.read(tensor.size)
        except OSError as error:
            raise ModelError(tensor.path.name, f"cannot be read ({error.strerror})") from None
        if len(data) != tensor.size:
            raise ModelError(tensor.path.name, "has become shorter than its header says")
        return data


def read_gguf(path: Path) -> GgufFile:
    """Read the head of a file, without its data; of a split file, named by its first part, those of
    all parts.

    Raises:
        ModelError: a file cannot be read or is not a valid GGUF file, or parts do not fit together.
    """
    file = _read(path)
    count = file.metadata.integer(NUM_PARTS, 0, MAX_PARTS, 1)
    if count <= 1:
        return file
    paths = gguf_parts(path)
    if len(paths) != count:
        name = f"NAME-00001-of-{count:05}.gguf"
        raise file.metadata.error(NUM_PARTS, f"is {count}: name the first part, {name}")
    parts = [file, *map(_read, paths[1:])]
    for i, part in enumerate(parts):
        for key, expected in ((PART, i), (NUM_PARTS, count)):
            if (stored := part.metadata.integer(key, 0, MAX_PARTS)) != expected:
                raise part.metadata.error(key, f"must be {expected}, not {stored}")
    tensors = {tensor.name: tensor for part in parts for tensor in part.tensors}
    total = file.metadata.integer(NUM_TENSORS, 0, MAX_TENSORS, len(tensors))
    if not len(tensors) == total == sum(len(part.tensors) for part in parts):
        reason = f"must be the number of different tensors of all parts, {len(tensors)}"
        raise file.metadata.error(NUM_TENSORS, f"{reason}, not {total}")
    return replace(file, tensors=tuple(tensors.values()))


def _read(path: Path) -> GgufFile:
    """Read the head of one file."""
    try:
        with open(path, "rb", buffering=0, opener=regular) as file:
            size = path.stat().st_size
            cursor = Cursor(file, path.name, size)
            tensors, entries = _header(cursor)
            metadata = _entries(cursor, path.name, entries)
            return GgufFile(path, metadata, _tensors(cursor, path, metadata, tensors, size))
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None


def _header(cursor: Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata entries."""
    place = cursor.need(4, "the magic number")
    magic = bytes(cursor.data[place : place + 4])
    cursor.at += 4
    if magic != MAGIC:
        raise cursor.error("the magic number", f"must be {MAGIC!r}, not {magic!r}")
    version = cursor.integer(_U32, "the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise cursor.error("the file", "is big endian; only little endian files are read")
        raise cursor.error("the version", f"must be 2 or 3, not {version}")
    tensors = cursor.integer(_U64, "the number of tensors")
    entries = cursor.integer(_U64, "the number of metadata entries")
    for count, limit, size, label in (
        (entries, MAX_ENTRIES, MIN_ENTRY_BYTES, "the number of metadata entries"),
        (tensors, MAX_TENSORS, MIN_TENSOR_BYTES, "the number of tensors"),
    ):
        if count > min(limit, cursor.num_left // size):
            capacity = min(limit, cursor.num_left // size)
            raise cursor.error(
                label, f"must be at most {capacity} in a file of this size, not {count}"
            )
    return tensors, entries


def _entries(cursor: Cursor, file: str, count: int) -> Metadata:
    values: dict[str, Value] = {}
    for index in range(count):
        key = cursor.name(f"key {index}", MAX_KEY_BYTES)
        label = f"key {shown(key)}"
        if key in values:
            raise cursor.error(label, "occurs twice")
        values[key] = _value(cursor, _kind(cursor, label), label)
    return Metadata(values, file)


def _kind(cursor: Cursor, label: str) -> ValueKind:
    code = cursor.integer(_U32, label)
    if code not in _KINDS:
        raise cursor.error(label, f"must have a value of a type in [0, {max(_KINDS)}], not {code}")
    return _KINDS[code]


def _value(cursor: Cursor, kind: ValueKind, label: str) -> Value:
    if kind is ValueKind.STRING:
        return cursor.string(label)
    if kind is ValueKind.ARRAY:
        return _array(cursor, label, 1)
    value = cursor.take(_LAYOUTS[kind], label)
    if kind is ValueKind.FLOAT32:
        return shortest(value)
    if kind is not ValueKind.BOOL:
        return value
    if value not in (0, 1):
        raise cursor.error(label, f"must be true (1) or false (0), not {value}")
    return bool(value)


def _array(cursor: Cursor, label: str, depth: int) -> Array:
    """Skip an array, which is decoded later; the lengths of strings and arrays are checked."""
    kind = _kind(cursor, label)
    count = cursor.integer(_U64, label)
    layout = _LAYOUTS.get(kind)
    min_size = layout.size if layout else 8 if kind is ValueKind.STRING else 12
    if count > cursor.num_left // min_size:
        raise cursor.error(label, f"has {count} values, for which the file is too small")
    if kind is ValueKind.ARRAY and depth == MAX_DEPTH:
        raise cursor.error(label, f"must not have arrays more than {MAX_DEPTH} deep")
    array = Array(kind, count, cursor.data, cursor.at)
    if layout:
        cursor.need(count * layout.size, label)
        cursor.at += count * layout.size
    elif kind is ValueKind.STRING:
        cursor.skip_strings(count, label)
    else:
        for _ in range(count):
            _array(cursor, label, depth + 1)
    return array


def _tensors(
    cursor: Cursor, path: Path, metadata: Metadata, count: int, file_size: int
) -> tuple[GgufTensor, ...]:
    alignment = metadata.integer("general.alignment", 1, 1 << 63, DEFAULT_ALIGNMENT)
    if alignment not in ALIGNMENTS:
        allowed = f"{ALIGNMENTS[0]}..{ALIGNMENTS[-1]}"
        raise metadata.error(
            "general.alignment", f"must be a power of two in {allowed}, not {alignment}"
        )
    tensors: dict[str, GgufTensor] = {}
    for index in range(count):
        tensor = _tensor(cursor, path, index)
        if tensor.name in tensors:
            raise cursor.error(f"tensor {shown(tensor.name)}", "occurs twice")
        if tensor.start % alignment:
            raise cursor.error(
                f"tensor {shown(tensor.name)}",
                f"must start at a multiple of {alignment}, not at {tensor.start}",
            )
        tensors[tensor.name] = tensor
    data_start = -(-cursor.at // alignment) * alignment
    return _placed(cursor, tensors.values(), data_start, file_size)


def _tensor(cursor: Cursor, path: Path, index: int) -> GgufTensor:
    """Take an entry of the directory; its `start` is relative to the start of the data."""
    name = cursor.name(f"the name of tensor {index}", MAX_NAME_BYTES)
    label = f"tensor {shown(name)}"
    dimensions = cursor.integer(_U32, label)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(label, f"must have 1 to {MAX_DIMENSIONS} dimensions, not {dimensions}")
    shape = [cursor.integer(_U64, label) for _ in range(dimensions)]  # innermost first
    code = cursor.integer(_U32, label)
    start = cursor.integer(_U64, label)
    if not all(0 < width < 1 << 63 for width in shape):
        raise cursor.error(label, f"must have dimensions in [1, 2^63 - 1], not {shape[::-1]}")
    if code not in _TYPES:
        names = ", ".join(BLOCK_TYPES)
        raise cursor.error(label, f"must be {names}, not {UNREAD_TYPES.get(code, f'type {code}')}")
    type = _TYPES[code]
    if shape[0] % type.weights:
        raise cursor.error(
            label, f"is {type.name}: rows must be multiples of {type.weights} wide, not {shape[0]}"
        )
    size = type.row_bytes(shape[0]) * math.prod(shape[1:])
    return GgufTensor(path, name, type, tuple(shape[::-1]), start, size)


def _placed(
    cursor: Cursor, tensors: Iterable[GgufTensor], data_start: int, file_size: int
) -> tuple[GgufTensor, ...]:
    """Return the tensors in the order of their data, with `start` relative to the file."""
    placed, end, before = [], data_start, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        label, start = f"tensor {shown(tensor.name)}", data_start + tensor.start
        if start + tensor.size > file_size:
            raise cursor.error(
                label, f"must end within the file's {file_size} bytes, not at {start + tensor.size}"
            )
        if start < end:
            raise cursor.error(label, f"overlaps tensor {shown(before)}")
        end, before = start + tensor.size, tensor.name
        placed.append(replace(tensor, start=start))
    return tuple(placed)


Scalar = bool | int | float | str
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # the outermost dimension first; rows are whole blocks
    # Called when the tensor is written; returns its bytes in pieces of any size.
    data: Callable[[], Iterable[Buffer]]

    @property
    def weights(self) -> int:
        return prod(self.shape)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.type.row_bytes(self.shape[-1]) * prod(self.shape[:-1])


def write_gguf(
    path: Path, metadata: Mapping[str, Scalar | Sequence[Scalar]], tensors: Sequence[OutTensor]
) -> None:
    """Write a file of version 3, under another name until it is complete.

    Args:
        metadata: integers become UINT32, or a wider kind if necessary; floats FLOAT32; integers in
            sequences INT32, booleans BOOL.

    Raises:
        ModelError: the file cannot be written, or the data of a tensor has another size.
    """
    head = _head(metadata, tensors)
    try:
        with writing_whole(path) as file:
            file.write(head)
            for tensor in tensors:
                _write_data(file, tensor)
    except OSError as error:
        raise ModelError(path.name, f"cannot be written ({error.strerror})") from None


def _write_data(file: BinaryIO, tensor: OutTensor) -> None:
    written = 0
    for piece in tensor.data():
        written += file.write(piece)
    if written != tensor.size:
        raise ModelError(
            f"tensor {shown(tensor.name)}", f"must have {tensor.size} bytes, not {written}"
        )
    file.write(bytes(-written % DEFAULT_ALIGNMENT))


def _head(metadata: Mapping[str, Scalar | Sequence[Scalar]], tensors: Sequence[OutTensor]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _packed(value)]
    offset = 0
    for tensor in tensors:
        dimensions = tensor.shape[::-1]
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
        parts.append(struct.pack("<IQ", tensor.type.code, offset))
        offset += tensor.size + -tensor.size % DEFAULT_ALIGNMENT
    head = b"".join(parts)
    return head + bytes(-len(head) % DEFAULT_ALIGNMENT)


def _packed(value: Scalar | Sequence[Scalar]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", ValueKind.STRING) + _string(value)
    if isinstance(value, bool | int | float):
        kind = _kind_of(value)
        return struct.pack("<I" + STRUCT_CODES[kind], kind, value)
    texts = [single for single in value if isinstance(single, str)]
    if texts:
        head = struct.pack("<IIQ", ValueKind.ARRAY, ValueKind.STRING, len(texts))
        return head + b"".join(map(_string, texts))
    kinds = {type(single) for single in value}
    kind = ValueKind.FLOAT32 if float in kinds else ValueKind.INT32
    kind = ValueKind.BOOL if kinds == {bool} else kind
    layout = f"<IIQ{len(value)}{STRUCT_CODES[kind]}"
    return struct.pack(layout, ValueKind.ARRAY, kind, len(value), *value)


def _kind_of(value: bool | int | float) -> ValueKind:
    if isinstance(value, bool):
        return ValueKind.BOOL
    if isinstance(value, float):
        return ValueKind.FLOAT32
    if value < 0:
        return ValueKind.INT32 if value >= -1 << 31 else ValueKind.INT64
    return ValueKind.UINT32 if value < 1 << 32 else ValueKind.UINT64


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
