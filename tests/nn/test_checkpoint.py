"""Finding the weights of a folder and reading them through a memory map."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvik.config.errors import ModelError
from kvik.nn.checkpoint import INDEX, SINGLE, TORCH_DTYPES, open_checkpoint
from kvik.nn.safetensors import DTYPE_BITS


def save_sharded(folder: Path, shards: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    """Write shards; returns their weight map, which is written to the index too."""
    owners = {}
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
        owners |= dict.fromkeys(tensors, file)
    write_index(folder, {"metadata": {}, "weight_map": owners})
    return owners


def write_index(folder: Path, values: object) -> None:
    (folder / INDEX).write_text(json.dumps(values))


TWO = {"1.safetensors": {"a": torch.ones(2)}, "2.safetensors": {"b": torch.ones(3)}}


def test_a_single_file(tmp_path: Path) -> None:
    tensors = {
        "f32": torch.randn(5, 3),
        "bf16": torch.randn(7).bfloat16(),
        "byte": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(4.0, dtype=torch.float64),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.entries) == set(tensors)
    assert checkpoint.num_bytes == sum(t.nbytes for t in tensors.values())
    read = {name: tensor.clone() for name, tensor in checkpoint.tensors()}
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_data_at_an_odd_byte(tmp_path: Path) -> None:
    """Nothing in the format aligns the data."""
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    for padding in range(4):
        text = header + b" " * padding
        data = torch.tensor([1.5, -2.0]).numpy().tobytes()
        (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)
        ((_, tensor),) = open_checkpoint(tmp_path).tensors()
        assert tensor.tolist() == [1.5, -2.0]


def test_shards_with_an_index(tmp_path: Path) -> None:
    save_sharded(tmp_path, TWO)
    read = {name: tensor.tolist() for name, tensor in open_checkpoint(tmp_path).tensors()}
    assert read == {"a": [1.0] * 2, "b": [1.0] * 3}


def test_a_shard_behind_a_link(tmp_path: Path) -> None:
    """The cache of the hub is made of links."""
    (tmp_path / "blobs").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0f")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / SINGLE).symlink_to(tmp_path / "blobs" / "0f")
    assert set(open_checkpoint(tmp_path / "model").entries) == {"a"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(ModelError, match=rf"'{name}' is a pickle, which runs code"):
        open_checkpoint(tmp_path)


def test_a_pickle_beside_safetensors_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    assert set(open_checkpoint(tmp_path).entries) == {"a"}


def test_a_folder_without_weights(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=r"^model: must hold model\.safetensors or "):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map: must map tensor names to files"),
        ({"weight_map": {}}, "weight_map: must map tensor names to files"),
        ({"weight_map": ["a"]}, "weight_map: must be an object"),
        ({"weight_map": {"a": 1}}, "must name files of its folder, not 1"),
        ({"weight_map": {"a": "../1.safetensors"}}, "must name files of its folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "must name files of its folder"),
        ({"weight_map": {"a": "x/1.safetensors"}}, "must name files of its folder"),
        ({"weight_map": {"a": "1.bin"}}, "must name files of its folder"),
        ({"weight_map": {"a": "3.safetensors"}}, "3.safetensors: cannot be read"),
        ({"weight_map": {"a": "1.safetensors"}}, None),
        ({"weight_map": {"a": "2.safetensors"}}, "'b': " + INDEX + " does not list it"),
        (
            {"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}},
            "puts tensor 'b' in 1.safetensors, which lacks it",
        ),
        (
            {"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}},
            "'a': " + INDEX + " puts it in '2.safetensors'",
        ),
    ],
)
def test_an_index_that_lies(tmp_path: Path, index: object, message: str | None) -> None:
    save_sharded(tmp_path, TWO)
    write_index(tmp_path, index)
    if message is None:  # the index decides which files belong to the model
        assert set(open_checkpoint(tmp_path).entries) == {"a"}
        return
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    save_sharded(tmp_path, TWO)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "2.safetensors")
    with pytest.raises(ModelError, match=r"2\.safetensors: tensor 'a': .* puts it in '1\."):
        open_checkpoint(tmp_path)


def test_every_dtype_has_its_size_in_torch() -> None:
    assert {name: dtype.itemsize * 8 for name, dtype in TORCH_DTYPES.items()} == DTYPE_BITS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_given_back_while_reading(tmp_path: Path) -> None:
    mib = 1 << 20
    save_file({f"{i}": torch.ones(mib) for i in range(16)}, tmp_path / SINGLE)  # 4 MiB each

    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) * 1024

    before, peak, total = mapped(), 0, 0.0
    for _, tensor in open_checkpoint(tmp_path).tensors():
        total += float(tensor.sum())
        peak = max(peak, mapped() - before)
    assert total == 16 * mib
    assert 3 * mib < peak < 12 * mib
