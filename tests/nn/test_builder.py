"""Declarations of models: names, shapes, and the axis that ranks divide."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers.paged_model import PagedModel
from helpers.tiny_models import tiny_model

from kvik.models.model_spec import ModelSpec
from kvik.nn.parameters import DeclaredTensor

FAMILIES = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"head_dim": 16},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8, "attention_bias": True},
    "GPT2": {"n_inner": 40},
}


def declared(spec: ModelSpec) -> dict[str, DeclaredTensor]:
    tensors = PagedModel(None, spec=spec).builder.declared.tensors
    found = {tensor.name: tensor for tensor in tensors}
    assert len(found) == len(tensors)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(family: str) -> None:
    reference = tiny_model(family, **FAMILIES[family])
    spec = ModelSpec.from_config(reference.config.to_dict() | {"architectures": [
        type(reference).__name__
    ]})  # fmt: skip
    theirs = {name: tuple(p.shape) for name, p in reference.named_parameters()}
    ours = {name: t.shape for name, t in declared(spec).items()}
    assert ours == theirs
    assert spec.num_parameters == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_counts_match_the_declaration(tied: bool) -> None:
    config = tiny_model("Llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    spec = replace(ModelSpec.from_config(config), tie_word_embeddings=tied)
    tensors = declared(spec)
    assert sum(math.prod(t.shape) for t in tensors.values()) == spec.num_parameters
    assert ("lm_head.weight" in tensors) is not tied
