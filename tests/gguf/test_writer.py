"""Written files, read by the public package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from kvik.errors import ModelError
from kvik.gguf.reader import OutTensor, read_gguf, write_gguf
from kvik.gguf.types import BLOCK_TYPES


def vector(name: str, values: np.ndarray) -> OutTensor:
    return OutTensor(name, BLOCK_TYPES["F32"], values.shape, lambda: [values.tobytes()])


def test_the_public_package_reads_written_files(tmp_path: Path) -> None:
    blocks = np.arange(6 * 34, dtype=np.uint8)
    odd = np.arange(5, dtype=np.float32)

    def pieces() -> Iterator[bytes]:
        yield from (blocks[:7].tobytes(), blocks[7:].tobytes())

    metadata = {
        "general.architecture": "llama",
        "a.text": "héllo",
        "a.empty": "",
        "a.big": 2**40,
        "a.negative": -3,
        "a.int": 2**32 - 1,
        "a.fraction": 0.25,
        "a.yes": True,
        "a.words": ["x", "", "日本"],
        "a.ints": [1, -2],
        "a.floats": [0.5, 1],
        "a.nothing": [],
    }
    quantised = OutTensor("q", BLOCK_TYPES["Q8_0"], (3, 64), pieces)
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata, [vector("odd", odd), quantised, vector("last", odd)])
    file = GGUFReader(path)
    fields = {key: field.contents() for key, field in file.fields.items() if key in metadata}
    assert fields == metadata
    kinds = {key: [t.name for t in file.fields[key].types] for key in metadata}
    assert kinds["a.int"] == ["UINT32"] and kinds["a.big"] == ["UINT64"]
    assert kinds["a.negative"] == ["INT32"] and kinds["a.fraction"] == ["FLOAT32"]
    assert kinds["a.ints"] == ["ARRAY", "INT32"] and kinds["a.floats"] == ["ARRAY", "FLOAT32"]
    found = {tensor.name: tensor for tensor in file.tensors}
    assert list(found) == ["odd", "q", "last"]
    assert np.array_equal(found["q"].data.reshape(-1), blocks)
    assert found["q"].shape.tolist() == [64, 3] and found["q"].tensor_type.name == "Q8_0"
    assert np.array_equal(found["last"].data, odd)
    ours = read_gguf(path)
    assert [t.start % 32 for t in ours.tensors] == [0, 0, 0]
    assert ours.metadata.integer("a.big", 0, 2**50) == 2**40
    assert path.stat().st_mode & 0o777 == 0o644


def test_wrong_data_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"what was there")
    short = OutTensor("t", BLOCK_TYPES["F32"], (4,), lambda: [bytes(12)])
    with pytest.raises(ModelError, match="tensor 't': must have 16 bytes, not 12"):
        write_gguf(path, {}, [short])

    def broken() -> Iterator[bytes]:
        yield bytes(4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, {}, [OutTensor("t", BLOCK_TYPES["F32"], (4,), broken)])
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_bytes() == b"what was there"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m.gguf: cannot be written \(No such file"):
        write_gguf(tmp_path / "none" / "m.gguf", {}, [])


def test_data_is_requested_one_by_one(tmp_path: Path) -> None:
    """The model need not be in memory."""
    alive: list[str] = []

    def data(name: str) -> Iterator[bytes]:
        alive.append(name)
        assert alive == [name]
        yield bytes(16)
        alive.remove(name)

    names = ["a", "b", "c"]
    tensors = [
        OutTensor(name, BLOCK_TYPES["F32"], (4,), lambda name=name: data(name)) for name in names
    ]
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    assert alive == []
