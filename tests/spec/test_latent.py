"""Models that attend over latent vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.configs import small

from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec
from kvik.planner.families import public_configs
from kvik.spec.kv import group_layers, stored_as
from kvik.spec.layers import LatentSpec


def public(name: str) -> ModelSpec:
    return ModelSpec.from_config(public_configs()[name])


def latent(**changes: Any) -> dict[str, Any]:
    sizes = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return small(**{"architectures": ["DeepseekV3ForCausalLM"], **sizes, **changes})


# Parameters from their model cards (V3.2's by transformers), layers, and numbers of an index key.
PUBLIC = {
    "deepseek-v3": (671_026_419_200, 61, 1536, 0),
    "deepseek-v3.2": (671_877_944_064, 61, 1536, 128),
    "deepseek-v2-lite": (15_706_484_224, 27, None, 0),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models(name: str) -> None:
    parameters, layers, q_rank, index = PUBLIC[name]
    spec = public(name)
    assert spec.latent == LatentSpec(512, 64, 128, 128, q_rank)
    assert (spec.num_kv_heads, spec.head_dim, spec.rotations[0][1]) == (1, 576, 64)
    assert spec.num_parameters == parameters
    specs = spec.kv_specs(2)
    assert spec.kv_bytes_per_token(2) == (1152 + 2 * index) * layers  # 70,272 for DeepSeek-V3
    for format in ("int8", "fp8"):  # a scale per vector
        (group,) = group_layers(stored_as(specs, format))
        assert group.bytes_per_token == (578 + 2 * index) * layers


def test_latent_sizes_are_read() -> None:
    spec = ModelSpec.from_config(latent(q_lora_rank=None, v_head_dim=96, kv_lora_rank=256))
    assert spec.latent == LatentSpec(256, 64, 128, 96, None)
    assert spec.ropes[0].interleaved
    halves = ModelSpec.from_config(latent(rope_interleave=False))
    assert halves.latent == LatentSpec(512, 64, 128, 128, 1536)  # defaults of transformers
    assert not halves.ropes[0].interleaved
    assert ModelSpec.from_config(small()).latent is None


def test_the_temperature_of_yarn() -> None:
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    (rope,) = ModelSpec.from_config(latent(rope_scaling=scaling)).ropes
    assert rope.temperature(1.0) == pytest.approx(0.1 * math.log(40) + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 520}, "kv_lora_rank: must be at most 576 with qk_rope_head_dim (64)"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: must be an integer in [1, 576], not 0"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: must be even, not 63"),
        ({"qk_nope_head_dim": 577}, "qk_nope_head_dim: must be an integer in [1, 576], not 577"),
        ({"v_head_dim": "128"}, "v_head_dim: must be an integer"),
        ({"q_lora_rank": 0}, "q_lora_rank: must be an integer"),
        ({"rope_interleave": 1}, "rope_interleave: must be true or false"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"},
            "topk_method: must be one of greedy, group_limited_greedy",
        ),
    ],
)
def test_invalid_latents(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config(latent(**changes))
    assert message in str(caught.value)
