"""GGUF files for tests: written by the public package, or byte by byte with errors in them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

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
    """Return a metadata entry."""
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    """Return the value of an entry of kind ARRAY."""
    return struct.pack("<IQ", kind, count) + values


def directory(
    name: str | bytes, dims: Iterable[int], type: int = 0, offset: int = 0, ndim: int | None = None
) -> bytes:
    """Return a tensor's entry; `dims` innermost first."""
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
    """Write a file with `data` zero bytes after its header."""
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
    """Write a file by the public package.

    Args:
        values: metadata; lists of anything, bool, int, float, str.
        tensors: [rows, ...] fp32, stored as `types` gives, else as F32.
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
    """Write a small model with the metadata LLAMA and `values`, an embedding and `tensors`."""
    facts = {key: value for key, value in LLAMA.items() if key not in without}
    facts = {key.replace("llama.", f"{architecture}.", 1): v for key, v in facts.items()}
    embedding = {"token_embd.weight": np.zeros((96, 32), np.float32)}
    return write_with_package(
        path, architecture, {**facts, **(values or {})}, {**embedding, **(tensors or {})}
    )


# Offsets of the fp16 numbers in a block, for types that the package does not write.
NUMBERS: Mapping[str, tuple[int, ...]] = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
# Multiplied with integer scales and codes they give weights of about 0.06.
SIZES_OF_NUMBERS: Mapping[str, tuple[float, ...]] = {
    "Q2_K": (6e-3, 6e-3),
    "Q3_K": (1.5e-3,),
    "Q4_K": (2.4e-4, 1.2e-3),
    "Q5_K": (1.2e-4, 1.2e-3),
    "Q6_K": (6e-5,),
    "IQ4_NL": (1e-3,),
    "IQ4_XS": (6e-5,),
}


def some_rows(type: str, values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Encode values [rows, weights] fp32 to [rows, bytes]. For types that the package does not
    write, return the bytes of other weights of that shape."""
    kind = gguf.GGMLQuantizationType[type]
    if type not in NUMBERS:
        return gguf.quants.quantize(values, kind).view(np.uint8)
    weights, size = gguf.quants.GGML_QUANT_SIZES[kind]
    rows, width = values.shape
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (rows, width // weights, size), dtype=np.uint8)
    for at, number in zip(NUMBERS[type], SIZES_OF_NUMBERS[type], strict=True):
        own = number * draw.uniform(0.5, 1.5, blocks.shape[:2])
        blocks[..., at : at + 2] = own.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def weights_of(type: str, rows: np.ndarray) -> np.ndarray:
    """Decode [rows, bytes] to [rows, weights] fp32 by the package."""
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type])


def dequantize(type: str, rows: Tensor) -> Tensor:
    """As `weights_of`, with tensors."""
    return torch.from_numpy(weights_of(type, rows.numpy()))
