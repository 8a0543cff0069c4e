"""Achieved over possible rates, and the bottleneck in words, for intervals where it is evident."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from helpers.calibrations import calibration
from helpers.configs import PUBLIC
from helpers.public_configs import public_shape

from kvik import LLM, SamplingParams
from kvik.config.config import EngineConfig
from kvik.config.hardware import Hardware
from kvik.config.resolve import resolve
from kvik.core.work import Work
from kvik.engine.stats import EngineStats, LoopTime
from kvik.planner.devices import Device, Setting
from kvik.planner.efficiency import WHAT_HELPS, Efficiency, efficiency, running_device
from kvik.planner.families import read_shape, shape_from_config

SHAPE = shape_from_config(PUBLIC["llama-3-8b"], "llama-3-8b")
DEVICE = Device("test", "cuda", 80 << 30, 2e12, {"bf16": 500e12})
START = EngineStats(0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0)
LAYERS, KV = 32, 131_072  # layers of the model; bytes per token in bf16


def decoding(steps: int, rows: int, context: int) -> Work:
    """Return the work of steps in which `rows` requests of `context` tokens decode."""
    tokens = steps * rows
    return Work(
        decode_steps=steps,
        decode_step_tokens=tokens,
        decode_tokens=tokens,
        logit_rows=tokens,
        decode_pairs=tokens * context * LAYERS,
        decode_kv_bytes=tokens * context * KV,
    )


def prefilling(prompts: int, tokens: int) -> Work:
    """Return the work of steps of one whole prompt each."""
    return Work(
        mixed_steps=prompts,
        prefill_tokens=prompts * tokens,
        logit_rows=prompts,
        prefill_pairs=prompts * tokens * (tokens + 1) // 2 * LAYERS,
        prefill_kv_bytes=prompts * tokens * KV,
    )


def both(a: Work, b: Work) -> Work:
    return Work(**{name: value + getattr(b, name) for name, value in asdict(a).items()})


def judge(work: Work, time: LoopTime, device: Device = DEVICE) -> Efficiency:
    seconds = time.executor + time.host + time.idle
    after = replace(START, work=work, time=time)
    return efficiency(START, after, seconds, SHAPE, Setting(device, "bf16", "bf16"))


def floor_of(work: Work) -> float:
    return judge(work, LoopTime(executor=1.0)).floor


def test_bytes_and_operations_of_decoding() -> None:
    found = judge(decoding(10, 4, 1000), LoopTime(executor=2.0, host=0.5))
    weights = SHAPE.weight_bytes("bf16") - 128256 * 4096 * 2 + 4 * 4096 * 2  # rows looked up
    assert found.weight_bytes == 10 * weights
    assert found.kv_bytes == 40 * 1001 * KV  # read and written
    per_token = 2 * (SHAPE.parameters - 128256 * 4096 - SHAPE.other_parameters)
    assert found.flops == 40 * (per_token + 4 * LAYERS * 32 * 128 * 1000)
    assert found.read_rate == (found.weight_bytes + found.kv_bytes) / 2.5
    assert found.bandwidth_share == found.read_rate / 2e12
    assert found.compute_share == found.flops / 2.5 / 500e12
    assert found.floor == pytest.approx((found.weight_bytes + found.kv_bytes) / 2e12)


def test_mla_attends_in_the_latent_space() -> None:
    """DeepSeek-V3: 128 heads score 576 numbers of a key and add up 512 of them."""
    shape = public_shape("deepseek-v3")
    work = Work(decode_steps=1, decode_step_tokens=1, decode_tokens=1, decode_pairs=61 * 1000)
    after = replace(START, work=work, time=LoopTime(executor=1.0))
    device = replace(DEVICE, rates={"bf16": 500e12, "fp8": 1e15})
    found = efficiency(START, after, 1.0, shape, Setting(device, "fp8", "bf16"))
    pairs = 2 * 128 * (576 + 512) * 61 * 1000
    assert found.flops == shape.matmul_flops(1, 0) + pairs


def test_states_are_read_and_written_for_each_row() -> None:
    """LFM2-1.2B: ten layers store two inputs of 2,048 channels, in fp32."""
    shape = shape_from_config(PUBLIC["LFM2-1.2B"], "lfm2")
    work = both(decoding(10, 4, 0), Work(mixed_steps=3, prefill_tokens=90, decode_tokens=5))
    after = replace(START, work=work, time=LoopTime(executor=1.0))
    found = efficiency(START, after, 1.0, shape, Setting(DEVICE, "bf16", "bf16"))
    assert found.state_bytes == (40 + 3 + 5) * 2 * (10 * 2 * 2048 * 4)
    assert found.kv_bytes == found.state_bytes + 135 * shape.kv_bytes_per_token("bf16")
    states = 135 * 10 * 2 * 3 * 2048
    assert found.flops == shape.matmul_flops(135, 40) + states


def test_a_prompt_needs_its_arithmetic() -> None:
    found = judge(prefilling(1, 4096), LoopTime(executor=1.0))
    head = 2 * 128256 * 4096
    matrices = 2 * (SHAPE.parameters - 2 * 128256 * 4096 - SHAPE.other_parameters)
    pairs = 4096 * 4097 // 2
    assert found.flops == 4096 * matrices + head + 4 * LAYERS * 32 * 128 * pairs
    assert found.floor == pytest.approx(found.flops / 500e12)


# More computing than reading of weights, but less than both together.
MANY = decoding(10, 256, 4000)
FEW, LONG, PROMPTS = decoding(100, 2, 500), decoding(100, 64, 8000), prefilling(20, 4096)


@pytest.mark.parametrize(
    ("work", "time", "bottleneck"),
    [
        (FEW, LoopTime(executor=1.1 * floor_of(FEW)), "weights bandwidth"),
        (LONG, LoopTime(executor=1.2 * floor_of(LONG)), "KV bandwidth"),
        (MANY, LoopTime(executor=1.1 * floor_of(MANY)), "KV bandwidth"),
        (PROMPTS, LoopTime(executor=1.3 * floor_of(PROMPTS)), "compute"),
        (FEW, LoopTime(floor_of(FEW), 2 * floor_of(FEW)), "host"),
        (FEW, LoopTime(executor=0.1 * floor_of(FEW)), "ceiling"),
        (PROMPTS, LoopTime(executor=0.5 * floor_of(PROMPTS)), "ceiling"),
        (FEW, LoopTime(executor=4 * floor_of(FEW)), "overhead"),
        (FEW, LoopTime(floor_of(FEW), 0.0, 3 * floor_of(FEW)), "load"),
        (Work(), LoopTime(idle=3.0), "load"),
        (
            replace(FEW, queued_steps=90, block_short_steps=80),
            LoopTime(executor=floor_of(FEW)),
            "queue",
        ),
        (
            replace(FEW, queued_steps=90, slot_short_steps=60),
            LoopTime(executor=floor_of(FEW)),
            "queue",
        ),
    ],
)
def test_the_bottleneck_follows(work: Work, time: LoopTime, bottleneck: str) -> None:
    assert judge(work, time).bottleneck == bottleneck
    assert bottleneck in WHAT_HELPS


def test_a_full_queue_is_not_the_limit_of_a_busy_machine() -> None:
    """More concurrent requests would not help if prompts or the cache take the time."""
    for work in (LONG, PROMPTS):
        waiting = replace(work, queued_steps=100, block_short_steps=100)
        assert judge(waiting, LoopTime(executor=floor_of(work))).bottleneck != "queue"


@pytest.mark.parametrize("work", [FEW, LONG, PROMPTS, both(FEW, PROMPTS), both(LONG, PROMPTS)])
def test_no_rate_exceeds_its_ceiling_at_the_minimum_time(work: Work) -> None:
    found = judge(work, LoopTime(executor=floor_of(work)))
    assert found.bandwidth_share <= 1 + 1e-9 and found.compute_share <= 1 + 1e-9
    assert max(found.bandwidth_share, found.compute_share) > 0.5


def test_decodes_in_steps_with_prompts_are_not_counted_twice() -> None:
    """Half the decoding rows were in mixed steps: bytes and operations still add up."""
    work = both(decoding(100, 8, 1000), prefilling(100, 512))
    work = replace(work, decode_tokens=1600, logit_rows=1700, decode_kv_bytes=1600 * 1000 * KV)
    found = judge(work, LoopTime(executor=10.0))
    assert found.kv_bytes == (1600 * 1001 + 100 * 512 * 2) * KV
    assert found.steps == 200 and found.tokens == 1600 + 51_200
    assert found.weight_bytes == pytest.approx(200 * SHAPE.read_bytes("bf16", 8), rel=0.001)
    # Half of the decodes are bound by reading; the others overlap with the prompts' arithmetic.
    alone = 100 * SHAPE.read_bytes("bf16", 8) + 800 * 1001 * KV
    one_row = SHAPE.matmul_flops(1, 1) + 4 * 32 * 128 * LAYERS * 1000
    mixed = found.flops - 800 * one_row
    assert found.floor == pytest.approx(alone / 2e12 + mixed / 500e12, rel=0.01)


def test_without_ceilings_the_report_names_the_command() -> None:
    blind = Device("this", "cpu", 1 << 30, None, {}, unknown="run `kvik calibrate`")
    found = judge(FEW, LoopTime(executor=1.0, host=0.2), blind)
    assert found.bandwidth_share is None and found.compute_share is None and found.floor is None
    assert found.bottleneck == "executor" and "83%" in found.reason
    assert "kvik calibrate" in found.missing
    assert judge(FEW, LoopTime(executor=1.0, host=2.0), blind).bottleneck == "host"


def test_statistics_without_times_count_as_work() -> None:
    after = replace(START, work=FEW)
    found = efficiency(START, after, 2.0, SHAPE, Setting(DEVICE, "bf16", "bf16"))
    assert found.time == LoopTime(executor=2.0)


def test_a_real_engine_counts_the_work_of_its_requests() -> None:
    shape = read_shape("")
    with LLM("", max_model_len=256, dtype="float32") as llm:
        before = llm.stats()
        prompt, output = list(range(300, 337)), 9
        greedy = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        llm.generate([prompt], greedy)
        after = llm.stats()
    work = after.work.since(before.work)
    assert (work.prefill_tokens, work.decode_tokens) == (37, output - 1)
    assert (work.mixed_steps, work.decode_steps, work.logit_rows) == (1, output - 1, output)
    token = shape.kv_bytes_per_token("fp32")
    assert work.prefill_kv_bytes == 37 * token
    # The first token fed back sees the prompt and itself: 38 keys; the last one 45.
    assert work.decode_kv_bytes == sum(range(38, 37 + output)) * token
    assert work.prefill_pairs == shape.num_layers * 37 * 38 // 2
    time = after.time.since(before.time)
    assert time.executor > 0 and time.host > 0
    cpu = replace(DEVICE, kind="cpu", rates={"fp32": 1e12})
    found = efficiency(before, after, 1.0, shape, Setting(cpu, "fp32", "fp32"))
    assert found.tokens == 37 + output - 1
    assert found.weight_bytes == pytest.approx(output * shape.read_bytes("fp32", 1), rel=0.05)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_uses_the_calibration_of_all_its_threads(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calibration is for two threads, which two processes have together."""
    hardware = Hardware("Some CPU", 2, 1 << 34, "RAM", frozenset(("avx2", "fma")), native=True)
    monkeypatch.setattr("kvik.planner.efficiency.detect", lambda: hardware)
    monkeypatch.setattr("kvik.planner.efficiency.load", lambda path: calibration())
    spec = read_shape("").spec
    wishes = EngineConfig(device="cpu", threads=2, tensor_parallel_size=ranks)
    resolved = resolve(wishes, spec, hardware, "")
    assert resolved.runner.threads == 2 // ranks
    assert running_device(resolved).measured
