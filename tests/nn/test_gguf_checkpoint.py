"""Models out of GGUF files, against those out of the checkpoints that they were made from."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import paged_model
from helpers.gguf_files import llama_file
from helpers.paged_model import PagedModel
from helpers.tiny_models import save_tiny, tokens
from safetensors.torch import load_file

from kvik.config.errors import ModelError
from kvik.config.model_spec import ModelSpec, read_model_spec
from kvik.gguf.export import model_metadata, token_id_metadata
from kvik.gguf.facts import model_config
from kvik.gguf.reader import read_gguf
from kvik.gguf.writer import write_gguf
from kvik.nn import gguf_checkpoint as module
from kvik.nn.checkpoint import open_checkpoint
from kvik.nn.gguf_checkpoint import GgufCheckpoint, open_gguf
from kvik.nn.gguf_export import gguf_tensors

FAMILIES = {
    "Llama": {"hidden_size": 64, "intermediate_size": 96, "attention_bias": True},
    "Qwen2": {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True},
    "Qwen3": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
}


def export(folder: Path, type: str) -> Path:
    spec, path = read_model_spec(folder), folder / "m.gguf"
    metadata = {**model_metadata(spec, "tiny", type), **token_id_metadata(spec)}
    write_gguf(path, metadata, gguf_tensors(open_checkpoint(folder), spec, type))
    return path


def opened(path: Path) -> tuple[GgufCheckpoint, ModelSpec]:
    file = read_gguf(path)
    spec = ModelSpec.from_config(model_config(file))
    return open_gguf(file, spec), spec


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(module, "RUN_BYTES", 1 << 12)  # matrices come in runs
    save_tiny(tmp_path, family, **FAMILIES[family])
    weights = load_file(tmp_path / "model.safetensors")
    weights = {n: t for n, t in weights.items() if n in open_checkpoint(tmp_path).entries}
    checkpoint, _ = opened(export(tmp_path, "F32"))
    entries = checkpoint.entries
    assert {name: entry.shape for name, entry in entries.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights.items()
    }
    assert {name: entry.size for name, entry in entries.items()} == {
        name: tensor.nbytes for name, tensor in weights.items()
    }
    for in_runs in (True, False):
        found: dict[str, list[torch.Tensor]] = {}
        for run in checkpoint.runs(dict.fromkeys(weights, in_runs)):
            rows = found.setdefault(run.name, [])
            assert run.first == sum(len(before) for before in rows)
            rows.append(run.values.clone())
        assert {name: torch.cat(rows).equal(weights[name]) for name, rows in found.items()} == (
            dict.fromkeys(weights, True)
        )
        most = max(len(rows) for rows in found.values())
        assert most > 2 if in_runs else most == 1
    assert list(checkpoint.runs({})) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    save_tiny(tmp_path, family, **FAMILIES[family])
    ids = tokens(20)
    expected = PagedModel(tmp_path).step({0: ids})[0]
    for type in ("F32", "Q8_0", "Q4_0"):
        checkpoint, spec = opened(export(tmp_path, type))
        monkeypatch.setattr(paged_model, "open_checkpoint", lambda folder, c=checkpoint: c)
        logits = PagedModel(tmp_path, spec=spec).step({0: ids})[0]
        error = ((logits - expected).norm() / expected.norm()).item()
        assert error <= {"F32": 0.0, "Q8_0": 0.05, "Q4_0": 0.5}[type], (type, error)
        monkeypatch.undo()


def test_sizes_are_those_of_the_values(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **FAMILIES["Llama"])
    checkpoint, _ = opened(export(tmp_path, "Q4_0"))
    entries = checkpoint.entries
    for run in checkpoint.runs(dict.fromkeys(entries, False)):
        assert run.values.dtype == torch.float32
        assert run.values.nbytes == entries[run.name].size


def test_names_without_a_place_are_left_for_the_loader(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32),
        "rope_freqs.weight": np.frombuffer(struct.pack("<4f", 1, 1, 1, 1), np.float32),
    }
    checkpoint, _ = opened(llama_file(tmp_path / "m.gguf", tensors=tensors))
    assert set(checkpoint.entries) == {"model.embed_tokens.weight", "blk.0.attn_qkv.weight"}


def test_half_a_head(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_k.weight": np.zeros((12, 32), np.float32)}
    path = llama_file(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(ModelError, match=r"attn_k.weight' must have whole heads, of 8 rows each"):
        opened(path)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "m.gguf")
    checkpoint, _ = opened(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(ModelError, match="has become shorter"):
        list(checkpoint.runs({"model.embed_tokens.weight": True}))
