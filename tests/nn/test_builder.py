"""What models declare: names, shapes, and the axis that ranks divide."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers.paged_model import PagedModel
from helpers.tiny_models import tiny_model

from kvik.models.model_spec import ModelSpec
from kvik.nn.builder import DeclaredTensor

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
def test_counts_of_the_spec_are_what_is_declared(tied: bool) -> None:
    config = tiny_model("Llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    spec = replace(ModelSpec.from_config(config), tie_word_embeddings=tied)
    tensors = declared(spec)
    assert sum(math.prod(t.shape) for t in tensors.values()) == spec.num_parameters
    assert ("lm_head.weight" in tensors) is not tied


def axes(spec: ModelSpec, *names: str) -> list[int | None]:
    tensors = declared(spec)
    return [tensors[name].shard_axis for name in names]


def test_shard_axes_of_llama_are_megatrons() -> None:
    config = tiny_model("Llama", **FAMILIES["Llama"]).config.to_dict()
    spec = ModelSpec.from_config(config | {"architectures": ["LlamaForCausalLM"]})
    layer = "model.layers.0."
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert axes(spec, f"{layer}{name}.weight", f"{layer}{name}.bias") == [0, 0]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert axes(spec, f"{layer}{name}.weight", f"{layer}{name}.bias") == [1, None]
    assert axes(spec, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight") == [
        0,
        0,
        None,
    ]


def test_shard_axes_of_transposed_weights() -> None:
    config = tiny_model("GPT2").config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    layer = "transformer.h.0."
    names = (f"{layer}attn.c_attn.weight", f"{layer}attn.c_proj.weight", "transformer.wpe.weight")
    assert axes(ModelSpec.from_config(config), *names) == [1, 0, None]
