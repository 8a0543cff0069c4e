"""Costs that follow from a shape: bytes stored and read, operations, windows, experts, latents."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from helpers.public_configs import config
from helpers.public_configs import public_shape as shape

from kvik.planner.families import shape_from_config
from kvik.planner.shape import LayerShape, MatrixGroup, ModelShape
from kvik.spec.visible_keys import ALL_KEYS

# Windows


def test_a_window_bounds_the_cache_and_the_operations() -> None:
    mistral = shape("mistral-7b-v0.1")  # every layer sees 4096 tokens
    assert mistral.kv_bytes(4096, "bf16") == 4096 * 131_072
    assert mistral.kv_bytes(30_000, "bf16") == 4096 * 131_072
    assert mistral.attention_flops(1, 30_000) == mistral.attention_flops(1, 4096)
    assert mistral.attention_flops(1, 4095) < mistral.attention_flops(1, 4096)


def test_layers_that_share_caches_and_heads_of_two_sizes() -> None:
    gemma = shape("gemma-4-e2b")  # 12 caches with a window and 3 without, read by 16 and 4
    windowed, full = 512 * 2 * 256 * 2, 9000 * 2 * 512 * 2
    assert gemma.kv_bytes(9000, "bf16") == 12 * windowed + 3 * full
    assert gemma.kv_read_bytes(9000, "bf16") == 28 * windowed + 7 * full
    assert gemma.attention_flops(1, 9000) == 2 * 8 * 2 * (28 * 256 * 512 + 7 * 512 * 9000)


# Formats of the cache


def test_scales_count_in_the_cache() -> None:
    latent = shape("deepseek-v3")  # one vector of 512 + 64 for all heads
    assert latent.kv_bytes_per_token("int8") == 61 * (576 + 2)


# Weights


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "size"),
    [
        ("fp32", 256, 10, 256 * 10 * 4),
        ("bf16", 256, 10, 256 * 10 * 2),
        ("fp16", 256, 10, 256 * 10 * 2),
        ("fp8", 256, 10, 256 * 10 + 10 * 4),  # an fp32 scale per output
        ("int8", 256, 10, 256 * 10 + 10 * 4),
        ("int8-weight-only", 256, 10, 256 * 10 + 10 * 4),
        ("int4", 256, 10, 256 * 10 // 2 + 2 * 10 * 5),  # two groups of 128, scale and zero point
        ("int4", 96, 10, 96 * 10 // 2 + 3 * 10 * 5),  # three groups of 32
        ("int4", 40, 10, 40 * 10 + 10 * 4),  # no group divides it: 8 bits
    ],
)
def test_bytes_of_a_matrix(name: str, inputs: int, outputs: int, size: int) -> None:
    llama = shape("llama-3-8b")
    assert stored(llama, "qkv", inputs, outputs).weight_bytes(name) == size


def test_the_head_keeps_eight_bits_under_int4() -> None:
    llama = shape("llama-3-8b")
    assert stored(llama, "head", 256, 10).weight_bytes("int4") == 256 * 10 + 10 * 4
    assert stored(llama, "qkv", 256, 10).weight_bytes("int4") < 256 * 10


def stored(model: ModelShape, role: str, inputs: int, outputs: int) -> ModelShape:
    """Return a model of only this matrix."""
    matrices = (MatrixGroup(role, 1, inputs, outputs),)
    return replace(model, layers=(), outside=LayerShape(matrices, 0, None))


def test_a_step_reads_matrices_once_and_only_needed_rows_of_tables() -> None:
    llama = shape("llama-3-8b")
    table = 128_256 * 4096
    for rows in (1, 16):
        expected = 2 * (llama.parameters - table + rows * 4096)
        assert llama.read_bytes("bf16", rows) == expected


def test_a_tied_head_is_read_whole() -> None:
    llama = shape("llama-3.2-1b")
    assert llama.read_bytes("bf16", 1) == llama.weight_bytes("bf16") == 2 * 1_235_814_400
    assert [m.role for m in llama.matrices].count("head") == 1
    assert "embedding" not in {m.role for m in llama.matrices}


def test_no_more_rows_are_looked_up_than_there_are() -> None:
    gpt2 = shape("gpt2")
    position = 768 * 4
    assert gpt2.read_bytes("fp32", 9) - gpt2.read_bytes("fp32", 8) == position
    assert gpt2.read_bytes("fp32", 5000) == gpt2.weight_bytes("fp32")


def test_unquantised_parts_of_quantised_models() -> None:
    """DeepSeek-V3 in fp8: embedding, head, routers and norms stay in bf16, as do the projections
    absorbed into queries and results of attention."""
    v3 = shape("deepseek-v3")
    tables = 2 * 129_280 * 7168
    routers = 58 * 7168 * 256
    absorbed = 61 * 512 * 128 * 256
    kept = tables + routers + absorbed + v3.other_parameters
    scales = (v3.parameters - kept) // 128  # one for each block of 128 x 128, in each row of it
    expected = (v3.parameters - kept) + 4 * scales + 2 * kept
    assert v3.weight_bytes("fp8") == expected


def test_the_rest_of_a_quantised_model_has_the_dtype_of_computation() -> None:
    qwen = shape("qwen2.5-7b")
    assert replace(qwen, dtype="float16").weight_bytes("int8") == qwen.weight_bytes("int8")
    assert replace(qwen, dtype="float32").weight_bytes("int8") > qwen.weight_bytes("int8")


# Experts


def test_experts_touched_are_the_mean_over_all_choices() -> None:
    """Two tokens that each choose 2 of 5 experts, in every possible way."""
    matrix = MatrixGroup("expert_down", 5, 8, 4, experts=5, active=2)
    choices = [set(c) for c in combinations(range(5), 2)]
    mean = sum(len(a | b) for a in choices for b in choices) / len(choices) ** 2
    assert matrix.touched(1) == pytest.approx(2)
    assert matrix.touched(2) == pytest.approx(mean)
    assert matrix.touched(1000) == pytest.approx(5)


def test_a_mixture_reads_the_experts_of_a_token_or_finally_all() -> None:
    mixtral = shape("mixtral-8x7b-v0.1")
    lookup = 4096
    assert mixtral.read_bytes("bf16", 1) == pytest.approx(2 * (mixtral.active_parameters + lookup))
    assert mixtral.read_bytes("bf16", 2) > 1.5 * mixtral.read_bytes("bf16", 1)
    everything = mixtral.weight_bytes("bf16") - 2 * 32_000 * 4096
    assert mixtral.read_bytes("bf16", 512) == pytest.approx(everything + 2 * 512 * lookup)


# Operations


def test_matrix_products_take_two_operations_for_each_active_parameter() -> None:
    llama = shape("llama-3-8b")
    head = 128_256 * 4096
    inner = llama.active_parameters - llama.other_parameters - head
    assert llama.matmul_flops(1, 1) == 2 * (inner + head)
    assert llama.matmul_flops(512, 3) == 2 * (512 * inner + 3 * head)
    mixtral = shape("mixtral-8x7b-v0.1")
    products = mixtral.active_parameters - mixtral.other_parameters
    assert mixtral.matmul_flops(7, 7) == 7 * 2 * products


def test_attention_of_a_decoding_row() -> None:
    llama = shape("llama-3-8b")
    assert llama.attention_flops(1, 1000) == 4 * 32 * 32 * 128 * 1000
    assert llama.attention_flops(512, 512) == 4 * 32 * 32 * 128 * (512 * 513 // 2)
    whole = llama.attention_flops(1024, 1024)
    assert llama.attention_flops(512, 512) + llama.attention_flops(512, 1024) == whole


def test_an_indexer_reads_its_keys_and_what_it_chooses() -> None:
    v32 = shape("deepseek-v3.2")  # 2,048 keys by 64 heads of 128
    assert v32.kv_bytes_per_token("bf16") == 61 * 2 * (576 + 128)
    assert v32.kv_bytes_per_token("int8") == 61 * (576 + 2 + 2 * 128)
    assert v32.kv_read_bytes(2000, "bf16") == 2000 * v32.kv_bytes_per_token("bf16")
    assert v32.kv_read_bytes(30_000, "bf16") == 61 * 2 * (2048 * 576 + 30_000 * 128)
    attended = 128 * (576 + 512) * 2048
    assert v32.attention_flops(1, 30_000) == 61 * 2 * (attended + 64 * 128 * 30_000)
    glm = shape_from_config({**config("glm-5"), "index_topk_freq": 4}, "glm")
    shared = glm.num_layers - 21  # by an earlier layer's indexer
    assert glm.kv_bytes_per_token("bf16") == 78 * 2 * 576 + (78 - shared) * 2 * 128


def test_latent_attention_decodes_absorbed_and_prefills_expanded() -> None:
    v3 = shape("deepseek-v3")  # 128 heads, 192 for Q and K, 128 for V, latent 512, rotary 64
    assert v3.attention_flops(1, 1000) == 61 * 2 * 128 * (576 + 512) * 1000
    assert v3.attention_flops(512, 512) == 61 * 2 * 128 * (192 + 128) * (512 * 513 // 2)
    # a chunk behind a long cached prompt: K and V of the cached part are made again
    expanded = 61 * 2 * 128 * ((192 + 128) * ALL_KEYS.pairs(3584, 4096, 0) + 512 * 256 * 3584)
    assert v3.attention_flops(512, 4096) == expanded
