"""Models out of GGUF files, against those out of the checkpoints that they were made from."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.gguf_files import llama_file
from helpers.paged_model import PagedModel
from helpers.tiny_models import save_tiny, tokens
from safetensors.torch import load_file, save_file

from kvik.errors import ModelError
from kvik.gguf.export import model_metadata, token_id_metadata
from kvik.gguf.writer import write_gguf
from kvik.models.model_spec import read_model_spec
from kvik.nn import gguf_checkpoint as module
from kvik.nn.checkpoint import open_checkpoint
from kvik.nn.gguf_blocks import dequantize
from kvik.nn.gguf_checkpoint import open_gguf
from kvik.nn.gguf_export import gguf_tensors
from kvik.nn.gguf_quantize import quantize

FAMILIES = {
    "Llama": {"hidden_size": 64, "intermediate_size": 96, "attention_bias": True},
    "Qwen2": {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True},
    "Olmo2": {"hidden_size": 64, "intermediate_size": 96},
    "Qwen3": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    "GPTNeoX": {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4},
}
HEAD = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
WIDE = {"hidden_size": 64, "intermediate_size": 96}
MORE = {
    "Gemma": HEAD,
    "Gemma3": {**HEAD, "num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 16},
    "Phi3": {**WIDE, "sliding_window": 7},
    "Phi": WIDE,
    "Starcoder2": {**WIDE, "sliding_window": None},
    "StableLm": {**WIDE, "use_qkv_bias": True, "use_parallel_residual": True},
    "Cohere": {**WIDE, "logit_scale": 0.3},
    "Cohere2": {**HEAD, "num_hidden_layers": 5, "sliding_window": 9},
    "Granite": {
        **WIDE,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 6.0,
    },
    "Glm4": {
        **HEAD,
        "attention_bias": True,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "Exaone4": {**HEAD, "num_hidden_layers": 5, "sliding_window": 9},
    "SmolLM3": {**WIDE, "num_hidden_layers": 4},
    "SeedOss": {**HEAD, "residual_dropout": 0.0, "attention_dropout": 0.0},
}


def export(folder: Path, type: str) -> Path:
    spec, path = read_model_spec(folder), folder / "m.gguf"
    metadata = {**model_metadata(spec, "tiny", type), **token_id_metadata(spec)}
    write_gguf(path, metadata, gguf_tensors(open_checkpoint(folder), spec, type))
    return path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("type", ["F32", "BF16", "F16", "Q8_0"])
def test_the_same_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, type: str
) -> None:
    """Rows of queries and keys in the order of checkpoints, also those of blocks."""
    monkeypatch.setattr(module, "RUN_BYTES", 1 << 12)  # matrices come in runs
    save_tiny(tmp_path, family, **FAMILIES[family])
    weights = load_file(tmp_path / "model.safetensors")
    weights = {n: t for n, t in weights.items() if n in open_checkpoint(tmp_path).entries}
    stored = {
        name: quantize(type, tensor).view(len(tensor), -1)
        for name, tensor in weights.items()
        if tensor.dim() == 2
    }
    checkpoint = open_gguf(export(tmp_path, type))
    entries = checkpoint.entries
    assert set(entries) == set(weights)
    for in_runs in (True, False):
        found: dict[str, list[torch.Tensor]] = {}
        for run in checkpoint.runs(dict.fromkeys(weights, in_runs)):
            rows = found.setdefault(run.name, [])
            assert run.first == sum(len(before) for before in rows)
            rows.append(run.values.clone())
        for name, rows in found.items():
            values, entry = torch.cat(rows), entries[name]
            assert (tuple(values.shape), values.nbytes) == (entry.shape, entry.size)
            if name not in stored:
                assert torch.equal(values, weights[name])
            else:
                assert torch.equal(values.view(torch.uint8).view(len(values), -1), stored[name])
        most = max(len(rows) for rows in found.values())
        assert most >= 2 if in_runs else most == 1
    assert list(checkpoint.runs({})) == []


def multiplied_out(folder: Path, type: str) -> Path:
    """The checkpoint whose numbers are those of the file that `export` makes."""
    spec, twin = read_model_spec(folder), folder / "twin"
    twin.mkdir(exist_ok=True)
    (twin / "config.json").write_text((folder / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = "Q8_0" if type == "Q4_0" and ("embed" in name or name == "lm_head.weight") else type
        tensors[name] = dequantize(own, quantize(own, tensor)) if tensor.dim() == 2 else tensor
    if spec.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, twin / "model.safetensors")
    return twin


@pytest.mark.parametrize(
    ("family", "type"),
    [(family, type) for family in FAMILIES for type in ("F32", "Q8_0", "Q4_0")]
    + [(family, type) for family in MORE for type in ("F32", "Q4_0")],
)
def test_the_same_model(tmp_path: Path, family: str, type: str) -> None:
    save_tiny(tmp_path, family, **{**FAMILIES, **MORE}[family])
    ids = tokens(20)
    expected = PagedModel(multiplied_out(tmp_path, type)).step({0: ids})[0]
    logits = PagedModel(export(tmp_path, type)).step({0: ids})[0]
    assert torch.equal(logits, expected)


def test_names_without_a_place_are_left_for_the_loader(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_qkv.weight": np.zeros((4, 4), np.float32),
        "rope_freqs.weight": np.frombuffer(struct.pack("<4f", 1, 1, 1, 1), np.float32),
    }
    checkpoint = open_gguf(llama_file(tmp_path / "m.gguf", tensors=tensors))
    assert set(checkpoint.entries) == {"model.embed_tokens.weight", "blk.0.attn_qkv.weight"}


def test_half_a_head(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_k.weight": np.zeros((12, 32), np.float32)}
    path = llama_file(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(ModelError, match=r"attn_k.weight' must have whole heads, of 8 rows each"):
        open_gguf(path)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "m.gguf")
    checkpoint = open_gguf(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(ModelError, match="has become shorter"):
        list(checkpoint.runs({"model.embed_tokens.weight": True}))
