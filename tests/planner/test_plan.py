"""Whole plans, compared with figures computed by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from helpers.public_configs import config, public_shape

from kvik.cli.plan import build_parser, question_of
from kvik.config.hardware import Gpu, Hardware
from kvik.config.model_source import BUNDLED as STORIES
from kvik.errors import ConfigError, ModelError
from kvik.planner.devices import Device, find_device
from kvik.planner.families import read_shape, shape_from_config
from kvik.planner.formats import WEIGHT_FORMATS
from kvik.planner.plan import (
    Plan,
    Question,
    check_question,
    context_of,
    load_of,
    plan,
    plan_shape,
    request_of,
)

TOY = Device("toy", "cuda", 1 << 37, 1e12, {"bf16": 1e14, "fp32": 1e13, "int8": 2e14}, 1e11)


def answer(name: str, device: Device, question: Question) -> Plan:
    return plan_shape(public_shape(name), device, question)


@pytest.mark.parametrize("weights", [*WEIGHT_FORMATS])
@pytest.mark.parametrize("name", ["gpt2", "deepseek-v2-lite"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_figures_of_weights_agree(kind: str, name: str, weights: str) -> None:
    """Memory, facts and table agree, with scales as stored by the machine's kernels."""
    device = replace(TOY, kind=kind)
    found = answer(name, device, Question(dtype=weights, context=128))
    (row,) = (row for row in found.weight_formats if row.format == weights)
    assert found.memory.weights == found.weight_bytes == row.bytes


def test_the_unit_that_runs_is_named() -> None:
    found = answer("llama-3-8b", find_device("a100-80g"), Question(dtype="fp8", context=128))
    assert found.arithmetic == "bf16"  # the device has no FP8
    assert answer("llama-3-8b", find_device("h100"), Question(dtype="fp8")).arithmetic == "fp8"


def test_both_bounds_of_decoding_are_shown() -> None:
    found = answer("llama-3-8b", TOY, Question(context=4096, batch=24)).speed
    alone = found.decode[0]
    operations = 2 * (8_030_261_248 - 128_256 * 4096) + 4 * 32 * 4096 * 4096  # 32 heads of 128
    assert alone.computing == pytest.approx(1e14 / operations, rel=1e-3)
    assert alone.reading == pytest.approx(alone.ceiling) and alone.computing > 50 * alone.reading
    batches = [row.batch for row in found.decode]
    assert batches == sorted(set(batches)) and {1, 2, 4, 8, 16, 24} <= set(batches)
    for row in found.decode:
        assert row.ceiling <= 1.0001 * min(row.reading, row.computing)
        assert row.computing == pytest.approx(alone.computing)  # requests share no arithmetic


def test_llama_3_70b_on_four_h100() -> None:
    """80 layers of 855,638,016 weights and a head of 128,256 x 8,192, a quarter on each device:
    10.4 ms at 3.35 TB/s. Each device sends 2 sums x 80 layers x 3/2 x 8,192 numbers."""
    found = answer("llama-3-70b", find_device("h100"), Question(context=1, tp=4))
    (row,) = (row for row in found.speed.decode if row.batch == 1)
    weights = 80 * 855_638_016 + 128_256 * 8192
    links = 2 * 80 * 1.5 * 8192 * 2 / 450e9
    assert row.floor == pytest.approx(weights * 2 / 4 / 3.35e12 + links, rel=1e-4)
    assert row.ceiling == pytest.approx(96.3, rel=1e-3)
    assert 295 < (found.speed.compute_bound_batch or 0) < 330  # 989.4 / 3.35, plus KV and logits


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    found = answer("llama-3-8b", TOY, Question(context=8192))
    tokens = [row.tokens for row in found.speed.prefill]
    assert tokens == [128, 512, 2048, 8192]
    last = found.speed.prefill[-1]
    multiplied = 8_030_261_248 - 2 * 128_256 * 4096
    pairs = 8192 * 8193 // 2
    floor = (2 * multiplied * 8192 + 4 * 32 * 32 * 128 * pairs) / 1e14
    assert last.floor == pytest.approx(floor, rel=0.01)
    assert last.bound == "compute"


