"""What one of several devices holds."""

from __future__ import annotations

import pytest
from helpers.public_configs import config

from kvik.errors import ConfigError
from kvik.planner.families import shape_from_config
from kvik.planner.parallel import can_share, check_parallel, share
from kvik.planner.shape import ModelShape


def shape(name: str) -> ModelShape:
    return shape_from_config(config(name), name)


def size(part: ModelShape, role: str) -> tuple[int, int, int]:
    (matrix,) = (m for m in part.matrices if m.role == role)
    return matrix.count, matrix.inputs, matrix.outputs


def test_alone_it_is_the_whole() -> None:
    whole = shape("llama-3-70b")
    assert share(whole, 1, 1) is whole


def test_llama_3_70b_on_eight() -> None:
    part = share(shape("llama-3-70b"), 8, 1)
    assert size(part, "qkv") == (80, 8192, 8 * 128 + 2 * 128)  # eight query heads, one KV head
    assert size(part, "o") == (80, 8 * 128, 8192)
    assert size(part, "gate_up") == (80, 8192, 2 * 28672 // 8)
    assert size(part, "down") == (80, 28672 // 8, 8192)
    assert size(part, "head") == size(part, "embedding") == (1, 8192, 128256 // 8)
    matrices = 80 * 8192 * (1280 + 1024 + 3 * 3584) + 2 * 8192 * 16032
    norms = 2 * 80 * 8192 + 8192
    assert part.weight_bytes("bf16") == 2 * (matrices + norms)
    assert part.kv_bytes_per_token("bf16") == 327_680 // 8
    assert part.matmul_flops(1, 1) == 2 * (matrices - 8192 * 16032)


def test_kv_heads_are_copied_where_there_are_too_few() -> None:
    part = share(shape("llama-3-70b"), 16, 1)
    assert size(part, "qkv") == (80, 8192, 4 * 128 + 2 * 128)
    assert part.kv_bytes_per_token("bf16") == 327_680 // 8
    assert part.kv_bytes_per_token("int8") == 80 * 2 * (128 + 2)


def test_inputs_need_not_divide() -> None:
    """The fullest device has one more: 4,864 inner activations on 14."""
    whole = shape("qwen2.5-0.5b")
    (down,) = (m for m in share(whole, 14, 1).matrices if m.role == "down")
    assert down.inputs == 348 and 13 * 348 < 4864 < 14 * 348


def test_the_latent_of_mla_is_copied_and_its_projections_are_cut() -> None:
    whole = shape("deepseek-v3")
    part = share(whole, 8, 1)
    assert part.kv_bytes_per_token("bf16") == whole.kv_bytes_per_token("bf16") == 70_272
    for role in ("q_down", "kv_down", "router"):
        assert size(part, role) == size(whole, role)
    assert size(part, "kv_up") == (61, 512, 16 * 256)
    assert size(part, "expert_down") == (58 * 256, 2048 // 8, 7168)


def test_stages_have_whole_layers_and_one_end() -> None:
    part = share(shape("llama-3-70b"), 1, 3)  # of 27, 27 and 26 layers
    assert part.num_layers == 27
    assert part.kv_bytes_per_token("bf16") == 27 * 2 * 8 * 128 * 2
    assert size(part, "qkv")[0] == 27
    assert sum(m.role in ("embedding", "head") for m in part.matrices) == 1


def test_a_stage_of_experts_has_all_of_a_layer() -> None:
    part = share(shape("mixtral-8x7b-v0.1"), 1, 4)
    assert size(part, "expert_down")[0] == 8 * 8
    tied = share(shape("gemma-2-9b"), 1, 2)
    assert size(tied, "head") == (1, 3584, 256_000)


def test_no_stage_has_more_than_its_share() -> None:
    """61 layers of which three are dense, over eight stages cut as evenly as they go."""
    whole, pp = shape("deepseek-v3"), 8
    by_layer = [0.0] * 61
    for matrix in whole.matrices:
        if matrix.role in ("embedding", "head"):
            continue
        layers = range(61)
        if matrix.role in ("gate_up", "down"):
            layers = range(3)
        elif matrix.count != 61:
            layers = range(3, 61)
        for layer in layers:
            by_layer[layer] += matrix.parameters / len(layers)
    fullest, first = 0.0, 0
    for stage in range(pp):
        last = first + 61 // pp + (stage < 61 % pp)
        fullest = max(fullest, sum(by_layer[first:last]))
        first = last
    held = share(whole, 1, pp).parameters
    assert fullest <= held < 1.03 * (fullest + 7168 * 129_280)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "field", "message"),
    [
        ("llama-3-70b", 3, 1, "tp", "must divide the 64 query heads, not 3"),
        ("llama-3-70b", 0, 1, "tp", "must be an integer in"),
        ("llama-3-70b", 1, 81, "pp", "must be at most the 80 layers, not 81"),
        ("qwen2.5-0.5b", 7, 1, "tp", "the 2 key/value heads or be a multiple of them, not 7"),
        ("gemma-2-9b", 1, -1, "pp", "must be an integer in"),
    ],
)
def test_what_cannot_be_shared(name: str, tp: int, pp: int, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_parallel(shape(name), tp, pp)
    assert caught.value.field == field
    assert not can_share(shape(name), tp, pp)
    assert can_share(shape(name), 2)
