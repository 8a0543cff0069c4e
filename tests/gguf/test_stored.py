"""What the types of a file's tensors mean for its layers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.gguf_files import llama_file, write_with_package

from kvik.gguf.facts import SCHEMES, gguf_model_spec, stored_quantization
from kvik.gguf.reader import read_gguf
from kvik.gguf.types import BLOCK_TYPES
from kvik.spec.stored_weights import BLOCK_LAYOUTS
from kvik.spec.weights import LayerScheme, loaded_scheme

MINIMA = LayerScheme(4, 32, minima=True)
LOADED = {
    "Q8_0": LayerScheme(8, 32),
    "Q4_0": LayerScheme(4, 32, zeros=False),
    "Q4_1": MINIMA,
    "Q5_0": LayerScheme(8, 32),
    "Q5_1": None,
    "Q2_K": LayerScheme(4, 16, minima=True),
    "Q3_K": LayerScheme(4, 16, zeros=False),
    "Q4_K": MINIMA,
    "Q5_K": None,
    "Q6_K": LayerScheme(8, 16),
}


def test_every_type_of_blocks_has_a_scheme() -> None:
    floats = {"F32", "F16", "BF16"}
    assert set(SCHEMES) == set(BLOCK_TYPES) - floats == set(BLOCK_LAYOUTS) == set(LOADED)
    assert all(scheme.layout == name for name, scheme in SCHEMES.items())


@pytest.mark.parametrize("type", LOADED)
def test_what_runs_as_it_is_stored(type: str) -> None:
    assert loaded_scheme(SCHEMES[type], 4096) == LOADED[type]


def test_layers_by_name(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": np.zeros((64, 32), np.float32),
        "blk.0.attn_q.weight": np.zeros((32, 32), np.float32),
        "blk.0.attn_k.weight": np.zeros((32, 32), np.float32),
        "blk.0.something.weight": np.zeros((32, 32), np.float32),
    }
    types = dict(zip(tensors, ("Q8_0", "Q4_0", "BF16", "Q5_0"), strict=True))
    file = read_gguf(write_with_package(tmp_path / "m.gguf", "llama", {}, tensors, types))
    found = stored_quantization(file)
    assert found is not None
    assert found.embedding_scheme("model.embed_tokens") == SCHEMES["Q8_0"]
    assert found.scheme("model.layers.0.self_attn.q_proj") == SCHEMES["Q4_0"]
    assert found.scheme("model.layers.0.self_attn.k_proj") is None
    assert found.scheme("model.layers.1.self_attn.q_proj") is None
    assert str(found) == "gguf: Q8_0; Q4_0"


def test_a_file_of_floats(tmp_path: Path) -> None:
    file = read_gguf(llama_file(tmp_path / "m.gguf"))
    assert stored_quantization(file) is None
    assert gguf_model_spec(file).quantization is None


def test_the_package_agrees_on_sizes() -> None:
    """Groups divide blocks."""
    for name, scheme in SCHEMES.items():
        weights, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert weights % scheme.group == 0