def test_costs_are_those_of_the_rates() -> None:
    """Llama-3-8B (7,504,924,672 weights after the embedding, 131,072 bytes of KV per token) for 8
    requests of 2000 + 2096 tokens; outputs are at 3048 tokens on average."""
    question = Question(context=4096, batch=8, price=3.6, load="2/s", output_tokens=2096)
    device = replace(TOY, memory=80 << 30, bandwidth=1e12, rates={"bf16": 1e14})
    found = answer("llama-3-8b", device, question)
    paid = found.cost
    read = 2 * 7_504_924_672 + 8 * 3048 * 131_072
    assert paid.output == pytest.approx(3.6 / 3600 * read / 1e12 / 8 * 1e6, rel=0.01)
    layers = 7_504_924_672 - 128_256 * 4096
    flops = 2 * layers * 2000 + 4 * 32 * 4096 * 2000 * 2001 / 2  # of one prompt, without the head
    assert paid.input == pytest.approx(3.6 / 3600 * flops / 1e14 / 2000 * 1e6, rel=0.01)
    assert (paid.load.prompt, paid.load.output) == (2000, 2096)
    seconds = 2 * (2000 * paid.input + 2096 * paid.output) / 1e6 / 3.6 * 3600
    assert paid.busy * paid.copies == pytest.approx(seconds)
    assert paid.per_day == pytest.approx(paid.copies * 86.4)


def test_stages_that_are_all_busy_cost_no_more_per_token() -> None:
    linked = replace(TOY, price=1.0, link=1e15)
    one = answer("llama-3-8b", linked, Question(context=512, batch=8))
    four = answer("llama-3-8b", linked, Question(context=512, batch=32, pp=4))
    assert four.cost.input == pytest.approx(one.cost.input, rel=0.01)
    assert four.cost.output == pytest.approx(one.cost.output, rel=0.01)


def test_the_price_may_be_the_devices_own() -> None:
    own = answer("llama-3-8b", replace(TOY, price=2.0), Question(context=128))
    given = answer("llama-3-8b", replace(TOY, price=2.0), Question(context=128, price=3.0))
    none = answer("llama-3-8b", TOY, Question(context=128))
    assert none.cost is None
    assert (own.cost.price, given.cost.price) == (2.0, 3.0)


def test_a_model_that_is_too_large_is_still_planned() -> None:
    found = answer("llama-3-70b", TOY, Question(context=8192, batch=2, price=1.0))
    assert not found.memory.fits and found.remedies
    assert found.cost is None
    assert {row.batch: row.fits for row in found.speed.decode} == {1: False, 2: False}


def test_costs_are_of_a_smaller_batch_if_the_requested_one_is_too_large() -> None:
    found = answer("llama-3-8b", TOY, Question(context=8192, batch=512, price=3.6))
    most = found.memory.largest_batch
    assert 0 < most < 512
    fits = {row.batch: row.fits for row in found.speed.decode}
    assert not fits[512] and fits[64]
    alone = answer("llama-3-8b", TOY, Question(context=8192, batch=most, price=3.6))
    assert alone.cost.output == found.cost.output


def test_draft_heads_cost_the_time_to_read_them() -> None:
    """Four heads of Medusa are read at once, with the model's head, which has no bias."""
    heads = str(STORIES.with_name("stories-medusa"))
    found = plan_shape(read_shape(""), TOY, Question(context=512, dtype="bf16", draft=heads))
    weights, head = 4 * (256 * 256 + 256) * 2, 2048 * 256 * 2
    assert found.memory.draft_weights == weights
    alone = found.speed.decode[0]
    expected = (weights + head) / 4 / 1e12 / alone.floor
    assert found.speed.speculation[0].draft_cost == pytest.approx(expected)
    with pytest.raises(ModelError, match=r"draft: .* 256 and 2048 tokens"):
        answer("gpt2", TOY, Question(draft=heads))


def test_a_draft_model_costs_the_time_of_its_roofline() -> None:
    small = "llama-3.2-1b"
    question = Question(context=1024, batch=4, draft=small)
    found = answer("llama-3-8b", TOY, question)
    draft = plan_shape(read_shape(small), TOY, Question(context=1024, batch=4)).speed
    for curve in found.speed.speculation:
        (own,) = (row for row in found.speed.decode if row.batch == curve.batch)
        (its,) = (row for row in draft.decode if row.batch == curve.batch)
        assert curve.draft_cost == pytest.approx(its.floor / own.floor)
    assert [curve.batch for curve in found.speed.speculation] == [1, 4]
    given = answer("llama-3-8b", TOY, replace(question, draft_cost=0.25))
    assert given.speed.speculation[0].draft_cost == 0.25


def test_default_formats() -> None:
    assert answer("deepseek-v3", TOY, Question()).at.weight_format == "fp8"
    llama = answer("llama-3-8b", TOY, Question())
    assert (llama.at.weight_format, llama.at.kv_format) == ("bf16", "bf16")
    assert answer("llama-3-8b", TOY, Question(dtype="fp32")).at.kv_format == "fp32"
    assert answer("llama-3-8b", TOY, Question(dtype="int4")).at.kv_format == "bf16"
    assert answer("llama-2-7b", TOY, Question(dtype="int8")).at.kv_format == "fp16"


