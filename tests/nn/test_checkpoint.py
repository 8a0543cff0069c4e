"""Find the weights of a folder and read them in runs."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvik.errors import ModelError
from kvik.nn import checkpoint
from kvik.nn.checkpoint import (
    IN_RUNS,
    INDEX,
    SINGLE,
    WHOLE,
    Checkpoint,
    Selection,
    TensorRun,
    open_checkpoint,
    selected_bytes,
)


def save_sharded(folder: Path, shards: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    """Write shards and their index; return their weight map."""
    owners = {}
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
        owners |= dict.fromkeys(tensors, file)
    write_index(folder, {"metadata": {}, "weight_map": owners})
    return owners


def write_index(folder: Path, values: object) -> None:
    (folder / INDEX).write_text(json.dumps(values))


def whole(found: Checkpoint) -> dict[str, Tensor]:
    """Return all tensors."""
    runs = found.runs(dict.fromkeys(found.entries, WHOLE))
    return {run.name: run.values.clone() for run in runs}


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
    found = open_checkpoint(tmp_path)
    assert set(found.entries) == set(tensors)
    read = whole(found)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_experts_in_one_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    scope = "model.layers.0.mlp.experts"
    gate_up, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4).bfloat16()
    tensors = {f"{scope}.gate_up_proj": gate_up, f"{scope}.down_proj": down, "x": torch.ones(2)}
    save_file(tensors, tmp_path / SINGLE)
    read = whole(open_checkpoint(tmp_path))
    assert len(read) == 3 * 3 + 1
    for expert in range(3):
        gate, up = gate_up[expert].chunk(2)
        assert torch.equal(read[f"{scope}.{expert}.gate_proj.weight"], gate)
        assert torch.equal(read[f"{scope}.{expert}.up_proj.weight"], up)
        assert torch.equal(read[f"{scope}.{expert}.down_proj.weight"], down[expert])


def test_mixed_gate_and_up_stay_one_tensor(tmp_path: Path) -> None:
    scope = "model.layers.0.mlp.experts"
    blocks = torch.arange(2 * 6 * 3 * 16).view(2, 6, 3, 16).to(torch.uint8)
    save_file(
        {
            f"{scope}.gate_up_proj_blocks": blocks,
            f"{scope}.gate_up_proj_scales": torch.ones(2, 6, 3, dtype=torch.uint8),
            f"{scope}.gate_up_proj_bias": torch.randn(2, 6),
        },
        tmp_path / SINGLE,
    )
    read = whole(open_checkpoint(tmp_path))
    assert torch.equal(read[f"{scope}.1.gate_up_proj.blocks"], blocks[1])
    assert read[f"{scope}.0.gate_up_proj.scales"].shape == (6, 3)
    assert read[f"{scope}.1.gate_up_proj.bias"].shape == (6,)


def test_data_at_an_odd_byte(tmp_path: Path) -> None:
    """The format does not align data."""
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    for padding in range(4):
        text = header + b" " * padding
        data = torch.tensor([1.5, -2.0]).numpy().tobytes()
        (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)
        assert whole(open_checkpoint(tmp_path))["a"].tolist() == [1.5, -2.0]


def test_shards_with_an_index(tmp_path: Path) -> None:
    save_sharded(tmp_path, TWO)
    read = whole(open_checkpoint(tmp_path))
    assert {n: t.tolist() for n, t in read.items()} == {"a": [1.0] * 2, "b": [1.0] * 3}


def test_a_shard_behind_a_link(tmp_path: Path) -> None:
    """The hub's cache consists of links."""
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


def test_a_pickle_is_ignored_if_there_are_safetensors(tmp_path: Path) -> None:
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
        ({"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}, "which lacks it"),
        (
            {"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}},
            "'a': " + INDEX + " puts it in '2.safetensors'",
        ),
    ],
)
def test_an_index_that_does_not_match_its_files_is_refused(
    tmp_path: Path, index: object, message: str | None
) -> None:
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


def test_large_tensors_are_read_in_runs_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "RUN_BYTES", 70 * 3 * 4)
    tensors = {
        "a": torch.randn(150, 3),
        "b": torch.randn(70, 3),
        "c": torch.randn(150, 3),
        "d": torch.randn(150),
        "not wanted": torch.randn(150, 3),
    }
    save_file(tensors, tmp_path / SINGLE)
    found: dict[str, list[tuple[int, Tensor]]] = {}
    wanted = {"a": IN_RUNS, "b": IN_RUNS, "c": WHOLE, "d": IN_RUNS}
    for run in open_checkpoint(tmp_path).runs(wanted):
        found.setdefault(run.name, []).append((run.first, run.values.clone()))
    assert [first for first, _ in found["a"]] == [0, 64, 128]  # in whole tiles
    assert [len(found[name]) for name in "bcd"] == [1, 1, 1] and len(found) == 4
    for name, runs in found.items():
        assert torch.equal(torch.cat([values for _, values in runs]), tensors[name])


