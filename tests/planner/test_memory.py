"""Memory by part: the engine's own decisions, figures computed by hand, and limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import PUBLIC
from helpers.planned import planned
from helpers.public_configs import config, public_shape

from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.config.draft_heads import HeadsSpec, heads_for, shipped_heads
from kvik.config.hardware import Gpu, Hardware
from kvik.config.memory import RANK_BYTES, MemoryPlan
from kvik.config.model_source import BUNDLED
from kvik.config.speculative import OWN_HEAD, DraftSource
from kvik.config.step_memory import StepSize
from kvik.config.units import GIB
from kvik.errors import ConfigError
from kvik.models.model_spec import read_model_spec
from kvik.planner.advice.advise import advise_shape
from kvik.planner.advice.reasons import Goal
from kvik.planner.devices import Device, Setting, find_device
from kvik.planner.families import read_shape, shape_from_config, with_own_head
from kvik.planner.memory import Memory, MemoryPlanner
from kvik.planner.plan import Question, draft_source, plan, plan_shape, setting_of
from kvik.planner.shape import ModelShape
from kvik.spec.kv import block_bytes
from kvik.spec.weights import SCHEMES

GPU = Gpu(0, "some GPU", 24 * GIB, 20 * GIB, (9, 0))
CPU_ONLY = Hardware("some CPU", 4, 20 * GIB, "RAM", frozenset({"avx2", "fma"}), native=True)
MACHINES = {
    "cpu": CPU_ONLY,
    "cpu, torch alone": replace(CPU_ONLY, native=False, cuda_build=True),
    "gpu": replace(CPU_ONLY, gpus=(GPU,), cuda_build=True),
    "gpu, captured steps": replace(CPU_ONLY, gpus=(GPU,), cuda_build=True, triton=True),
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
QUANTIZED = [name for name in SCHEMES if name != "none"]
H200 = find_device("h200")
REQUESTS = {"max_model_len": 500, "max_num_seqs": 3, "num_blocks": 96}  # of 31.25 blocks of 16


def shape(name: str) -> ModelShape:
    return read_shape("") if name == "bundled" else public_shape(name)


def device_of(hardware: Hardware) -> Device:
    if hardware.gpus:
        return Device("this", "cuda", hardware.gpus[0].free_memory, None, {})
    return Device("this", "cpu", hardware.memory_limit, None, {})


def setting(hardware: Hardware, weights: str = "bf16", kv: str = "bf16", **more: Any) -> Setting:
    """Return the setting of `REQUESTS`, with changes."""
    asked = {"context": 500, "batch": 3, **more}
    return Setting(device_of(hardware), weights, kv, hardware=hardware, **asked)


def memory_of(model: ModelShape, at: Setting) -> Memory:
    return MemoryPlanner.of(model, at).memory()


def check_same(found: Memory, own: MemoryPlan) -> None:
    """Check that a plan has the bytes of the engine's own."""
    assert (found.weights, found.kv_cache) == (own.weights, own.kv_cache)
    assert (found.activations, found.runtime) == (own.activations, own.overhead)
    assert (found.total, found.limit) == (own.total, own.limit)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("weights", [*DTYPES, *QUANTIZED])
@pytest.mark.parametrize("name", ["bundled", "gpt2"])
def test_a_plan_is_what_the_engine_decides(machine: str, weights: str, name: str) -> None:
    model, hardware = shape(name), MACHINES[machine]
    dtype = DTYPES.get(weights, model.dtype)
    quantization = "none" if weights in DTYPES else weights
    options = {"dtype": dtype, "quantization": quantization, **REQUESTS}
    own = planned(model.spec, hardware, **options).memory
    at = setting(hardware, weights, {v: k for k, v in DTYPES.items()}[dtype])
    found = memory_of(model, at)
    check_same(found, own)
    assert MemoryPlanner.of(model, at).total == own.total
    assert found.fits


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_the_formats_of_this_machine_are_the_engines(
    dtype: str, weights: str | None, tp: int
) -> None:
    """The engine computes fp32 checkpoints in fp32, and fp16 ones in what the CPU has."""
    stored = json.loads((BUNDLED / "config.json").read_text()) | {"dtype": dtype}
    model, hardware = shape_from_config(stored, "m"), CPU_ONLY
    options = {"quantization": weights or "none", "tensor_parallel_size": tp, **REQUESTS}
    question = Question(context=500, batch=3, dtype=weights, tp=tp)
    found = plan_shape(model, device_of(hardware), question, hardware).memory
    check_same(found, planned(model.spec, hardware, **options).memory)


