"""Rooflines computed by hand, and invariants for every model, machine and step."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
from helpers.calibrations import calibration, measured_device
from helpers.configs import PUBLIC
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvik.errors import ConfigError
from kvik.planner.devices import DEVICES, Device, Setting, find_device
from kvik.planner.families import shape_from_config
from kvik.planner.parallel import shares
from kvik.planner.roofline import (
    PlannedStep,
    StepTime,
    compute_bound_batch,
    costs_at,
    decode,
    decode_rate,
    linear_kind,
    prefill,
    prefill_rate,
    product_costs,
    step_time,
    verify,
)
from kvik.planner.shape import MatrixGroup, ModelShape

LLAMA_2_7B = PUBLIC["llama-2-7b"]
SMALL = {
    **LLAMA_2_7B,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
# Exactly 1 TB/s and 100 T operations per second.
ROUND = Device("round", "cuda", 80 << 30, 1e12, {"bf16": 1e14, "fp16": 1e14, "int8": 2e14}, 1e11)


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return shape_from_config(LLAMA_2_7B, "llama-2-7b")


@pytest.fixture(scope="module")
def small() -> ModelShape:
    return shape_from_config(SMALL, "small")


def part(time: StepTime, name: str):
    return next(part for part in time.parts if part.name == name)


def test_decoding_by_hand(llama: ModelShape) -> None:
    """Llama-2-7B: 202,375,168 weights per layer, 131,072,000 in the head, 524,288 bytes of KV."""
    weights, head = 32 * 202_375_168, 131_072_000
    time = step_time(llama, Setting(ROUND, "fp16", "fp16"), decode(8, 1000))
    assert part(time, "weights").floor == pytest.approx(2 * weights / 1e12)
    assert part(time, "weights").computing == pytest.approx(2 * 8 * weights / 1e14)
    logits = 8 * 32000 * 4  # written, with the cost of the weights of 64 outputs
    assert part(time, "head").floor == pytest.approx((2 * head + logits) / 1e12)
    assert part(time, "kv cache").reading == pytest.approx(8 * 1000 * 524_288 / 1e12)
    assert part(time, "kv cache").computing == pytest.approx(8 * 4 * 32 * 32 * 128 * 1000 / 1e14)
    assert {p.bound for p in time.parts} == {"bandwidth"}
    total = 2 * weights + 2 * head + logits + 8 * 1000 * 524_288
    assert time.floor == time.expected == pytest.approx(total / 1e12)
    assert time.bound == "bandwidth"
    ceiling, expected = decode_rate(llama, Setting(ROUND, "fp16", "fp16", 1000, 8))
    assert ceiling == expected == pytest.approx(8 / (total / 1e12))


def test_a_prompt_by_hand(llama: ModelShape) -> None:
    weights, head = 32 * 202_375_168, 131_072_000
    time = step_time(llama, Setting(ROUND, "fp16", "fp16"), prefill(2000, cached=48))
    assert part(time, "weights").floor == pytest.approx(2 * 2000 * weights / 1e14)
    assert part(time, "weights").bound == "compute"
    assert part(time, "head").computing == pytest.approx(2 * head / 1e14)  # of the last token alone
    pairs = 2000 * 48 + 2000 * 2001 / 2
    assert part(time, "attention").computing == pytest.approx(4 * 32 * 32 * 128 * pairs / 1e14)
    assert time.bound == "compute"


def test_states_by_hand() -> None:
    """Of 30 layers: 32 matrices of 128 x 128, and 3 inputs of 8,192 channels, in fp32."""
    qwen = shape_from_config(PUBLIC["Qwen3.6-35B-A3B"], "qwen3.6-35b-a3b")
    state = 30 * (32 * 128 * 128 + 3 * 8192) * 4
    assert qwen.state_bytes == state == 65_863_680
    flops = 30 * (7 * 32 * 128 * 128 + 2 * 4 * 8192)  # per token
    device = replace(ROUND, rates={**ROUND.rates, "fp32": 1e12})
    at = Setting(device, "bf16", "bf16")
    step = part(step_time(qwen, at, decode(4, 1000)), "states")
    assert step.computing == pytest.approx(4 * flops / 1e12)
    assert step.floor == pytest.approx(4 * 2 * state / 1e12)  # read and written
    assert step.bound == "bandwidth"
    # For any number of tokens per sequence and step; a new sequence has nothing to read.
    for cached, moved in ((0, state), (512, 2 * state)):
        chunk = part(step_time(qwen, at, prefill(512, cached=cached)), "states")
        assert chunk.reading == pytest.approx(moved / 1e12)
        assert chunk.floor == pytest.approx(512 * flops / 1e12) and chunk.bound == "compute"
    halves = replace(at, tp=2)
    half = part(step_time(qwen, halves, decode(4, 1000)), "states")
    assert half.floor == pytest.approx(4 * state / 1e12)
    convolution, rule = 30 * 2 * 4 * 8192, 30 * 7 * 32 * 128 * 128
    at = replace(at, device=replace(device, calibration=calibration()))
    for tokens in (1, 512):
        expected = convolution / 1e9 + rule / 4e9
        expected += (tokens - 1) * (convolution / 2e9 + rule / 8e9)
        chunk = part(step_time(qwen, at, prefill(tokens, cached=512)), "states")
        assert chunk.expected == pytest.approx(expected)
    states = [part.state_bytes for part in shares(qwen, 2, 4, "bf16")]
    assert sum(states) == state / 2 and set(states) == {7 * state / 60, 8 * state / 60}


def test_prompts_of_a_batch_share_the_weights(llama: ModelShape) -> None:
    at = Setting(ROUND, "fp16", "fp16", batch=8)
    together = step_time(llama, at, PlannedStep(((8, 10, 0),)))
    assert part(together, "weights").floor == pytest.approx(2 * 32 * 202_375_168 / 1e12)
    ceiling, _ = prefill_rate(llama, at, 10)
    assert ceiling == pytest.approx(8 * 10 / together.floor)
    # A pipeline of two stages computes two groups of four at a time.
    halves = replace(at, pp=2)
    four = step_time(llama, halves, PlannedStep(((4, 10, 0),)))
    assert prefill_rate(llama, halves, 10)[0] == pytest.approx(2 * 4 * 10 / four.floor)


def test_weights_are_read_once_and_all_drafts_are_scored(llama: ModelShape) -> None:
    one = step_time(llama, Setting(ROUND, "fp16", "fp16"), decode(4, 100))
    more = step_time(llama, Setting(ROUND, "fp16", "fp16"), verify(4, 100, 3))
    assert part(more, "weights").reading == part(one, "weights").reading
    assert part(more, "weights").computing == 4 * part(one, "weights").computing
    assert part(more, "head").computing == 4 * part(one, "head").computing
    assert "attention" not in {p.name for p in more.parts}


def test_each_draft_is_scored_against_all_keys() -> None:
    """If scoring dominates, four rows take four times as long as one."""
    small, device = shape_from_config(SMALL, "small"), measured_device()
    slow = tuple(structs.replace(cost, score=1e-6) for cost in device.calibration.attention)
    device = replace(device, calibration=structs.replace(device.calibration, attention=slow))
    one, four = (
        part(step_time(small, Setting(device, "bf16", "bf16"), step), "kv cache").expected
        for step in (decode(4, 1000), verify(4, 997, 3))
    )
    assert four == pytest.approx(4 * one, rel=0.02)


def test_tensor_parallelism_by_hand(llama: ModelShape) -> None:
    one = step_time(llama, Setting(ROUND, "fp16", "fp16"), decode(16, 500))
    four = step_time(llama, Setting(ROUND, "fp16", "fp16", tp=4), decode(16, 500))
    for name in ("weights", "kv cache"):
        assert part(four, name).floor == pytest.approx(part(one, name).floor / 4)
    # Two ring sums per layer: each device sends 2 * 3/4 of a message of 16 x 4096 numbers.
    sent = 32 * 2 * 1.5 * 16 * 4096 * 2
    assert part(four, "links").expected == pytest.approx(sent / 1e11)


def test_a_pipeline_has_the_latency_of_one_and_the_rate_of_many(llama: ModelShape) -> None:
    one = step_time(llama, Setting(ROUND, "fp16", "fp16"), decode(4, 500))
    two = step_time(llama, Setting(ROUND, "fp16", "fp16", pp=2), decode(4, 500))
    message = 4 * 4096 * 2 / 1e11
    assert two.floor == pytest.approx(one.floor + message)
    rate, _ = decode_rate(llama, Setting(ROUND, "fp16", "fp16", 500, 8, pp=2))
    assert rate == pytest.approx(8 / two.floor)


def test_devices_without_a_link_cannot_share_a_model(llama: ModelShape) -> None:
    lonely = replace(ROUND, link=0.0)
    for tp, pp, field in ((2, 1, "tp"), (1, 2, "pp")):
        with pytest.raises(ConfigError, match=f"{field}: round has no link"):
            step_time(llama, Setting(lonely, "fp16", "fp16", tp=tp, pp=pp), decode(1, 10))


def test_an_unknown_speed_is_one_error(llama: ModelShape) -> None:
    unknown = Device("this", "cpu", 1 << 30, None, {})
    with pytest.raises(ConfigError, match="run `kvik calibrate`"):
        step_time(llama, Setting(unknown, "bf16", "bf16"), decode(1, 10))


def test_the_batch_at_which_decode_becomes_compute_bound(llama: ModelShape) -> None:
    """Context 1: 2 * weights * B / 1e14 >= 2 * weights / 1e12 from B = 100 on, apart from small
    terms of KV and logits."""
    batch = compute_bound_batch(llama, Setting(ROUND, "fp16", "fp16", 1))
    assert 100 < batch < 106
    assert compute_bound_batch(llama, Setting(ROUND, "fp16", "fp16", 4000)) is None
    # Communication of devices is not read from memory, and stages share a batch.
    shared = compute_bound_batch(llama, Setting(ROUND, "fp16", "fp16", 1, tp=4))
    assert abs(shared - batch) <= 1
    staged = compute_bound_batch(llama, Setting(ROUND, "fp16", "fp16", 1, pp=2))
    assert staged in (2 * batch - 1, 2 * batch)


def test_expected_by_hand(small: ModelShape) -> None:
    """A microsecond per call, and weights at a part of the memory rate: the full read rate up to 8
    MiB, 0.9 of it from 64 MiB on; the machine of helpers."""
    device = measured_device()
    time = step_time(small, Setting(device, "bf16", "bf16"), decode(1, 100))
    read = small.read_bytes("bf16", 1) + small.kv_bytes(100, "bf16")
    rate, reached = device.read_rate(read), 1 - 0.1 * log(read / (8 << 20)) / log(8)
    assert 0.9 < reached < 1
    layer = [512 * (512 + 256), 512 * 512, 512 * 2048, 1024 * 512]
    reading = 2 * sum(2 * weights for weights in layer) / rate
    assert part(time, "weights").floor == pytest.approx(reading)
    assert part(time, "weights").expected == pytest.approx(reading / reached + 8 * 1e-6)
    assert part(time, "small kernels").bound == "host"
    assert part(time, "host").expected == pytest.approx(
        calibration().host_seconds(small.read_bytes("bf16", 1) + small.kv_bytes(100, "bf16"), 1)
    )


def test_a_prompt_costs_the_host_more(small: ModelShape) -> None:
    device = measured_device()
    one, prompt = (
        step_time(small, Setting(device, "bf16", "bf16"), step)
        for step in (decode(1, 100), prefill(100))
    )
    more = part(prompt, "host").expected - part(one, "host").expected
    assert more == pytest.approx(3e-4 + 100 * 1e-6, rel=0.05)


@pytest.mark.parametrize(
    ("weight_format", "role", "inputs", "kind"),
    [
        ("bf16", "qkv", 100, "bf16"),
        ("fp32", "head", 100, "fp32"),
        ("int8", "down", 100, "int8"),
        ("int8-weight-only", "down", 100, "int8-weight-only"),
        ("int4", "down", 896, "int4-g128"),
        ("int4", "down", 320, "int4-g64"),
        ("int4", "down", 288, "int4-g32"),
        ("int4", "down", 100, "int8"),
        ("int4", "head", 896, "int8"),
        ("int4", "router", 896, "bf16"),
    ],
)
def test_the_weight_kind_of_a_matrix(weight_format: str, role: str, inputs: int, kind: str) -> None:
    found = shape_from_config(SMALL, "small").kind_of(
        MatrixGroup(role, 1, inputs, 64), weight_format
    )
    assert linear_kind(found, weight_format) == kind


def test_an_unmeasured_kind_has_a_substitute_or_none() -> None:
    device, linears = measured_device(), calibration().linears
    assert product_costs(device, "int4-g64") == linears["int4-g128"]
    assert product_costs(device, "bf16") == linears["bf16"]
    assert product_costs(device, "int8-weight-only") == ()
    assert product_costs(ROUND, "bf16") == ()


def test_costs_between_rows_follow_the_rows() -> None:
    costs = calibration().linears["bf16"]
    assert costs_at(costs, 8).cached == pytest.approx(costs[1].cached)
    assert costs_at(costs, 20).cached == pytest.approx(20 * costs[0].cached)
    assert costs_at(costs, 4096).cached == pytest.approx(8 * costs[-1].cached)
    assert costs_at(costs, 1) == costs[0]


rows = st.integers(1, 512)
contexts = st.integers(1, 4096)
formats = st.sampled_from(["bf16", "int8", "int4"])
devices = st.sampled_from([*DEVICES, "measured"])


def device_named(name: str) -> Device:
    return measured_device() if name == "measured" else find_device(name)


@settings(max_examples=examples(60))
@given(rows, contexts, formats, devices)
def test_no_time_is_below_its_minimum(
    batch: int, context: int, weight_format: str, name: str
) -> None:
    shape, device = shape_from_config(SMALL, "small"), device_named(name)
    for step in (decode(batch, context), prefill(context), prefill(batch, context)):
        time = step_time(shape, Setting(device, weight_format, "bf16"), step)
        assert 0 < time.floor <= time.expected
        assert all(p.floor <= p.expected for p in time.parts)
        if name != "measured":
            assert time.floor == time.expected


@settings(max_examples=examples(60))
@given(rows, rows, contexts, formats, devices)
def test_more_sequences_take_longer_with_a_higher_rate(
    a: int, b: int, context: int, weight_format: str, name: str
) -> None:
    few, many = sorted((a, b))
    shape, device = shape_from_config(LLAMA_2_7B, "llama"), device_named(name)

    def floor(batch: int) -> float:
        return step_time(
            shape, Setting(device, weight_format, "bf16"), decode(batch, context)
        ).floor

    assert floor(few) <= floor(many) * (1 + 1e-9)
    assert few / floor(few) <= many / floor(many) * (1 + 1e-9)


@settings(max_examples=examples(40))
@given(contexts, contexts, devices)
def test_a_longer_context_takes_longer(a: int, b: int, name: str) -> None:
    shape, device = shape_from_config(LLAMA_2_7B, "llama"), device_named(name)
    short, long = (
        step_time(shape, Setting(device, "bf16", "bf16"), decode(4, context))
        for context in sorted((a, b))
    )
    assert short.floor <= long.floor and short.expected <= long.expected


@settings(max_examples=examples(40))
@given(rows, contexts, st.floats(1.0, 10.0))
def test_a_faster_machine_is_not_slower(batch: int, context: int, times: float) -> None:
    shape = shape_from_config(SMALL, "small")
    better = replace(
        ROUND, bandwidth=times * 1e12, rates={name: times * r for name, r in ROUND.rates.items()}
    )
    slow, fast = (
        step_time(shape, Setting(device, "bf16", "bf16"), decode(batch, context))
        for device in (ROUND, better)
    )
    assert fast.expected <= slow.expected
