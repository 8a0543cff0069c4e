"""Models that benchmarks write have the tensors of real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import save_tiny

from kvik.models.model_spec import ModelSpec
from kvik.nn.safetensors import read_header
from kvik_bench.scripts import tensor_shapes

DELTA = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("family", "options"),
    [("Llama", {}), ("Qwen2", {"tie_word_embeddings": True}), ("Qwen3_5", DELTA)],
)
def test_tensors_are_those_that_transformers_stores(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **options)
    spec = ModelSpec.from_config(json.loads((tmp_path / "config.json").read_text()), family)
    stored = read_header(tmp_path / "model.safetensors")
    assert tensor_shapes(spec) == {entry.name: tuple(entry.shape) for entry in stored}
