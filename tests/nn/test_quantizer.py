"""Layers quantised at load: which ones, how, and in how many bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.paged_model import Packing, PagedModel
from helpers.tiny_models import save_tiny, tokens
from safetensors.torch import load_file, save_file

from kvik.errors import ModelError
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.nn.checkpoint import SINGLE

QUANTIZATIONS = ("none", "int8", "int8-weight-only", "int4", "mxfp4", "fp8")
FAMILIES = {
    # A group of 64 divides the hidden size, 32 the inner size, none the heads' width.
    "llama-tied": ("Llama", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 20,
                             "tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"hidden_size": 64, "intermediate_size": 128}),
    "gpt2-tied": ("GPT2", {"n_embd": 64}),
    "experts": ("Glm4Moe", {"hidden_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
                            "moe_intermediate_size": 32, "head_dim": 16}),
}  # fmt: skip
# The matrices of three layers, and one for the head and a tied embedding. With experts: one dense
# layer, two with a router, four experts and a shared one, and a separate head.
MATRICES = {"experts": 4 + 2 * (2 + 1 + 2 * 4 + 2) + 1}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_the_bytes_that_are_loaded(
    family: str, quantization: str, tmp_path: Path
) -> None:
    name, options = FAMILIES[family]
    save_tiny(tmp_path, name, **options)
    packing = Packing()
    model = PagedModel(tmp_path, ops=packing.ops, quantization=quantization, dtype=torch.bfloat16)
    loaded = packing.loaded_bytes(model.spec.num_parameters)
    assert loaded == model.spec.weight_bytes("bfloat16", quantization)
    assert len(packing.weights) == MATRICES.get(family, 4 * 3 + 1)


def test_layers_of_each_kind(tmp_path: Path) -> None:
    name, options = FAMILIES["llama-tied"]
    save_tiny(tmp_path, name, **options)
    model = PagedModel(tmp_path, quantization="int4").model
    layer = model.layers[1]
    assert layer.attention.qkv.linears[0].matrix.spec.kind.group == 64
    assert layer.mlp.up.matrix.spec.kind.group == 64
    assert layer.mlp.down.matrix.spec.kind.group == 32
    assert (
        layer.attention.o.matrix.spec.kind.activations == "token"
    )  # 80 inputs: no group divides them
    assert model.lm_head.matrix.spec.kind.activations == "token"
    assert model.embed.matrix is model.lm_head.matrix
    alone = PagedModel(tmp_path, quantization="int8-weight-only").model
    assert alone.lm_head.matrix.spec.kind.activations == "float"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_implementations_agree(family: str, quantization: str, tmp_path: Path) -> None:
    name, options = FAMILIES[family]
    save_tiny(tmp_path, name, **options)
    ids = tokens(20)
    expected, found = (
        PagedModel(tmp_path, ops=ops, quantization=quantization).logits(ids)
        for ops in (REFERENCE, TORCH)
    )
    # A value halfway between two steps may be rounded to either.
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_random_weights_are_quantised_too(quantization: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    spec = PagedModel(tmp_path).spec
    packing = Packing()
    ids = tokens(9)
    plain = PagedModel(None, spec=spec).logits(ids)
    found = PagedModel(None, spec=spec, ops=packing.ops, quantization=quantization).logits(ids)
    floats = [weight.kind.floats for weight in packing.weights]
    assert all(floats) if quantization == "none" else not any(floats)
    assert (found - plain).norm() < 0.3 * plain.norm()


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_a_tensor_that_cannot_be_rounded_is_named(quantization: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    stored = load_file(tmp_path / SINGLE)
    stored["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.up_proj") as caught:
        PagedModel(tmp_path, quantization=quantization)
    assert "\n" not in str(caught.value)