def test_an_engine_folder_is_planned_as_it_was_built(tmp_path: Path) -> None:
    """Its file is mapped, with the padding between its parts, and no advice changes it."""
    for built in ({"dtype": "float32"}, {"quantization": "int8"}):
        config = EngineConfig(device="cpu", threads=1, **built)
        output = tmp_path / next(iter(built))
        folder, manifest = build_engine(config, output, lambda size, total: None)
        found = plan(Question(model=str(folder), context=500)).memory
        assert found.weights == manifest.weight_bytes
        other = plan(Question(model=str(folder), context=500, dtype="int4"))
        assert other.shape.notes[-1].endswith("int4 needs another engine folder")
        advised = advise_shape(read_shape(str(folder)), H200, Goal()).flags
        assert not [flag for flag in advised if flag.split()[0] in ("--dtype", "--quantization")]


@pytest.mark.parametrize(
    ("name", "question", "field"),
    [
        ("deepseek-v2-lite", Question(kv_cache_dtype="int4"), "kv_cache_dtype"),
        ("mistral-7b-v0.1", Question(draft="gpt2"), "draft"),
    ],
)
def test_what_the_engine_refuses_is_not_planned(name: str, question: Question, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_shape(shape(name), H200, question)
    assert refused.value.field == field


def test_states_have_room_for_drafts_in_each_part() -> None:
    model = shape_from_config(PUBLIC["Qwen3.5-9B"], "m")
    plain = Question(pp=2, batch=4, context=1000)
    asked = (plain, replace(plain, draft="gpt2"))
    planners = (MemoryPlanner.of(*setting_of(model, H200, question, None)) for question in asked)
    parts = [planner.parts() for planner in planners]
    # Of 4 requests and 8 checkpoints, 12 layers, and five drafts: inputs of the convolution and of
    # the delta net, and gates.
    each = 12 * 12 * 4 * 5 * (8192 + 8192 + 2 * 32)
    assert [b.kv_cache - a.kv_cache for a, b in zip(*parts, strict=True)] == [each, each]


def test_states_are_no_empty_blocks() -> None:
    planner = MemoryPlanner.of(
        shape_from_config(PUBLIC["Qwen3.5-9B"], "m"), Setting(H200, "bf16", "bf16", 1000, 4)
    )
    memory, state = planner.memory(), planner.shape.state_bytes
    assert memory.states == 3 * planner.at.batch * state  # each with two checkpoints
    blocks = memory.kv_cache - memory.states
    assert memory.kv_padding == blocks - planner.part.kv_bytes(planner.at.context, "bf16") * (
        planner.at.batch
    )


def test_layers_of_two_shapes_take_the_blocks_of_the_engine() -> None:
    """Two layers without a window share the memory of one with a window."""
    model, hardware = shape("gemma-4-26b-a4b"), replace(CPU_ONLY, memory_limit=400 * GIB)
    own = planned(model.spec, hardware, kv_cache_dtype="fp8").cache
    planner = MemoryPlanner.of(model, setting(hardware, kv="fp8"))
    found = planner.cache(StepSize(500, 3, 2048), own.block_size)
    sizes = (block_bytes(cache.groups, cache.block_size) for cache in (found, own))
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seqs", [2, 64])
def test_a_simulated_engine_has_the_blocks_of_a_real_one(machine: str, seqs: int) -> None:
    """On a CPU other programs need memory too; no more blocks than all requests can use."""
    model, hardware = shape("bundled"), MACHINES[machine]
    options = {"dtype": "bfloat16", "max_num_seqs": seqs, "max_num_batched_tokens": 2048}
    own = planned(model.spec, hardware, **options).cache
    planner = MemoryPlanner.of(model, setting(hardware))
    found = planner.cache(StepSize(1024, seqs, 2048), own.block_size)
    assert found.num_blocks == own.num_blocks


DRAFTERS = {
    "draft_model": DraftSource("d", read_model_spec(BUNDLED.with_name("stories-draft"))),
    "medusa": DraftSource(
        "d", heads=heads_for(shipped_heads("medusa", BUNDLED), "medusa", 256, 2048)
    ),
    "eagle": DraftSource("d", heads=HeadsSpec("eagle", 256, 2048, 5, inner_size=512)),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("method", DRAFTERS)
def test_a_drafter_takes_the_memory_of_the_engines_plan(method: str, machine: str) -> None:
    """Its weights, its part of the cache, its steps, and rows of logits for drafts."""
    model, hardware, source = shape("bundled"), MACHINES[machine], DRAFTERS[method]
    options = {"dtype": "bfloat16", "spec_method": method, "spec_model": "d", **REQUESTS}
    alone = memory_of(model, setting(hardware))
    found = memory_of(model, setting(hardware, source=source))
    assert found.weights == alone.weights + found.draft_weights
    check_same(found, planned(model.spec, hardware, source, **options).memory)
    assert found.total > alone.total


@pytest.mark.parametrize("machine", MACHINES)
def test_a_head_on_inner_layers_takes_the_memory_of_the_engines_plan(
    machine: str, tmp_path: Path
) -> None:
    of_model = config("llama-3.2-1b")
    head = {**of_model, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(head | {"draft_vocab_size": 32_000}))
    model, hardware = shape_from_config(of_model, "m"), MACHINES[machine]
    source = draft_source(str(tmp_path), model)
    options = {"dtype": "bfloat16", "spec_method": "eagle3", "spec_model": "d", **REQUESTS}
    alone = memory_of(model, setting(hardware))
    found = memory_of(model, setting(hardware, source=source))
    assert found.weights == alone.weights + found.draft_weights
    check_same(found, planned(model.spec, hardware, source, **options).memory)


@pytest.mark.parametrize("machine", MACHINES)
def test_an_assistant_takes_the_memory_of_the_engines_plan(machine: str, tmp_path: Path) -> None:
    of_model = config("gemma-4-e2b")
    text = {**of_model["text_config"], "num_hidden_layers": 4, "hidden_size": 256}
    text |= {"hidden_size_per_layer_input": 0, "intermediate_size": 2048}
    text["layer_types"] = [*["sliding_attention"] * 3, "full_attention"]
    head = {"architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": 1536}
    (tmp_path / "config.json").write_text(json.dumps(head | {"text_config": text}))
    model, hardware = shape_from_config(of_model, "m"), MACHINES[machine]
    source = draft_source(str(tmp_path), model)
    options = {"dtype": "bfloat16", "spec_method": "assistant", "spec_model": "d", **REQUESTS}
    alone = memory_of(model, setting(hardware))
    found = memory_of(model, setting(hardware, source=source))
    assert found.weights == alone.weights + found.draft_weights
    own = planned(model.spec, hardware, source, **options).memory
    assert (found.weights, found.activations) == (own.weights, own.activations)
    assert found.kv_cache == alone.kv_cache  # it reads the model's


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "of_model",
    [
        {**PUBLIC["Qwen3.5-9B"], "num_hidden_layers": 4},
        {**config("glm-4.5-air"), "num_hidden_layers": 3, "n_routed_experts": 16},
        {
            **config("glm-4.5-air"), "num_hidden_layers": 2, "n_routed_experts": 16,
            "quantization_config": {
                "quant_method": "fp8", "modules_to_not_convert": ["model.layers.2"]
            },
        },
    ],
)  # fmt: skip
def test_the_own_head_takes_the_memory_of_the_engines_plan(
    of_model: dict[str, Any], machine: str
) -> None:
    model, hardware = shape_from_config(of_model, "m"), MACHINES[machine]
    options = {"dtype": "bfloat16", "spec_method": "mtp", **REQUESTS}
    weights = model.stored
    alone = memory_of(model, setting(hardware, weights))
    found = memory_of(with_own_head(model), setting(hardware, weights, source=OWN_HEAD))
    assert found.weights == alone.weights + found.draft_weights
    check_same(found, planned(model.spec, hardware, **options).memory)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *(("llama-3.1-8b", False), ("gemma-3-4b", False), ("gpt2", False)),
        *(("qwen3-30b-a3b", False), ("qwen3-30b-a3b", True), ("deepseek-v2-lite", False)),
    ],
)
def test_a_plan_for_gpus_is_what_the_engine_decides(
    name: str, whole: bool, tp: int, kv: str
) -> None:
    model = shape(name)
    gpus = tuple(replace(GPU, index=i, free_memory=79 * GIB) for i in range(4))
    hardware = replace(CPU_ONLY, gpus=gpus, cuda_build=True, triton=True)
    options = {"dtype": "bfloat16", "kv_cache_dtype": "auto" if kv == "bf16" else kv}
    options |= {"max_model_len": 1000, "max_num_seqs": 8, "num_blocks": 8 * 63}
    whole = whole and tp > 1
    options |= {"tensor_parallel_size": tp, "expert_parallel": whole}
    own = planned(model.spec, hardware, **options).memory
    at = setting(hardware, kv=kv, context=1000, batch=8, tp=tp, expert_parallel=whole)
    found = memory_of(model, at)
    assert (found.weights, found.activations) == (own.weights, own.activations)
    assert found.runtime == own.overhead


