"""Headers of safetensors files: valid ones are read, each invalid one is one clear error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvik.errors import ModelError
from kvik.nn import safetensors
from kvik.nn.safetensors import Stored, TensorEntry, read_header, write_safetensors


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: bytes | object, data: int = 0, length: int | None = None) -> bytes:
    """Return a file with a header, `data` zero bytes, and a claimed header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


GOOD = {"a": entry([2, 3], 0, 24), "b": entry([4], 24, 32, "BF16")}

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "must start with 8 bytes"),
    "shorter than a length": (b"\x01\x00", "must start with 8 bytes"),
    "header longer than the file": (raw(GOOD, 32, length=10**6), "it claims 1000000"),
    "header of 2^64 - 1 bytes": (raw(GOOD, 32, length=2**64 - 1), "it claims 1844674407"),
    "empty header": (raw(b""), "not valid JSON"),
    "no JSON": (raw(b"{" * 40), "not valid JSON"),
    "no UTF-8": (raw(b'{"\xff": 1}'), "not valid JSON"),
    "bottomless JSON": (raw(b"[" * 100_000), "not valid JSON"),
    "endless number": (raw(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a list": (raw([1, 2]), "must be a JSON object"),
    "a string": (raw("abc"), "must be a JSON object"),
    "name twice": (raw(b'{"a": {}, "a": {}}'), "names 'a' twice"),
    "key twice": (
        raw(b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [], "data_offsets": [0, 4]}}', 4),
        "names 'dtype' twice",
    ),
    "metadata of numbers": (raw({"__metadata__": {"x": 1}}), "__metadata__"),
    "metadata no object": (raw({"__metadata__": "x"}), "__metadata__"),
    "entry no object": (raw({"a": 3}), "exactly dtype, shape and data_offsets"),
    "entry lacks a key": (raw({"a": {"dtype": "F32", "shape": [1]}}), "exactly dtype"),
    "entry has another key": (raw({"a": {**entry([1], 0, 4), "x": 1}}, 4), "exactly dtype"),
    "unknown dtype": (raw({"a": entry([1], 0, 4, "F33")}, 4), "dtype must be one of"),
    "dtype no string": (raw({"a": entry([1], 0, 4, [])}, 4), "dtype must be one of"),
    "negative size": (raw({"a": entry([-1, -1], 0, 4)}, 4), "shape must be"),
    "fractional size": (raw({"a": entry([1.0], 0, 4)}, 4), "shape must be"),
    "boolean size": (raw({"a": entry([True], 0, 4)}, 4), "shape must be"),
    "shape no list": (raw({"a": {**entry([1], 0, 4), "shape": 1}}, 4), "shape must be"),
    "many dimensions": (raw({"a": entry([1] * 9, 0, 4)}, 4), "at most 8 sizes"),
    "product overflows": (raw({"a": entry([2**62] * 4, 0, 4)}, 4), "takes"),
    "size of 2^63": (raw({"a": entry([2**63, 0], 0, 0)}), "shape must be"),
    "negative offset": (raw({"a": entry([1], -4, 0)}, 4), "data_offsets must be"),
    "one offset": (raw({"a": {**entry([1], 0, 4), "data_offsets": [0]}}, 4), "data_offsets"),
    "offsets reversed": (raw({"a": entry([1], 4, 0)}, 4), "begin <= end"),
    "too few bytes for the shape": (raw({"a": entry([2], 0, 4)}, 4), "takes 8 bytes"),
    "too many bytes for the shape": (raw({"a": entry([1], 0, 8)}, 8), "takes 4 bytes"),
    "beyond the end": (raw({"a": entry([2], 0, 8)}, 4), "need 8 bytes of data, 4 are there"),
    "bytes left over": (raw({"a": entry([1], 0, 4)}, 5), "need 4 bytes of data, 5 are there"),
    "no tensors, but data": (raw({}, 4), "need 0 bytes of data, 4 are there"),
    "overlap": (raw({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12), "'b' overlaps"),
    "same bytes": (raw({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, 8), "'b' overlaps"),
    "gap": (raw({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12), "'b' leaves a gap"),
    "gap at the start": (raw({"a": entry([1], 4, 8)}, 8), "'a' leaves a gap"),
    "endless name": (raw({"n" * 10**5: 3}), "..."),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_invalid_headers_give_one_line_errors(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    text = str(caught.value)
    assert text.startswith("model.safetensors: ") and message in text
    assert "\n" not in text and len(text) < 300 and str(tmp_path) not in text


@settings(max_examples=examples(300))
@given(where=st.integers(0, 200), byte=st.binary(max_size=3), cut=st.integers(0, 40))
def test_any_damage_is_detected_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, where: int, byte: bytes, cut: int
) -> None:
    data = raw(GOOD, 32)
    data = data[:where] + byte + data[where + len(byte) :]
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(data[: len(data) - cut])
    try:
        entries = read_header(path)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert sum(e.size for e in entries) == path.stat().st_size - entries[0].start


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw(GOOD, 32))
    with pytest.raises(ModelError, match=r"at most 1 tensors, not 2"):
        read_header(path)


def test_a_header_above_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 10)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw(GOOD, 32))
    with pytest.raises(ModelError, match=r"at most 10 bytes"):
        read_header(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^x\.safetensors: cannot be read"):
        read_header(tmp_path / "x.safetensors")


def test_a_valid_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw({"__metadata__": {"format": "pt"}, **GOOD}, 32))
    start = path.stat().st_size - 32
    assert read_header(path) == (
        TensorEntry("a", "F32", (2, 3), start, 24),
        TensorEntry("b", "BF16", (4,), start + 24, 8),
    )


def test_tensors_without_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {"a": entry([0, 5], 0, 0), "b": entry([], 0, 4), "c": entry([0], 4, 4)}
    path.write_bytes(raw(header, 4))
    assert [e.name for e in read_header(path)] == ["a", "b", "c"]
    path.write_bytes(raw({}))
    assert read_header(path) == ()


def test_files_of_the_reference_implementation(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    dtypes = {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F64": torch.float64,
    }
    save_file({name: torch.zeros(3, 2, dtype=dtype) for name, dtype in dtypes.items()}, path)
    entries = read_header(path)
    assert {(e.name, e.dtype, e.shape) for e in entries} == {(n, n, (3, 2)) for n in dtypes}


# Files that safetensors and kvik both read, whole or not at all.


TENSORS = {
    "b.floats": torch.randn(3, 5),
    "a.bytes": torch.arange(7, dtype=torch.uint8),
    "c.halves": torch.randn(2, 3).half(),
    "brains": torch.randn(4).bfloat16(),
    "fp8": torch.randn(3, 3).to(torch.float8_e4m3fn),
    "wide": torch.arange(3),
    "one": torch.tensor(1.5),
    "none": torch.empty(0, 4),
    "turned": torch.randn(4, 6).t(),
    "größe": torch.zeros(1, dtype=torch.int32),
}


def test_the_safetensors_library_reads_written_files(tmp_path: Path) -> None:
    size = write_safetensors(tmp_path / "a", TENSORS)
    assert size == sum(tensor.nbytes for tensor in TENSORS.values())
    found = load_file(tmp_path / "a")
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), raw)
    with safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for entry in read_header(tmp_path / "a"):
        assert entry.start % TENSORS[entry.name].dtype.itemsize == 0


def test_tensors_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied in pieces; the order of arguments does not matter."""
    monkeypatch.setattr(safetensors, "CHUNK", 7)
    save_file({n: t.contiguous() for n, t in TENSORS.items()}, tmp_path / "source")
    stored = {
        entry.name: Stored(tmp_path / "source", entry) for entry in read_header(tmp_path / "source")
    }
    write_safetensors(tmp_path / "a", TENSORS)
    write_safetensors(tmp_path / "b", dict(reversed(list(stored.items()))))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_source_that_was_cut_off_leaves_nothing(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "source")
    (entry,) = read_header(tmp_path / "source")
    data = (tmp_path / "source").read_bytes()
    (tmp_path / "source").write_bytes(data[:-1])
    with pytest.raises(OSError, match="ended early"):
        write_safetensors(tmp_path / "a", {"a": Stored(tmp_path / "source", entry)})
    assert list(tmp_path.iterdir()) == [tmp_path / "source"]
