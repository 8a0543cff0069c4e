"""Write a GGUF file, completely or not at all: the head first, then the data as it comes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from kvik.errors import ModelError, shown
from kvik.files import writing_whole
from kvik.gguf.types import DEFAULT_ALIGNMENT, MAGIC, STRUCT_CODES, BlockType, ValueKind

Scalar = bool | int | float | str
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write.

    Attributes:
        shape: the outermost dimension first; rows are whole blocks.
        data: called when the tensor is written; returns its bytes in pieces of any size.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
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
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        dimensions = tensor.shape[::-1]
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
        parts.append(struct.pack("<IQ", tensor.type.code, offset))
        offset += tensor.size + -tensor.size % DEFAULT_ALIGNMENT
    head = b"".join(parts)
    return head + bytes(-len(head) % DEFAULT_ALIGNMENT)


def _value(value: Scalar | Sequence[Scalar]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", ValueKind.STRING) + _string(value)
    if isinstance(value, bool | int | float):
        kind = _kind(value)
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


def _kind(value: bool | int | float) -> ValueKind:
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
