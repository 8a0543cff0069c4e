"""GGUF files for tests: made by the public package, or byte by byte with lies in them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

LLAMA: Mapping[str, Any] = {
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A metadata entry."""
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    """The value of an entry of kind ARRAY."""
    return struct.pack("<IQ", kind, count) + values


def directory(
    name: str | bytes, dims: Iterable[int], type: int = 0, offset: int = 0, ndim: int | None = None
) -> bytes:
    """A tensor's entry; dims innermost first."""
    dims = list(dims)
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    count = len(dims) if ndim is None else ndim
    return string(name) + struct.pack("<I", count) + sizes + struct.pack("<IQ", type, offset)


def raw(
    entries: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    claimed_entries: int | None = None,
    claimed_tensors: int | None = None,
) -> bytes:
    """A file with `data` zero bytes after its head."""
    entries, tensors = list(entries), list(tensors)
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if claimed_tensors is None else claimed_tensors,
        len(entries) if claimed_entries is None else claimed_entries,
    )
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


def write_with_package(
    path: Path,
    architecture: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, str] | None = None,
) -> Path:
    """A file of the public package.

    Args:
        values: metadata; lists of anything, bool, int, float, str.
        tensors: [rows, ...] fp32, stored as `types` says, else as F32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        type = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        writer.add_tensor(name, gguf.quants.quantize(value, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_file(
    path: Path,
    *,
    values: Mapping[str, Any] | None = None,
    without: Iterable[str] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    """A small model with the facts of LLAMA and `values`, an embedding and `tensors`."""
    facts = {key: value for key, value in LLAMA.items() if key not in without}
    facts = {key.replace("llama.", f"{architecture}.", 1): v for key, v in facts.items()}
    embedding = {"token_embd.weight": np.zeros((96, 32), np.float32)}
    return write_with_package(
        path, architecture, {**facts, **(values or {})}, {**embedding, **(tensors or {})}
    )
