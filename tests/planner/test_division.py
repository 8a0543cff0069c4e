"""The cost of dividing a model among processes of a CPU, compared with real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.calibrations import calibration, measured_device
from helpers.optional_native import needs_native
from helpers.public_configs import config, public_shape
from helpers.tiny_families import ALL
from helpers.tiny_models import GEMMA3N, IN_BLOCKS, INDEXED, LONGCAT, MINIMAX, ZAMBA2, save_tiny
from msgspec import structs

from kvik.config.config import EngineConfig
from kvik.config.hardware import detect
from kvik.config.resolve import resolve
from kvik.models.model_spec import read_model_spec
from kvik.planner.calibration import ExchangeCost, ReadRate
from kvik.planner.devices import Device, Setting, find_device
from kvik.planner.families import read_shape, shape_from_config
from kvik.planner.parallel import collectives
from kvik.planner.plan import division_of
from kvik.planner.roofline import decode, decode_rate, prefill_rate, step_time
from kvik.planner.shape import ModelShape
from kvik.worker.group import RankSetup
from kvik.worker.ranks import Rank

FAMILIES = (
    *("Llama", "GPT2", "Cohere2", "Qwen3_5", "Lfm2", "Qwen3Moe", "DeepseekV3"),
    *("Gemma4-token-inputs", "Gemma4-key-is-value", "Gemma4-experts", "OPT"),
    *("GraniteMoeHybrid", "NemotronH", "NemotronH-experts", "FalconH1", "Gemma3n", "HYV4"),
    *("LongcatFlash", "MiniMax", "MiniMaxM3VL", "Zamba2"),
)
MORE = {
    "OPT": {"hidden_size": 64, "word_embed_proj_dim": 16, "ffn_dim": 64},
    "Gemma3n": GEMMA3N,
    "HYV4": INDEXED,
    "LongcatFlash": LONGCAT,
    "MiniMax": MINIMAX,
    "MiniMaxM3VL": IN_BLOCKS,
    "Zamba2": {**ZAMBA2, "hidden_size": 64},
}


@needs_native
@pytest.mark.parametrize(
    ("family", "whole"),
    [
        *((family, False) for family in FAMILIES),
        *(("Qwen3Moe", True), ("DeepseekV3", True), ("NemotronH-experts", True)),
    ],
)
def test_exchanges_are_those_that_a_process_records(
    family: str, whole: bool, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family.partition("-")[0], **{**ALL, **MORE}[family])
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    options |= {"tensor_parallel_size": 2, "expert_parallel": whole}
    wishes = EngineConfig(device="cpu", threads=2, **options)
    resolved = resolve(wishes, read_model_spec(tmp_path), detect(), str(tmp_path))
    with torch.inference_mode():
        rank = Rank(resolved, RankSetup(1, 2, np.zeros(1 << 24, np.uint8)))
    found = collectives(read_shape(str(tmp_path)), exact=True, whole_experts=whole)
    assert rank.digest.startswith(f"{found.count} exchanges, ")


# 10 GB/s and 100 G operations a second; an exchange takes 2 us, a message 20 us and 1 GB/s.
COSTS = {"exchanges": (ExchangeCost(2, 2e-6), ExchangeCost(8, 6e-6)), "hop": 2e-5, "hop_rate": 1e9}
CPU = replace(measured_device(), calibration=structs.replace(calibration(), **COSTS))
PLAIN = Device("plain", "cpu", 1 << 40, 1e10, {"fp32": 5e10, "bf16": 1e11, "int8": 2e11})
LLAMA = shape_from_config(config("llama-3.2-1b"), "llama-3.2-1b")
AT = Setting(CPU, "bf16", "bf16", context=512, batch=8)


def parts(at: Setting, shape: ModelShape = LLAMA) -> dict[str, float]:
    step = decode(at.group, at.context)
    return {part.name: part.expected for part in step_time(shape, at, step).parts}


def test_messages_by_hand() -> None:
    assert not parts(AT).keys() & {"exchanges", "hops"}
    two = parts(replace(AT, tp=2))
    assert two["exchanges"] == pytest.approx(82 * 2e-6) and two["hops"] == pytest.approx(2e-5)
    assert parts(replace(AT, tp=4))["exchanges"] == pytest.approx(82 * 4e-6)  # between 2 and 8
    stages = parts(replace(AT, pp=2))  # of four requests each, 2,048 numbers of two bytes
    assert stages["hops"] == pytest.approx(2 * 2e-5 + 4 * 2048 * 2 / 1e9)
    both = parts(replace(AT, tp=2, pp=2))  # broadcast, repeated, sent, repeated
    assert both["hops"] == pytest.approx(4 * 2e-5 + 4 * 2048 * 2 / 1e9)
    assert both["exchanges"] == two["exchanges"]


def test_processes_of_a_cpu_are_no_faster_than_one() -> None:
    ceilings = [decode_rate(LLAMA, replace(AT, device=PLAIN, tp=tp))[0] for tp in (1, 2, 4, 8)]
    assert ceilings == pytest.approx([ceilings[0]] * 4)  # eight key heads, each read once
    assert decode_rate(LLAMA, replace(AT, device=PLAIN, tp=16))[0] < ceilings[0]


def test_keys_that_several_processes_store_are_read_by_each() -> None:
    """Four processes share two KV heads, so there are two of each."""
    fast = replace(CPU, calibration=structs.replace(calibration(), reads=(ReadRate(1, 1e15),)))
    at, shared = replace(AT, device=fast, context=8192), public_shape("qwen2.5-0.5b")
    two, four = (parts(replace(at, tp=tp), shared)["kv cache"] for tp in (2, 4))
    assert four > 1.5 * two


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_of_one_memory_read_the_weights_for_each_step_in_flight(pp: int) -> None:
    """Decoding is slower by that factor, and prefill as fast, apart from uneven stages."""
    at = replace(AT, device=replace(PLAIN, rates={"bf16": 1e12}), context=16, batch=16)
    alone, _ = decode_rate(LLAMA, at)
    staged, _ = decode_rate(LLAMA, replace(at, pp=pp))
    assert staged == pytest.approx(alone / pp, rel=0.02)
    prompts, _ = prefill_rate(LLAMA, at, 512)
    staged, _ = prefill_rate(LLAMA, replace(at, pp=pp), 512)
    assert 0.75 * prompts < staged <= prompts


def test_a_single_request_has_all_of_the_memory_bandwidth() -> None:
    """Its stages compute one after the other, each with its own cores."""
    alone, staged = (step_time(LLAMA, replace(AT, device=PLAIN, batch=1, pp=p), decode(1, 16))
                     for p in (1, 4))  # fmt: skip
    assert staged.reading == pytest.approx(alone.reading)
    assert staged.computing == pytest.approx(4 * alone.computing)


def test_both_cuts_are_reported_for_gpus() -> None:
    """The fast cut sums two vectors per token in each layer."""
    gpu = replace(AT, device=find_device("h100"), tp=2)
    found = division_of(LLAMA, gpu)
    assert (found.cut, found.collectives.layer, found.exact.layer) == ("fast", 2, 5)
    assert found.layer_bytes == 2 * 2 * LLAMA.hidden_size
    assert found.exact.numbers > found.collectives.numbers


def test_a_division_is_reported() -> None:
    assert division_of(LLAMA, AT) is None
    found = division_of(LLAMA, replace(AT, tp=2, pp=2))
    assert (found.cut, found.layer_bytes, found.hop_bytes) == ("exact", 2 * 17408, 2 * 2048)
    assert (found.exchange, found.hop) == (2e-6, 2e-5)
    both = parts(replace(AT, tp=2, pp=2))
    assert found.step == pytest.approx(both["exchanges"] + both["hops"])
    assert found.rate < found.rate_of_one
    unmeasured = division_of(
        LLAMA, replace(AT, device=replace(CPU, calibration=calibration()), tp=2)
    )
    assert unmeasured.exchange is None and unmeasured.step == 0.0
    gpus = division_of(LLAMA, Setting(find_device("h100"), "bf16", "bf16", 512, 8, tp=2, pp=2))
    assert gpus.cut == "fast" and gpus.rate_of_one is None
    assert gpus.exchange is None and gpus.step > 0
