"""Layers with a state, as described by config.json."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.configs import PUBLIC, small

from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import StateSpec, group_layers


def lfm2(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config(small(architectures=["Lfm2ForCausalLM"], **changes))


def qwen(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config(small(architectures=["Qwen3_5ForCausalLM"], **changes))


def test_layers_with_a_state_are_in_no_kv_group() -> None:
    spec = ModelSpec.from_config(PUBLIC["LFM2-1.2B"])
    (group,) = group_layers(spec.kv_specs(2))
    assert group.layers == (2, 5, 8, 10, 12, 14)
    assert spec.states == (StateSpec(2048, 3),) * 10
    assert spec.state_bytes == 10 * 2 * 2048 * 4
    assert spec.intermediate_size == 8192


def test_every_fourth_layer_attends_by_default() -> None:
    assert [layer.state is None for layer in qwen().layers] == [False, False, False, True]
    spec = qwen(full_attention_interval=2, linear_conv_kernel_dim=3)
    assert [layer.state is None for layer in spec.layers] == [False, True, False, True]
    assert spec.states[0] == StateSpec.recurrent(16, 32, 128, 128, 3)
    assert spec.layers[1].rope.fraction == 0.25


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (lfm2, {"conv_L_cache": 1}, "conv_L_cache:"),
        (lfm2, {"layer_types": ["conv"] * 4}, "layer_types:"),
        (lfm2, {"full_attn_idxs": [4]}, "full_attn_idxs: "),
        (
            lfm2,
            {"layer_types": ["conv", "linear_attention", "conv", "full_attention"]},
            "layer_types:",
        ),
        (qwen, {"layer_types": ["full_attention"] * 3}, "layer_types:"),
        (qwen, {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim: "),
        (qwen, {"linear_num_value_heads": 24}, "linear_num_value_heads:"),
        (qwen, {"full_attention_interval": 9}, "layer_types:"),
    ],
)
def test_bad_facts_are_named(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        make(**changes)
