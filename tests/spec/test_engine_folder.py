"""The manifest of an engine folder is read back as written, and validated."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvik.errors import ModelError
from kvik.spec.engine_folder import (
    ALIGNMENT,
    MANIFEST,
    WEIGHTS,
    Entry,
    FileFacts,
    Manifest,
    Place,
    check_files,
    file_facts,
    read_built,
    read_manifest,
    verify,
)

SEAL = "5e" * 32
BAD_NAMES = ["..", "x/y", "a\0b", "\ud800"]


def manifest(folder: Path) -> Manifest:
    (folder / WEIGHTS).write_bytes(bytes.fromhex(SEAL).ljust(3 * ALIGNMENT, b"\0"))
    (folder / "config.json").write_text("{}")
    files = {name: file_facts(folder / name) for name in (WEIGHTS, "config.json")}
    entries = {
        "a + b": Entry(
            "int8 group 0",
            {
                "values": Place(ALIGNMENT, "int8", (4, 16)),
                "scales": Place(2 * ALIGNMENT, "float32", (4,)),
            },
        ),
        "norm.weight": Entry("", {"tensor": Place(ALIGNMENT, "bfloat16", (8,))}),
    }
    return Manifest(
        "1.2.3", "torch", "plain-1", "avx2", sys.byteorder, "bfloat16", "int8", SEAL, files, entries
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / MANIFEST).write_text(json.dumps(manifest(tmp_path).as_json()))
    return tmp_path


def test_a_manifest_is_read_back(folder: Path) -> None:
    found = read_manifest(folder)
    assert found == manifest(folder)
    check_files(folder, found)
    assert verify(folder) == 3 * ALIGNMENT + 2
    built = read_built(folder)
    assert built.weight_bytes == 3 * ALIGNMENT


def test_other_folders_are_refused(tmp_path: Path) -> None:
    assert read_built(tmp_path) is None


def place(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["tensors"]["a + b"]["parts"]["scales"].update(changes)


def field(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update(changes)


def of_file(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["files"].update({name: {"size": 0, "sha256": "0" * 64} | changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (field(format=0), "format: is 0, written by kvik '1.2.3'; this kvik reads 1. Build it"),
        (field(format=None), "format: is None"),
        (field(byte_order="middle"), "byte_order: must be one of little, big"),
        (field(kernels="cuda"), "kernels: must be one of native, triton, torch"),
        (field(dtype="int8"), "dtype: must be one of "),
        (field(packing=3), "packing: must be a text"),
        (field(seal="5e"), "seal: must be 64 hexadecimal digits"),
        (field(seal="5E" * 32), "seal: must be 64 hexadecimal digits"),
        (field(files={}), "files: must hold weights.bin"),
        (field(files=[]), "files: must be an object"),
        (field(tensors=[]), "tensors: must be an object"),
        (field(tensors={"x": 1}), "tensors x: must be an object"),
        (of_file("../other"), "files: must name files of its folder, not '../other'"),
        *((of_file(name), "files: must name files of its folder") for name in BAD_NAMES),
        (of_file("x", size=-1), "size: must be an integer in"),
        (of_file("x", sha256="0"), "sha256: must be 64 hexadecimal digits"),
        (place(offset=2 * ALIGNMENT + 4), "offset: must be a multiple of 4096"),
        (place(offset=0), "offset: must be an integer in"),
        (place(offset=3 * ALIGNMENT), "offset: its 16 bytes do not lie within weights.bin"),
        (place(shape=[1 << 40, 1 << 40]), "do not lie within weights.bin"),
        (place(shape=[-4]), "shape: must be a list of sizes"),
        (place(shape=[True]), "shape: must be a list of sizes"),
        (place(shape=[1] * 9), "shape: must be a list of sizes"),
        (place(dtype="object"), "dtype: must be one of uint8, "),
    ],
)
def test_invalid_manifests_are_refused(
    folder: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    values = json.loads((folder / MANIFEST).read_text())
    change(values)
    (folder / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(ModelError) as caught:
        read_manifest(folder)
    text = str(caught.value)
    assert text.startswith(MANIFEST) and message in text and "\n" not in text


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]", b"{", b"[" * 100_000])
def test_invalid_manifest_files(folder: Path, data: bytes) -> None:
    (folder / MANIFEST).write_bytes(data)
    with pytest.raises(ModelError, match=MANIFEST):
        read_manifest(folder)


def test_the_quick_check_reads_no_more_than_the_head_of_the_weights(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] = 1
    (folder / WEIGHTS).write_bytes(data)
    check_files(folder, read_manifest(folder))
    with pytest.raises(ModelError, match="weights.bin: was altered since it was built"):
        verify(folder)


def test_the_facts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_facts(tmp_path / "f") == FileFacts(3, digest)