def packed(bits: int, *ignored: str, group: int = 128, **more: Any) -> dict[str, Any]:
    """Return the quantisation of a checkpoint by compressed-tensors."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}, **more}
    ignore = ["lm_head", *ignored]
    facts = {"format": "pack-quantized", "ignore": ignore, "config_groups": groups}
    return {"quant_method": "compressed-tensors", **facts}


WIDER = {"targets": ["re:.*(down|v)_proj"], "weights": {"num_bits": 8, "type": "int"}}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        {"quant_method": "gptq", "bits": 8, "sym": False},  # loaded as floats
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        packed(4, r"re:.*layers\.[0-7]\..*"),  # some layers are floats
        packed(4, other=WIDER),
    ],
    ids=str,
)
def test_a_quantised_checkpoint_counts_as_the_engine_loads_it(
    machine: str, stored: dict[str, Any]
) -> None:
    values = {**config("llama-3.2-1b"), "quantization_config": stored}
    hardware, model = MACHINES[machine], shape_from_config(values, "m")
    own = planned(model.spec, hardware, dtype="bfloat16", **REQUESTS).memory
    found = memory_of(model, setting(hardware, model.stored))
    assert found.weights == own.weights
    assert (found.activations, found.runtime) == (own.activations, own.overhead)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("bundled", False),
        ("qwen2.5-0.5b", False),  # some of its two key heads are in several processes
        ("gpt2", False),  # a table of positions
        ("mixtral-8x7b-v0.1", False),
        ("mixtral-8x7b-v0.1", True),  # its experts are not divided
        ("deepseek-v2-lite", False),
        ("gemma-2-9b", False),  # every other layer has a window
    ],
)
def test_divided_models_have_the_memory_of_the_engines_plan(
    name: str, whole: bool, weights: str, tp: int, pp: int
) -> None:
    model = replace(shape(name), dtype="bfloat16")
    hardware = replace(CPU_ONLY, cores=8, memory_limit=400 * GIB)
    quantization = "int4" if weights == "int4" else "none"
    whole = whole and tp > 1
    cut = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "expert_parallel": whole}
    options = {**REQUESTS, "num_blocks": 96 * (2 if name == "gemma-2-9b" else 1), **cut}
    own = planned(model.spec, hardware, dtype="bfloat16", quantization=quantization, **options)
    at = setting(hardware, weights, tp=tp, pp=pp, expert_parallel=whole)
    planner = MemoryPlanner.of(model, at)
    check_same(planner.memory(), own.memory)
    parts = planner.parts()
    assert len(parts) == (0 if tp * pp == 1 else tp * pp)
    if parts:
        assert sum(part.total for part in parts) == own.memory.total
        repeated = sum(part.weights for part in parts) - own.memory.weights
        others = [part.runtime for part in parts]
        rest = own.memory.activations % len(parts)  # in the engine's part
        assert repeated + sum(others) == own.memory.overhead + rest
        assert others.count(RANK_BYTES) == tp * pp - 1


def test_divisions_that_the_engine_refuses_are_refused() -> None:
    llama = shape("llama-3.2-1b")
    hardware = replace(CPU_ONLY, cores=4)
    at = setting(hardware, context=100, batch=1)
    for change, field, message in (
        ({"tp": 5}, "tp", "must be at most 4, as there are 4 threads, not 5"),
        ({"tp": 2, "pp": 3}, "pp", "must be at most 2, as there are 4 threads, 2 for each stage"),
    ):
        with pytest.raises(ConfigError, match=f"^{field}: .*{message}"):
            memory_of(llama, replace(at, **change))


def test_each_stage_of_gpus_is_planned() -> None:
    llama, at = shape("llama-3-70b"), Setting(H200, "bf16", "bf16", 4096, 4, tp=2, pp=3)
    parts = MemoryPlanner.of(llama, at).parts()
    assert [(p.stage, p.layers) for p in parts] == [(0, 26), (1, 28), (2, 26)]
    memory = memory_of(llama, at)
    assert memory.weights == max(part.weights for part in parts)
    assert memory.kv_cache == max(part.kv_cache for part in parts)


def test_llama_3_70b_by_hand() -> None:
    at = Setting(H200, "bf16", "bf16", 8192, 10, tp=8, utilization=0.5)
    memory = memory_of(shape("llama-3-70b"), at)
    assert memory.kv_per_token == 80 * 2 * 128 * 2  # one KV head of eight
    assert memory.kv_per_request == 8192 * 40_960
    assert memory.kv_cache == (10 * 512 + 1) * 16 * 40_960  # one block is never allocated
    table = 128_256 * 8192  # of tokens, whole on each device
    assert memory.weights == pytest.approx(2 * (table + (70.55e9 - table) / 8), rel=0.01)
    assert memory.limit == H200.memory // 2
    parts = memory.weights + memory.kv_cache + memory.activations + memory.runtime
    assert memory.total == parts
    assert memory.fits == (parts <= memory.limit)


def test_the_latent_is_cached_once_and_on_each_device() -> None:
    memory = MemoryPlanner.of(
        shape("deepseek-v3"), Setting(H200, "fp8", "bf16", 4096, 2, tp=8)
    ).memory()
    assert memory.kv_per_token == 61 * (512 + 64) * 2 == 70_272
    assert memory.kv_per_request == 4096 * 70_272


@pytest.mark.parametrize(
    ("name", "weights", "kv", "context", "batch"),
    [
        ("llama-3-8b", "bf16", "bf16", 8192, 4),
        ("llama-3-8b", "int4", "int8", 2048, 100),
        ("mistral-7b-v0.1", "fp8", "fp8", 32_768, 2),
        ("gemma-2-9b", "int8", "int4", 4096, 8),
        ("deepseek-v2-lite", "bf16", "bf16", 32_768, 500),
    ],
)
def test_the_largest_batch_is_the_largest_that_fits(
    name: str, weights: str, kv: str, context: int, batch: int
) -> None:
    model = shape(name)
    at = Setting(find_device("a100-40g"), weights, kv, context, batch)
    memory = memory_of(model, at)
    most = memory.largest_batch
    assert most > 0
    assert memory_of(model, replace(at, batch=most)).fits
    assert not memory_of(model, replace(at, batch=most + 1)).fits
    longest = MemoryPlanner.of(model, at).longest_context()
    assert memory_of(model, replace(at, context=longest)).fits
    if longest < model.max_context:
        assert not memory_of(model, replace(at, context=longest + 1)).fits
    assert memory.fits == (batch <= most) == (context <= longest)


def test_reserving_the_whole_context_leaves_most_of_it_empty() -> None:
    llama = shape("llama-3-8b")  # a context of 8192 tokens of 131,072 bytes
    at = Setting(find_device("a100-40g"), "bf16", "bf16", 1024, 10)
    waste = MemoryPlanner.of(llama, at).kv_waste()
    assert waste.block_size == 16
    assert waste.paged == 10 * 7.5 * 131_072  # 0 to 15 tokens of the last block are empty
    assert waste.reserved == 8192 * 131_072
    assert waste.empty == pytest.approx(7 / 8)
    memory = memory_of(llama, at)
    assert waste.batch == pytest.approx(memory.largest_batch / 8, abs=2)
    full = replace(at, context=8192)
    whole = MemoryPlanner.of(llama, full).kv_waste()
    assert (whole.empty, whole.batch) == (0, memory_of(llama, full).largest_batch)
    # Every other layer reserves 4096 tokens at most.
    gemma = MemoryPlanner.of(shape("gemma-2-9b"), at).kv_waste()
    assert gemma.reserved == 21 * (8192 + 4096) * 2 * 8 * 256 * 2


def test_a_plan_that_does_not_fit_is_an_error_with_the_amount() -> None:
    model, at = shape("llama-3-70b"), Setting(H200, "fp32", "bf16", 8192, 1)
    memory = memory_of(model, at)
    assert not memory.fits
    assert memory.missing == memory.total - memory.limit > 100 * GIB
    assert (memory.largest_batch, MemoryPlanner.of(model, at).longest_context()) == (0, 0)


def test_unfilled_slots_of_blocks_are_counted() -> None:
    plain = MemoryPlanner.of(shape("llama-3-8b"), Setting(H200, "bf16", "bf16", 1000, 2)).memory()
    # 1000 tokens take 63 blocks of 16, and one more block is never allocated.
    assert plain.kv_padding == (2 * (63 * 16 - 1000) + 16) * 131_072
