"""A forward consists of `Ops`, attention and views, so that these can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
import torch
from helpers.paged_model import PagedModel
from helpers.tiny_models import DELTA, LLAMA4, tiny_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvik.attention.reference import ReferenceAttention
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.models.model_spec import ModelSpec
from kvik.spec.declare import ForwardContext, Network

FAMILIES = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 5},
    "Ministral3": {"head_dim": 8},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Olmo2": {},
    "SmolLM3": {"num_hidden_layers": 4},
    "StableLm": {},
    "Phi3": {},
    "Glm4": {"head_dim": 8},
    "Olmo3": {"num_hidden_layers": 4},
    "Exaone4": {"num_hidden_layers": 4},
    "Cohere": {"use_qk_norm": True},
    "Cohere2": {"num_hidden_layers": 4},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 1.0},
    "Gemma3": {"head_dim": 8, "num_hidden_layers": 6},
    "Gemma4": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_hidden_layers": 6,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "Granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0},
    "GPTNeoX": {"num_key_value_heads": 4},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "Starcoder2": {},
    "OPT": {"word_embed_proj_dim": 20, "do_layer_norm_before": False},
    "GraniteMoeHybrid": {
        "layer_types": ["attention"] * 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 4,
    },
    "Qwen3Moe": {"head_dim": 8, "num_experts": 8, "moe_intermediate_size": 24},
    "Glm4Moe": {"head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 24},
    "Llama4": LLAMA4,
    "DeepseekV2": {
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
    "GPT2": {},
    "GPTJ": {"rotary_dim": 4},
    "GPTNeo": {},
    "Qwen3_5": {"head_dim": 8, "num_hidden_layers": 4, **DELTA},
    "Phimoe": {
        "num_local_experts": 4,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "short_mscale": 1.2,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 64,
        },
    },
    "Lfm2Moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "Nemotron": {},
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}


class Foreign(TorchDispatchMode):
    """Records what torch computes outside of operations and attention; views compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.depth and not func.is_view:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self.inside():
                return function(*args)

        return run

    def ops(self) -> Ops:
        return Ops(**{f.name: self.wrap(getattr(REFERENCE, f.name)) for f in fields(Ops)})


class Watched:
    """A model whose forward and logits run under a `Foreign`."""

    def __init__(self, model: Network, foreign: Foreign) -> None:
        self.model = model
        self.foreign = foreign

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        with self.foreign:
            return self.model.forward(ids, ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.foreign:
            return self.model.logits(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_only_compute_in_operations(family: str, dtype: torch.dtype) -> None:
    config = tiny_model(family, **FAMILIES[family]).config.to_dict()
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    spec = ModelSpec.from_config(config | {"architectures": [family + head]})
    foreign = Foreign()
    backend = ReferenceAttention(REFERENCE)
    paged = PagedModel(None, spec=spec, dtype=dtype, ops=foreign.ops(), backend=backend)
    backend.run = foreign.wrap(backend.run)  # type: ignore[method-assign]
    backend.run_latent = foreign.wrap(backend.run_latent)  # type: ignore[method-assign]
    expected = PagedModel(None, spec=spec, dtype=dtype).logits(tokens(9))
    paged.model = Watched(paged.model, foreign)
    found = paged.logits(tokens(9), chunk=5)
    assert foreign.found == []
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_other_arithmetic_is_detected() -> None:
    foreign = Foreign()
    with foreign:
        x = torch.ones(2, 6)
        x.view(3, 4).unbind(1)
        y = x + x
        with foreign.inside():
            y.mul_(2)
    assert foreign.found == ["aten.ones.default", "aten.add.Tensor"]