def test_on_this_machine_the_engine_decides_the_format() -> None:
    gpu = Gpu(0, "old", 1 << 34, 1 << 34, (7, 5))  # without bfloat16
    old = Hardware("some CPU", 4, 1 << 34, "RAM", gpus=(gpu,))
    device = Device("this", "cuda", 1 << 34, None, {}, unknown="it is old")
    found = plan_shape(read_shape(""), device, Question(), old)
    assert (found.at.weight_format, found.at.kv_format) == ("fp16", "fp16")
    assert found.speed is None and found.at.device.unknown == "it is old"
    assert found.source == "old"


def test_a_quantised_checkpoint_keeps_its_format_on_this_machine() -> None:
    here = Hardware("some CPU", 4, 1 << 36, "RAM")
    device = Device("this", "cpu", 1 << 36, None, {}, unknown="not measured")
    stored = {**config("llama-3-8b"), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    shape = shape_from_config(stored, "llama")
    usual = plan_shape(shape, device, Question(), here)
    assert usual.at.weight_format == "int4"
    assert usual.shape.notes == plan_shape(shape, device, Question(dtype="int4"), here).shape.notes
    *notes, kept = plan_shape(shape, device, Question(dtype="int8"), here).shape.notes
    assert tuple(notes) == usual.shape.notes and "int4" in kept


# Invalid questions, each refused by the name of its field.


BUNDLED = read_shape("")  # the bundled model: 8 heads, 6 layers, a context of 1024


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"context": 0}, "context"),
        ({"context": 1025}, "context"),
        ({"batch": 0}, "batch"),
        ({"tp": 9}, "tp"),
        ({"pp": 7}, "pp"),
        ({"memory_utilization": 0.0}, "memory_utilization"),
        ({"price": -1.0}, "price"),
        ({"price": float("nan")}, "price"),
        ({"draft_cost": -0.1}, "draft_cost"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"output_tokens": 1024}, "output_tokens"),
        ({"load": "much"}, "load"),
    ],
)
def test_questions_that_are_refused(change: dict[str, Any], field: str) -> None:
    check_question(Question(), BUNDLED)
    with pytest.raises(ConfigError, match=f"^{field}: "):
        check_question(replace(Question(), **change), BUNDLED)


def test_defaults_of_a_question() -> None:
    assert context_of(Question(), BUNDLED) == 1024
    assert context_of(Question(), replace(BUNDLED, max_context=131_072)) == 8192
    assert context_of(Question(context=77), BUNDLED) == 77
    assert request_of(Question(), 1024) == (768, 256)
    assert request_of(Question(output_tokens=24), 1024) == (1000, 24)
    assert load_of(Question(), 1024) is None
    load = load_of(Question(load="1/s"), 1024)
    assert (load.requests, load.prompt, load.output) == (86_400, 768, 256)


