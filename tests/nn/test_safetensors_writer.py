"""Files that safetensors and kvik read, whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvik.nn import safetensors
from kvik.nn.safetensors import Stored, read_header, write_safetensors

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


def test_safetensors_reads_it(tmp_path: Path) -> None:
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
    """Copied in pieces; the order in which they are given does not count."""
    monkeypatch.setattr(safetensors, "PIECE", 7)
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