def test_parts_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, in runs or at once, and of columns."""
    monkeypatch.setattr(checkpoint, "RUN_BYTES", 40 * 6 * 4)
    tensors = {name: torch.randn(150, 6) for name in ("in runs", "at once", "columns", "none")}
    save_file({**tensors, "other": torch.randn(9, 6)}, tmp_path / SINGLE)
    rows = ((3, 4), (40, 120))
    wanted = {
        "in runs": Selection(True, 0, rows),
        "at once": Selection(False, 0, rows),
        "columns": Selection(False, 1, ((0, 1), (3, 5))),
        "none": Selection(True, 0, ()),
    }
    found = open_checkpoint(tmp_path)
    read: dict[str, list[TensorRun]] = {}
    for run in found.runs(wanted):
        read.setdefault(run.name, []).append(TensorRun(run.name, run.first, run.values.clone()))
    assert [run.first for run in read["in runs"]] == [3, 40, 72, 104]
    for run in read["in runs"]:
        whole = tensors["in runs"]
        assert torch.equal(run.values, whole[run.first : run.first + len(run.values)])
    for name in ("at once", "columns"):
        (run,) = read.pop(name)
        assert run.first == 0 and torch.equal(run.values, wanted[name].of(tensors[name]))
        assert run.values.nbytes == selected_bytes(found.entries[name], wanted[name])
    assert torch.equal(wanted["columns"].of(torch.arange(6)[None]), torch.tensor([[0, 3, 4]]))
    assert [*read] == ["in runs"]


@pytest.mark.parametrize("most", [1 << 20, 40 * 5 * 4])
def test_parts_of_experts_in_one_tensor(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if inputs come first, so that rows are columns of the file; a large tensor is read in
    parts."""
    monkeypatch.setattr(checkpoint, "TRANSPOSED_BYTES", most)
    scope = "model.layers.0.feed_forward.experts"
    gate_up, down = torch.randn(3, 5, 160), torch.randn(3, 80, 5)
    save_file({f"{scope}.gate_up_proj": gate_up, f"{scope}.down_proj": down}, tmp_path / SINGLE)
    names = [f"{scope}.2.{part}_proj.weight" for part in ("gate", "up", "down")]
    gate, up = gate_up[2].t().chunk(2)
    found, matrices = (
        open_checkpoint(tmp_path),
        dict(zip(names, (gate, up, down[2].t()), strict=True)),
    )
    for ranges in (None, ((1, 3), (4, 5))):
        read: dict[str, list[int]] = {name: [] for name in names}
        for run in found.runs(dict.fromkeys(names, Selection(True, 0, ranges))):
            whole = matrices[run.name]
            assert torch.equal(run.values, whole[run.first : run.first + len(run.values)])
            read[run.name] += range(run.first, run.first + len(run.values))
            assert run.values.nbytes <= most
        for name, rows in read.items():
            every = ((0, len(matrices[name])),) if ranges is None else ranges
            assert rows == [row for begin, end in every for row in range(begin, end)]


def test_rows_longer_than_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "RUN_BYTES", 8)
    save_file({"a": torch.arange(12.0).view(4, 3)}, tmp_path / SINGLE)
    runs = [(r.first, r.values.tolist()) for r in open_checkpoint(tmp_path).runs({"a": IN_RUNS})]
    assert runs == [(i, [[3.0 * i, 3.0 * i + 1, 3.0 * i + 2]]) for i in range(4)]


@pytest.mark.parametrize("most", [1 << 20, 1 << 10], ids=["at once", "by a thread"])
def test_a_file_that_got_shorter(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "RUN_BYTES", most)
    save_file({"a": torch.ones(1000)}, tmp_path / SINGLE)
    found = open_checkpoint(tmp_path)
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ModelError, match=r"^model\.safetensors: has become shorter"):
        whole(found)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ModelError, match=r"^model\.safetensors: cannot be read \(No such file"):
        whole(found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_needs_memory_for_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    monkeypatch.setattr(checkpoint, "RUN_BYTES", 4 * mib)
    save_file({"a": torch.ones(64 * mib // 4, 1)}, tmp_path / SINGLE)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before, peak, total = resident(), 0, 0.0
    for run in open_checkpoint(tmp_path).runs({"a": IN_RUNS}):
        total += float(run.values.sum())
        peak = max(peak, resident() - before)
    assert total == 16 * mib
    assert peak < 16 * mib


def test_tensors_of_a_layer_are_read_together(tmp_path: Path) -> None:
    """Small tensors first, although the file is sorted by type."""
    tensors = {}
    for layer in ("b", "a"):
        tensors[f"{layer}.qweight"] = torch.zeros(64, 8, dtype=torch.int32)
        tensors[f"{layer}.scales"] = torch.zeros(64, 4, dtype=torch.float16)
        tensors[f"{layer}.g_idx"] = torch.zeros(64, dtype=torch.int32)
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    assert [name.split(".")[1] for name in checkpoint.entries][-2:] == ["scales", "scales"]
    names = [run.name for run in checkpoint.runs(dict.fromkeys(tensors, WHOLE))]
    assert names == [f"{layer}.{part}" for layer in "ab" for part in ("g_idx", "scales", "qweight")]
