"""Saved folders load in transformers, if a backend for the layout is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.rounded_blocks import meaning, rounded_blocks
from helpers.tiny_models import reference_logits, save_tiny, tokens

from kvik.quantize import save
from kvik.quantize.recipe import Recipe
from kvik.quantize.save import Output, quantise_folder
from kvik.quantize.source import open_source

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
EIGHT = {"bits": 8, "group_size": -1}
MIXED = dict.fromkeys((f"model.layers.1.self_attn.{x}_proj" for x in "qkv"), 8)
# By the packages that transformers requires.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "compressed_tensors": {
        "rtn": {"method": "rtn"},
        "rtn-asym": {"method": "rtn", "symmetric": False},
        "rtn-rows": {"method": "rtn", "group_size": -1},
        "rtn-8": {"method": "rtn"} | EIGHT,
        "rtn-some": {"method": "rtn", "skip": ("*.1.mlp.*",)},
        "awq-3": {"method": "awq", "bits": 3},
        "smoothquant": {"method": "smoothquant"} | EIGHT,
        "fp8": {"method": "fp8"} | EIGHT,
        "fp8-one": {"method": "fp8", "bits": 8, "group_size": 0},
        "fp8-static": {"method": "fp8", "activation_scheme": "static"} | EIGHT,
        "mixed": {"method": "rtn", "average_bits": 5.0, "layer_bits": MIXED},
        "mixed-static": {
            "method": "gptq", "average_bits": 5.0, "layer_bits": MIXED, "act_order": True,
            "static_groups": True,
        },
    },
    "accelerate": {"fp8-blocks": {"method": "fp8", "bits": 8, "group_size": 128}},
    "gptqmodel": {
        "gptq": {"method": "gptq"},
        "gptq-asym": {"method": "gptq", "symmetric": False},
        "gptq-order": {"method": "gptq", "act_order": True},
        "awq": {"method": "awq", "symmetric": False},
    },
}  # fmt: skip
# Errors of logits: accelerate's path dequantises to bf16, and GPTQModel's kernels round inputs.
OFF = {"compressed_tensors": 1e-5, "accelerate": 0.02, "gptqmodel": 0.01}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize(
    ("package", "case"), [(package, case) for package in CASES for case in CASES[package]]
)
def test_transformers_reads_the_intended_weights(
    package: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(save, "quantise_blocks", rounded_blocks)
    monkeypatch.setattr(save, "choose_bits", lambda folder, spec, recipe, *rest: recipe)
    twin = save_tiny(tmp_path / "plain", "Llama", **SIZES, tie_word_embeddings=False)
    recipe = Recipe(**{"group_size": 32} | CASES[package][case])
    source = open_source(tmp_path / "plain")
    output = Output(tmp_path / "q", source)
    windows = torch.zeros(1, 8, dtype=torch.int64)
    quantise_folder(source, recipe, windows, output, lambda what, share: None)
    output.report({})
    twin.load_state_dict(meaning(tmp_path / "plain", recipe))
    # Dequantised at load, so that weights without rounded inputs are compared; this requires one
    # scheme for all layers. takes one scheme for all layers.
    options: dict[str, Any] = {}
    if package == "compressed_tensors" and recipe.average_bits is None:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype="float32", **options
    )
    ids = tokens(24)
    expected, found = reference_logits(twin, ids), reference_logits(loaded, ids)
    assert float((found - expected).norm() / expected.norm()) < OFF[package]
