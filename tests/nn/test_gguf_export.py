"""Checkpoints exported as GGUF files, read by the public package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from helpers.gguf_files import dequantize
from helpers.tiny_families import ALL
from helpers.tiny_models import save_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.errors import ModelError
from kvik.gguf.names import gguf_name
from kvik.gguf.reader import write_gguf
from kvik.models.model_spec import read_model_spec
from kvik.nn import checkpoint as reading
from kvik.nn.checkpoint import open_checkpoint
from kvik.nn.gguf_export import gguf_tensors, quantize

FAMILIES = ("Llama", "Qwen2", "Olmo2", "Qwen3", "Gemma", "GPTNeoX")


def export(folder: Path, type: str) -> dict[str, tuple[str, np.ndarray]]:
    """Return the type and the values of each tensor in the file."""
    path = folder / "m.gguf"
    write_gguf(path, {}, gguf_tensors(open_checkpoint(folder), read_model_spec(folder), type))
    return {
        tensor.name: (
            tensor.tensor_type.name,
            quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape.tolist()[::-1]),
        )
        for tensor in GGUFReader(path).tensors
    }


def as_in_a_llama_file(weights: Tensor, heads: int) -> Tensor:
    """Return rows of queries or keys with rotated pairs next to each other."""
    size = len(weights) // heads
    order = [
        head * size + half * (size // 2) + pair
        for head in range(heads)
        for pair in range(size // 2)
        for half in range(2)
    ]
    return weights[order]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_every_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, type: str
) -> None:
    monkeypatch.setattr(reading, "RUN_BYTES", 1 << 10)  # matrices are written in runs
    save_tiny(tmp_path, family, **ALL[family])
    found = export(tmp_path, type)
    weights = load_file(tmp_path / "model.safetensors")
    if family == "Gemma":
        weights.pop("lm_head.weight", None)
    own = read_model_spec(tmp_path).family.gguf_names
    assert {gguf_name(name, own) for name in weights} == set(found)
    for name, weight in weights.items():
        value = weight
        if family == "Llama" and ("q_proj" in name or "k_proj" in name):
            value = as_in_a_llama_file(weight, 4 if "q_proj" in name else 2)
        if "query_key_value" in name:  # each of four heads in turn -> all q, all k, all v
            value = weight.view(4, 3, 16, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)
        if family == "Gemma" and value.dim() == 1:
            value = value + 1.0  # the file has the gains that are multiplied
        kind, values = found[gguf_name(name, own)]
        outer = "embed" in name or "lm_head" in name
        expected = "F32" if value.dim() == 1 else "Q8_0" if outer and type == "Q4_0" else type
        assert kind == expected, name
        rows = value if value.dim() == 2 else value.view(1, -1)
        stored = dequantize(kind, quantize(kind, rows)).view(value.shape)
        assert np.array_equal(values, stored.numpy()), name
        close = {"F32": 0, "BF16": 0.005, "Q8_0": 0.01, "Q4_0": 0.12}[kind]
        assert (stored - value).norm() <= close * value.norm()


# In a model of eight layers, the first, the last and two others have finer types.
K_MIXES = {
    "Q4_K_M": ("Q4_K", ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]),
    "Q5_K_M": ("Q5_K", ["Q6_K", "Q5_K", "Q5_K", "Q6_K", "Q5_K", "Q5_K", "Q6_K", "Q6_K"]),
    "Q6_K": ("Q6_K", ["Q6_K"] * 8),
}


@pytest.mark.parametrize(
    "type", ["Q4_K_M", *(pytest.param(one, marks=pytest.mark.full) for one in ("Q5_K_M", "Q6_K"))]
)
def test_mixes_of_k_quants(tmp_path: Path, type: str) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 8}
    save_tiny(tmp_path, "Llama", **sizes)
    usual, sensitive = K_MIXES[type]
    found = export(tmp_path, type)
    assert (found["output.weight"][0], found["token_embd.weight"][0]) == ("Q6_K", usual)
    for layer, expected in enumerate(sensitive):
        kinds = {
            name.split(".")[2]: kind
            for name, (kind, values) in found.items()
            if name.startswith(f"blk.{layer}.") and values.ndim == 2
        }
        assert kinds.pop("attn_v") == kinds.pop("ffn_down") == expected
        assert len(kinds) == 5 and set(kinds.values()) == {usual}
    weights = load_file(tmp_path / "model.safetensors")
    close = {"Q4_K": 0.075, "Q5_K": 0.038, "Q6_K": 0.019}
    for layer in range(8):
        value = weights[f"model.layers.{layer}.mlp.down_proj.weight"].numpy()
        kind, values = found[f"blk.{layer}.ffn_down.weight"]
        assert np.linalg.norm(values - value) <= close[kind] * np.linalg.norm(value)


def test_rows_without_whole_blocks_are_bf16(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", hidden_size=48, head_dim=12, intermediate_size=64)
    found = export(tmp_path, "Q4_0")
    assert found["blk.0.ffn_up.weight"][0] == "BF16"
    assert found["blk.0.ffn_down.weight"][0] == "Q4_0"


def test_a_tied_head_is_left_out(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # some have both
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, tmp_path / "model.safetensors")
    found = export(tmp_path, "F32")
    assert "output.weight" not in found and len(found) == len(weights) - 2


def test_stretched_positions_have_a_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    save_tiny(tmp_path, "Llama", rope_parameters=rope)
    kind, divisors = export(tmp_path, "F32")["rope_freqs.weight"]
    assert kind == "F32" and divisors.shape == (4,) and divisors[-1] == 8.0 > divisors[0]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.self_attn.q_proj.qweight", torch.ones(4), "qweight.*has no place"),
        ("model.layers.0.self_attn.q_proj.weight", torch.ones(12, 32), "whole heads, of 8 rows"),
        ("model.norm.weight", torch.ones(32, dtype=torch.int8), r"\(I8\) has no place in GGUF"),
        ("model.norm.weight", torch.full((32,), torch.nan), "'output_norm.weight' must hold fini"),
    ],
)
def test_bad_checkpoints(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    save_tiny(tmp_path, "Llama")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, name: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        export(tmp_path, "Q8_0")
    assert not (tmp_path / "m.gguf").exists()
