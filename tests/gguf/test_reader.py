"""Headers of GGUF files: valid ones are read as written by the public package, each invalid one is
one clear error before large allocations."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    U64,
    array,
    directory,
    entry,
    raw,
    string,
    write_with_package,
)

from kvik.errors import ModelError
from kvik.gguf import reader
from kvik.gguf.reader import read_gguf


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def nested(depth: int) -> bytes:
    """Return an array of one number, nested in arrays of one array."""
    value = array(U8, 1, b"\x07")
    for _ in range(depth - 1):
        value = array(ARRAY, 1, value)
    return value


HEAD = b"GGUF" + u32(3)
ALIGNED = entry("general.alignment", U32, u32(64))

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "magic number must have 4 more bytes, the file has 0"),
    "another magic": (raw(magic=b"GGML"), "magic number must be b'GGUF', not b'GGML'"),
    "no version": (b"GGUF\x03", "version must have 4 more bytes, the file has 1"),
    "version 1": (raw(version=1), "version must be 2 or 3, not 1"),
    "version 4": (raw(version=4), "version must be 2 or 3, not 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big endian"),
    "no counts": (HEAD + bytes(5), "number of tensors must have 8 more bytes"),
    "2^64 - 1 entries": (raw(claimed_entries=2**64 - 1), "number of metadata entries must be at"),
    "2^32 entries": (raw(data=99, claimed_entries=2**32), "number of metadata entries must be at"),
    "3 entries in 32 bytes": (raw(data=8, claimed_entries=3), "must be at most 1 in a file of"),
    "2 tensors in 40 bytes": (raw(data=32, claimed_tensors=2), "must be at most 1 in a file of"),
    "2^64 - 1 tensors": (raw(claimed_tensors=2**64 - 1), "number of tensors must be at most 0"),
    "one entry too many": (
        raw([entry("a", U8, b"\x01")], data=32, claimed_entries=2),
        "key 1 must not be empty",
    ),
    "key of 2^64 - 1 bytes": (
        raw([u64(2**64 - 1) + bytes(9)]),
        "key 0 must have at most 65535 bytes, not 18446744073709551615",
    ),
    "key behind the end": (raw([u64(60_000) + bytes(9)]), "key 0 must have 60000 more bytes"),
    "key no UTF-8": (raw([entry(b"\xff\xfe", U8, b"\x01")]), r"key 0 must be valid UTF-8"),
    "key twice": (raw([entry("a", U8, b"\x01"), entry("a", U8, b"\x02")]), "key 'a' occurs twice"),
    "unknown kind": (raw([entry("a", 13, b"\x01")]), r"'a' must have a value of a type in \[0, 12"),
    "value cut off": (raw([entry("a", U64, b"")])[: 24 + 9 + 4 + 3], "'a' must have 8 more bytes"),
    "bool of 2": (
        raw([entry("a", BOOL, b"\x02")]),
        r"'a' must be true \(1\) or false \(0\), not 2",
    ),
    "string of 2^63 bytes": (raw([entry("a", STRING, u64(2**63))]), "'a' must have 9223372036854"),
    "string no UTF-8": (raw([entry("a", STRING, string(b"ab\xc3"))]), "'a' must be valid UTF-8"),
    "array of 2^64 - 1 numbers": (
        raw([entry("a", ARRAY, array(U8, 2**64 - 1, b""))]),
        "'a' has 18446744073709551615 values, for which the file is too small",
    ),
    "array of 2^61 numbers": (  # times 8 is 2^64
        raw([entry("a", ARRAY, array(U64, 2**61, b""))]),
        "'a' has 2305843009213693952 values",
    ),
    "array of too many numbers": (
        raw([entry("a", ARRAY, array(I32, 9, bytes(32)))], data=0)[: 24 + 9 + 4 + 12 + 35],
        "'a' has 9 values, for which the file is too small",
    ),
    "array of too many strings": (
        raw([entry("a", ARRAY, array(STRING, 100, b""))]),
        "'a' has 100 values, for which the file is too small",
    ),
    "string of an array behind the end": (
        raw([entry("a", ARRAY, array(STRING, 2, string("xy") + u64(2**40)))]),
        r"'a'\[1\] must have 1099511627776 more bytes",
    ),
    "length of an array's string cut off": (
        raw([entry("a", ARRAY, array(STRING, 2, string("x" * 11) + b"\x01\x02"))])[:70],
        r"'a'\[1\] must have 8 more bytes",
    ),
    "array of an unknown kind": (raw([entry("a", ARRAY, array(77, 1, b""))]), "'a' must have a va"),
    "arrays of 2^60 arrays": (
        raw([entry("a", ARRAY, array(ARRAY, 2**60, b""))]),
        "'a' has 1152921504606846976 values",
    ),
    "arrays five deep": (raw([entry("a", ARRAY, nested(5))]), "arrays more than 4 deep"),
    "tensor name of 2^32 bytes": (
        raw(tensors=[u64(2**32) + bytes(24)]),
        "name of tensor 0 must have at most 256 bytes, not 4294967296",
    ),
    "tensor name empty": (raw(tensors=[directory("", [4])], data=16), "tensor 0 must not be empty"),
    "tensor name no UTF-8": (raw(tensors=[directory(b"\xff", [4])], data=16), "valid UTF-8"),
    "no dimensions": (
        raw(tensors=[directory("t", [])], data=64),
        "'t' must have 1 to 4 dimensions",
    ),
    "five dimensions": (
        raw(tensors=[directory("t", [1] * 5)], data=64),
        "1 to 4 dimensions, not 5",
    ),
    "2^32 - 1 dimensions": (
        raw(tensors=[directory("t", [1], ndim=2**32 - 1)], data=64),
        "'t' must have 1 to 4 dimensions, not 4294967295",
    ),
    "dimension 0": (raw(tensors=[directory("t", [4, 0])], data=64), r"dimensions in \[1.*\[0, 4\]"),
    "dimension 2^63": (
        raw(tensors=[directory("t", [2**63])], data=64),
        r"'t' must have dimensions",
    ),
    "product 2^64": (raw(tensors=[directory("t", [2**32, 2**32])], data=64), "'t' must end within"),
    "product of 4 overflows": (
        raw(tensors=[directory("t", [2**62, 2**62, 2**62, 2**62])], data=64),
        "'t' must end within the file's",
    ),
    "unknown type": (raw(tensors=[directory("t", [32], 99)], data=64), "not type 99"),
    "type that is not read": (raw(tensors=[directory("t", [32], 40)], data=64), "not NVFP4"),
    "row of no whole blocks": (
        raw(tensors=[directory("t", [33, 2], 8)], data=96),
        "'t' is Q8_0: rows must be multiples of 32 wide, not 33",
    ),
    "tensor twice": (
        raw(tensors=[directory("t", [8]), directory("t", [8], offset=32)], data=64),
        "'t' occurs twice",
    ),
    "offset not aligned": (
        raw(tensors=[directory("t", [4], offset=4)], data=64),
        "'t' must start at a multiple of 32, not at 4",
    ),
    "offset not aligned to its own": (
        raw([ALIGNED], [directory("t", [4], offset=32)], data=128, alignment=64),
        "'t' must start at a multiple of 64, not at 32",
    ),
    "offset 2^64 - 32": (
        raw(tensors=[directory("t", [4], offset=2**64 - 32)], data=64),
        "'t' must end within the file's",
    ),
    "tensor behind the end": (
        raw(tensors=[directory("t", [8]), directory("u", [8], offset=32)], data=63),
        "'u' must end within the file's",
    ),
    "tensors overlap": (
        raw(tensors=[directory("t", [16]), directory("u", [8], offset=32)], data=64),
        "'u' overlaps tensor 't'",
    ),
    "alignment 0": (raw([entry("general.alignment", U32, u32(0))]), r"general.alignment: must be"),
    "alignment 48": (raw([entry("general.alignment", U32, u32(48))]), "a power of two in 8..4096"),
    "alignment 4": (raw([entry("general.alignment", U32, u32(4))]), "a power of two in 8..4096"),
    "alignment 8192": (raw([entry("general.alignment", U32, u32(8192))]), "a power of two"),
    "alignment a string": (raw([entry("general.alignment", STRING, string("32"))]), "an integer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ModelError, match=rf"^model\.gguf.*{message}") as error:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert peak < 1 << 20


def test_a_file_of_the_public_package(tmp_path: Path) -> None:
    values = {
        "a.text": "héllo",
        "a.number": 7,
        "a.fraction": 1e-6,
        "a.yes": True,
        "a.words": ["", "ab", "日本"],
        "a.ints": [3, -4, 5],
        "a.floats": [0.5, -1.25],
        "a.nested": [[1, 2], [3]],
    }
    tensors = {
        "m": np.arange(64 * 3, dtype=np.float32).reshape(3, 64),
        "v": np.ones(5, np.float32),
        "c": np.zeros((2, 3, 32), np.float32),
    }
    types = {"m": "Q8_0", "c": "Q4_0"}
    path = write_with_package(tmp_path / "model.gguf", "llama", values, tensors, types)
    file = read_gguf(path)
    meta = file.metadata
    assert meta.string("a.text") == "héllo" and meta.integer("a.number", 0, 9) == 7
    assert meta.number("a.fraction", 0, 1) == 1e-6  # not the nearest fp32
    assert meta.boolean("a.yes", False) is True
    assert meta.string_array("a.words", 3) == ["", "ab", "日本"]
    assert meta.integer_array("a.ints", 3) == [3, -4, 5]
    assert meta.number_array("a.floats", 2) == [0.5, -1.25]
    assert meta.string_array("a.nothing", 1) == [] and meta.array_length("a.words") == 3
    assert {(t.name, t.type.name, t.shape, t.size) for t in file.tensors} == {
        ("m", "Q8_0", (3, 64), 3 * 2 * 34),
        ("v", "F32", (5,), 20),
        ("c", "Q4_0", (2, 3, 32), 6 * 18),
    }
    vector = file.tensor("v")
    assert np.array_equal(np.frombuffer(file.read(vector, 20), np.float32), np.ones(5))
    with pytest.raises(ModelError, match="'v' must have at most 19 bytes, not 20"):
        file.read(vector, 19)
    with path.open("r+b") as cut:
        cut.truncate(vector.start + 3)
    with pytest.raises(ModelError, match="become shorter"):
        file.read(vector, 20)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 16, 4096])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(
        raw(
            [entry("general.alignment", U32, u32(alignment))],
            [directory("b", [2], offset=alignment), directory("a", [2])],
            data=alignment + 8,
            version=version,
            alignment=alignment,
        )
    )
    first, second = read_gguf(path).tensors  # in the order of their data
    assert (first.name, second.name) == ("a", "b")
    assert first.start % alignment == 0 and second.start == first.start + alignment


def test_wrong_arrays(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    words = array(STRING, 2, string("ab") + string(b"\xff"))
    path.write_bytes(
        raw(
            [
                entry("words", ARRAY, words),
                entry("floats", ARRAY, array(F32, 1, bytes(4))),
                entry("nested", ARRAY, nested(4)),
                entry("one", U8, b"\x01"),
            ]
        )
    )
    meta = read_gguf(path).metadata
    with pytest.raises(ModelError, match=r"model.gguf words: must hold valid UTF-8, not b'\\xff'"):
        meta.string_array("words", 2)
    with pytest.raises(ModelError, match=r"words: must have at most 1 values, not 2"):
        meta.string_array("words", 1)
    for key, shown in (("floats", "1 FLOAT32 values"), ("nested", "1 ARRAY values"), ("one", "1")):
        with pytest.raises(ModelError, match=f"{key}: must be an array of integers, not .*{shown}"):
            meta.integer_array(key, 9)
    with pytest.raises(ModelError, match="words: must be an integer"):
        meta.integer("words", 0, 9)
    with pytest.raises(ModelError, match="one: must be a string, not 1"):
        meta.string("one")


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw([entry("a", STRING, string("x" * 500)), entry("b", U8, b"\x01")]))
    monkeypatch.setattr(reader, "CHUNK_BYTES", 16)  # lengths and values span chunks
    assert len(read_gguf(path).metadata.string("a")) == 500
    monkeypatch.setattr(reader, "MAX_HEAD_BYTES", 1 << 8)
    with pytest.raises(ModelError, match="key 'a' must lie in the first"):
        read_gguf(path)
    monkeypatch.setattr(reader, "MAX_ENTRIES", 1)
    with pytest.raises(ModelError, match="metadata entries must be at most 1 "):
        read_gguf(path)


def test_strings_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word {index}" * (index % 7) for index in range(200)]
    path = write_with_package(tmp_path / "model.gguf", "llama", {"words": words}, {})
    for chunk in (1, 7, 8, 64):
        monkeypatch.setattr(reader, "CHUNK_BYTES", chunk)
        assert read_gguf(path).metadata.string_array("words", 200) == words


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^no.gguf: cannot be read \(No such file"):
        read_gguf(tmp_path / "no.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(tmp_path)


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no time."""
    path = tmp_path / "model.gguf"
    path.write_bytes(raw(tensors=[directory("t", [1 << 19, 1 << 19])]))
    with path.open("r+b") as file:
        file.truncate(1 << 41)
    tracemalloc.start()
    (tensor,) = read_gguf(path).tensors
    assert tensor.size == 1 << 40
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
