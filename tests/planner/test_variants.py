"""The tables of attention variants, weight formats and KV formats."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.public_configs import public_shape as shape

from kvik.planner.devices import Device, Setting, find_device
from kvik.planner.memory import MemoryPlanner
from kvik.planner.roofline import decode, prefill, step_time
from kvik.planner.variants import (
    attention_matrices,
    attention_variants,
    context_parts,
    kv_formats,
    weight_formats,
)

A100 = find_device("a100-80g")
AT = Setting(A100, "bf16", "bf16", context=4096, batch=8)


def test_llama_3_8b_with_other_heads() -> None:
    model = shape("llama-3-8b")  # 32 layers, 32 query heads of 128, 8 KV heads
    rows = {row.attention: row for row in attention_variants(model, AT)}
    tokens = 8 * 4096
    by_hand = {
        "MHA": 32 * 2 * 32 * 128 * 2,
        "GQA": 131_072,
        "MQA": 32 * 2 * 128 * 2,
        "MLA": 32 * (512 + 64) * 2,
    }
    assert {name: row.kv_per_token for name, row in rows.items()} == by_hand
    assert {name: row.kv_heads for name, row in rows.items()} == {
        "MHA": 32, "GQA": 8, "MQA": 1, "MLA": 0,
    }  # fmt: skip
    assert [name for name, row in rows.items() if row.own] == ["GQA"]
    read = 2 * (model.parameters - 128_256 * 4096)  # the embedding is only looked up
    for name, row in rows.items():
        assert row.kv_total == tokens * by_hand[name]
        ceiling = 8 * 2.039e12 / (read + tokens * by_hand[name])
        assert row.ceiling <= ceiling
        assert row.ceiling == pytest.approx(ceiling, rel=0.01)


def test_deepseek_v3_with_other_heads() -> None:
    rows = attention_variants(shape("deepseek-v3"), AT)
    assert [(row.attention, row.kv_heads, row.own) for row in rows] == [
        ("MHA", 128, False),
        ("GQA", 8, False),
        ("MQA", 1, False),
        ("MLA", 0, True),
    ]
    # Keys of 128 + 64, values of 128.
    assert [row.kv_per_token for row in rows] == [
        61 * 128 * 320 * 2,
        61 * 8 * 320 * 2,
        61 * 320 * 2,
        70_272,
    ]


def test_few_heads_make_fewer_rows() -> None:
    small = replace(shape("llama-3-8b"), attention="MHA", num_heads=1, num_kv_heads=1)
    assert [row.attention for row in attention_variants(small, AT)] == ["MHA", "MQA", "MLA"]


def test_heads_that_do_not_divide_have_a_ceiling() -> None:
    # Four devices share twelve heads, or six, or copy one.
    model = replace(shape("llama-3-8b"), attention="MHA", num_heads=12, num_kv_heads=12)
    rows = attention_variants(model, replace(AT, tp=4))
    assert [row.kv_heads for row in rows] == [12, 6, 1, 0]
    assert all(row.ceiling is not None for row in rows)


@pytest.mark.parametrize("batch", [1, 8])
def test_weight_formats_of_llama_3_8b(batch: int) -> None:
    model = shape("llama-3-8b")
    rows = {row.format: row for row in weight_formats(model, replace(AT, batch=batch))}
    assert rows["bf16"].bytes == 2 * model.parameters == 2 * 8_030_261_248
    assert rows["bf16"].bits == 16.0
    assert 8.0 < rows["int8"].bits < 8.7  # the embedding keeps 16
    assert 4.3 < rows["int4"].bits < 5.5  # the head has 8
    for name, row in rows.items():
        assert row.bytes == model.weight_bytes(name)
        kv = 4096 * 131_072
        looked_up = 128_256 * 4096 * (4 if name == "fp32" else 2)
        assert row.single <= 1.0001 * 2.039e12 / (row.bytes - looked_up + kv)
        assert row.ceiling <= 1.0001 * batch * 2.039e12 / (row.bytes - looked_up + batch * kv)
    assert rows["int4"].single > rows["int8"].single > rows["bf16"].single
    assert rows["int4"].largest_batch > rows["bf16"].largest_batch > rows["fp32"].largest_batch
    assert all(row.fits == (row.largest_batch >= batch) for row in rows.values())


def test_kv_formats_of_llama_3_8b() -> None:
    rows = {row.format: row for row in kv_formats(shape("llama-3-8b"), AT)}
    assert {name: row.per_token for name, row in rows.items()} == {
        "fp32": 262_144,
        "bf16": 131_072,
        "fp16": 131_072,
        "fp8": 65_536 + 32 * 16 * 2,  # a two-byte scale for K and V of each head
        "int8": 65_536 + 32 * 16 * 2,
        "int4": 32_768 + 32 * 16 * 2,
    }
    assert all(row.total == 8 * 4096 * row.per_token for row in rows.values())
    assert rows["int4"].ceiling > rows["bf16"].ceiling
    assert rows["fp8"].largest_batch > 1.9 * rows["bf16"].largest_batch


def test_bytes_saved_by_tiles() -> None:
    llama = shape("llama-3-8b")  # 32 layers, 32 query and 8 KV heads of 128
    short, long = attention_matrices(llama, replace(AT, tp=2), (1024, 4096))
    assert short.matrix == 32 * 1024**2 * 2
    assert short.tiled == 1024 * 32 * (2 * 32 + 2 * 8) * 128 * 2
    assert short.moved == short.tiled + 32 * 4 * short.matrix
    assert long.matrix == 16 * short.matrix and long.tiled == 4 * short.tiled
    assert long.seconds == pytest.approx(long.moved / (2 * 2.039e12))
    (exact,) = attention_matrices(llama, replace(AT, weight_format="fp32"), (1024,))
    assert exact.matrix == 2 * short.matrix


def test_without_speeds_there_are_sizes() -> None:
    blind = replace(AT, device=Device("this", "cpu", 1 << 36, None, {}, unknown="why"))
    model = shape("llama-3-8b")
    assert all(row.ceiling is None for row in attention_variants(model, blind))
    assert all(row.single is row.ceiling is None for row in weight_formats(model, blind))
    assert all(row.ceiling is None for row in kv_formats(model, blind))
    (row,) = attention_matrices(model, blind, (8,))
    assert row.matrix and row.seconds is row.tiled_seconds is None


def test_tokens_of_a_request_on_several_gpus() -> None:
    llama = shape("llama-3-8b")  # 32 layers, 32 query and 8 KV heads of 128
    at = replace(AT, context=8192, batch=2)
    memory = MemoryPlanner.of(llama, at).memory()
    one, two, four, eight = context_parts(llama, at, memory)
    whole = {part.name: part.floor for part in step_time(llama, at, prefill(8192)).parts}
    assert one.prefill == pytest.approx(sum(whole.values())) and one.sending == 0.0
    assert one.kv_cache == memory.kv_cache == 2 * eight.kv_cache * 4
    quarter = step_time(llama, at, prefill(2048)).floor
    less = next(p.floor for p in step_time(llama, at, prefill(2048)).parts if p.name == "attention")
    assert four.prefill == pytest.approx(quarter - less + whole["attention"] / 4)
    reads = {part.name: part.floor for part in step_time(llama, at, decode(2, 8192)).parts}
    partial = 32 * 2 * 32 * (128 + 2) * 4 / A100.link
    assert two.decode == pytest.approx(
        sum(reads.values()) - reads["kv cache"] / 2 + 2 * partial / 2
    )
    wide = replace(at, tp=4)
    assert four.wider_prefill == pytest.approx(step_time(llama, wide, prefill(8192)).floor)


def test_a_slow_link_delays_prefill() -> None:
    """Keys and values of a prompt arrive while attention is computed, if the link is fast
    enough."""
    llama = shape("llama-3-8b")
    slow = replace(AT, device=replace(A100, link=1e8), batch=1)
    _, two, *_ = context_parts(llama, slow, MemoryPlanner.of(llama, slow).memory())
    received = 4096 / 2 * 131_072 / 1e8
    whole = step_time(llama, slow, prefill(4096)).parts
    attention = next(part.floor for part in whole if part.name == "attention")
    assert two.sending == pytest.approx(received - attention / 2)


def test_devices_and_models_without_context_parallelism() -> None:
    llama = shape("llama-3-8b")
    outside = replace(llama.outside, state_bytes=1 << 20)
    states = replace(llama, outside=outside)  # these process all tokens in order
    blind = replace(A100, bandwidth=None, unknown="why")
    for model, change in (
        (llama, {"pp": 2}),
        (llama, {"device": replace(A100, link=0.0)}),
        (llama, {"device": blind}),
        (states, {}),
    ):
        assert (
            context_parts(model, replace(AT, **change), MemoryPlanner.of(model, AT).memory()) == ()
        )


def test_parts_of_a_request_may_fit_if_the_whole_does_not() -> None:
    llama = shape("llama-3.1-8b")
    at = replace(AT, context=131_072, batch=6)
    fits = [row.fits for row in context_parts(llama, at, MemoryPlanner.of(llama, at).memory())]
    assert fits == [False, True, True, True]