@pytest.mark.parametrize(
    ("name", "hardware", "options", "offers"),
    [
        (
            *("llama-3-8b", "a100-80g", {"context": 8192, "batch": 64}),
            ["--batch .*", "--context .*", "--kv-cache-dtype int8", "--dtype .*", "--tp 2"],
        ),
        (
            *("llama-3-70b", "rtx4090", {"context": 8192}),  # the weights alone are too large
            ["--dtype int4 --kv-cache-dtype int4 --tp 2", "--tp 8"],
        ),
        ("llama-3-70b", "h200", {"context": 8192}, ["--dtype int8", "--tp 2"]),
        (  # int8 fits, as its cache then has 16 bits
            *("glm-4.5-air", "mi300x", {"context": 32768, "batch": 7, "dtype": "fp32"}),
            ["--dtype int8", "--tp 4"],
        ),
        (  # not if the cache keeps 32
            "glm-4.5-air",
            "mi300x",
            {"context": 32768, "batch": 7, "dtype": "fp32", "kv_cache_dtype": "fp32"},
            ["--dtype int4", "--tp 4"],
        ),
        (
            *("deepseek-v3", "a100-80g", {"context": 4096, "dtype": "bf16"}),
            ["--dtype int4 --tp 8", "--tp 8 --pp 4"],  # beyond one machine
        ),
    ],
)
def test_offers(name: str, hardware: str, options: dict[str, Any], offers: list[str]) -> None:
    """Each is asked for as a user would, and must fit with just its bytes."""
    shape, device = public_shape(name), find_device(hardware)
    answer = plan_shape(shape, device, Question(**options))
    assert not answer.memory.fits
    asked = [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    for remedy, flags in zip(answer.remedies, offers, strict=True):
        assert re.fullmatch(flags, remedy.flags)
        words = build_parser().parse_args([*asked, *remedy.flags.split()])
        again = plan_shape(shape, device, question_of(words))
        assert again.memory.fits, remedy
        assert again.memory.total == remedy.total


def test_nothing_helps_a_device_without_siblings() -> None:
    shape = public_shape("deepseek-v3")
    alone = replace(find_device("t4"), link=0.0)
    assert plan_shape(shape, alone, Question()).remedies == ()


def test_stages_compute_chunks_of_a_prompt_at_a_time() -> None:
    """A prompt of c chunks takes a pipeline of four stages (c + 3) / 4 c of the time of one."""
    question = Question(context=8192 * 4)
    one, four = (
        answer("llama-3.1-8b", TOY, replace(question, pp=pp)).speed for pp in (1, 4)
    )  # fmt: skip
    for alone, staged in zip(one.prefill, four.prefill, strict=True):
        chunks = max(1, alone.tokens // 8192)
        assert staged.floor == pytest.approx(alone.floor * (chunks + 3) / (4 * chunks), rel=0.02)


# Published figures (sources in docs/planning.md): output tokens/s of Llama 3.1 70B on eight GPUs.
PUBLISHED = [
    ("h100", 128, 2048, 1302, 15_190, 36_600),
    ("h100", 2048, 128, 1302, 1_967, 2_950),
    ("h200", 2048, 2048, 1378, 9_716, 19_400),
]


@pytest.mark.parametrize(
    ("hardware", "prompt", "output", "batch", "published", "planned"), PUBLISHED
)
def test_ceilings_are_above_published_figures(
    hardware: str, prompt: int, output: int, batch: int, published: float, planned: float
) -> None:
    formats = {"dtype": "fp8", "kv_cache_dtype": "fp8"}
    question = Question(context=prompt + output, output_tokens=output, batch=batch, tp=8, **formats)
    found = answer("llama-3.1-70b", find_device(hardware), question)
    assert found.memory.largest_batch == batch
    rate = found.rates.output_rate(prompt, output)
    assert rate == pytest.approx(planned, rel=0.005)  # as in the document
    assert published < rate < 2.6 * published


@pytest.mark.parametrize(
    ("tp", "pp", "published", "planned"), [(8, 1, 48.5, 41.9), (8, 4, 15.5, 12.4)]
)
def test_a_long_prompt_takes_longer_than_the_ceiling(
    tp: int, pp: int, published: float, planned: float
) -> None:
    """DeepSeek-V3.1 on nodes of eight H20: 128K tokens, seconds."""
    question = Question(context=131_072, output_tokens=1, tp=tp, pp=pp)
    found = answer("deepseek-v3", find_device("h20"), question)
    assert found.speed.prefill[-1].floor == pytest.approx(planned, rel=0.005)
    assert planned < published < 1.3 * planned
    assert found.memory.fits == (pp > 1)  # the memory of one node is too small


def test_a_window_with_sinks_bounds_a_request() -> None:
    """4 + 1,020 keys and those of a step, in blocks, for any length of text."""
    seen = {"window": 1020, "attention_sinks": 4}
    found = [
        plan(Question(str(STORIES), hardware="a100-80g", context=context, **seen))
        for context in (10_000, 100_000)
    ]
    assert found[0].memory.kv_per_request == found[1].memory.kv_per_request
    step = found[0].memory.step_tokens
    assert found[0].memory.kv_per_request <= (1024 + step + 48) * found[0].kv_bytes_per_token
    assert found[0].flops_per_token == found[1].flops_per_token
    assert found[0].flops_per_token > plan(Question(str(STORIES), context=512)).flops_per_token
    with pytest.raises(ConfigError, match="window: must be at most 1020 with 4 sinks"):
        plan(Question(str(STORIES), window=1021, attention_sinks=4))
    with pytest.raises(ConfigError, match="attention_sinks: must be 0 without a window"):
        plan(Question(str(STORIES), attention_sinks=4))


def test_a_device_on_which_all_layers_keep_states_has_no_empty_cache() -> None:
    layers = {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [2, 5], "dtype": "bfloat16"}
    shape = shape_from_config(layers, "m")
    found = plan_shape(shape, TOY, Question(pp=2, context=128))
    assert (found.kv_waste.reserved, found.kv_waste.empty) == (0, 0.0)
