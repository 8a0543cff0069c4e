"""Models whose layers have heads of two sizes and share keys and values."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.configs import PUBLIC, small

from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import group_layers

SLIDING, FULL = "sliding_attention", "full_attention"


def gemma4(**changes: Any) -> dict[str, Any]:
    types = [SLIDING, SLIDING, FULL, SLIDING, FULL]
    return small(
        **{
            "architectures": ["Gemma4ForCausalLM"],
            "hidden_act": None,
            "num_hidden_layers": len(types),
            "layer_types": types,
            "head_dim": 16,
            "global_head_dim": 32,
            **changes,
        }
    )


def test_layers_read_keys_of_the_last_of_their_kind() -> None:
    spec = ModelSpec.from_config(gemma4(num_kv_shared_layers=2, use_double_wide_mlp=True))
    assert [layer.kv_from for layer in spec.layers] == [None, None, None, 1, 2]
    assert [spec.inner(layer) // spec.intermediate_size for layer in spec.layers] == [1, 1, 1, 2, 2]
    assert [kv and kv.readers for kv in spec.kv_specs(2)] == [1, 2, 2, None, None]
    assert spec.head_dims == (16, 32) and spec.query_width == 32 * spec.num_heads


def test_the_last_layer_sees_all_keys() -> None:
    spec = ModelSpec.from_config(gemma4(layer_types=[SLIDING, FULL, SLIDING, SLIDING, SLIDING]))
    assert [layer.window is None for layer in spec.layers] == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("name", "sizes", "shares"),
    [
        ("gemma-4-e2b", (3, 6, 6), {SLIDING: 2, FULL: 1}),
        ("gemma-4-31b", (10, *(5,) * 10), {SLIDING: 1, FULL: 2}),
    ],
)
def test_blocks_of_both_kinds_are_equally_large(name, sizes, shares) -> None:
    groups = group_layers(ModelSpec.from_config(PUBLIC[name]).kv_specs(2))
    kinds = {group: FULL if group.spec.window is None else SLIDING for group in groups}
    assert sorted(len(group.layers) for group in groups if kinds[group] == SLIDING) == [
        *sorted(sizes[1:])
    ]
    assert [len(group.layers) for group in groups if kinds[group] == FULL] == [sizes[0]]
    assert all(group.shares == shares[kind] for group, kind in kinds.items())
    assert len({group.bytes_per_token for group in groups}) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers:"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers:"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types:"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention:"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input:"),
        ({"global_head_dim": 31}, "global_head_dim:"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_global_key_value_heads:",
        ),
        ({"per_layer_config": {"9": {}}}, "per_layer_config:"),
        ({"per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config 1 hidden_size:"),
        (
            {"per_layer_config": {"02": {"num_key_value_heads": 3}}},
            "per_layer_config 02 num_key_value_heads:",
        ),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts:"),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "factor": 0.5}}},
            "full_attention factor:",
        ),
    ],
)
def test_invalid_fields_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as raised:
        ModelSpec.from_config(gemma4(**changes))
    assert said in str(raised.value)
