"""Models and options that cannot be divided among processes are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.configs import PUBLIC
from helpers.configs import config as model_config
from helpers.planned import LARGE, planned, public_spec

from kvik.config.config import ResolvedConfig
from kvik.config.hardware import Gpu
from kvik.config.parallel import with_ranks
from kvik.config.speculative import DraftSource
from kvik.errors import CapacityError, ConfigError
from kvik.models.gemma4 import ASSISTANT
from kvik.models.model_spec import ModelSpec
from kvik.planner.families import public_configs
from kvik.spec.engine_folder import Built

SIZES = {"max_model_len": 4096, "max_num_seqs": 8, "num_blocks": 1000}


def divided(model: str, ranks: int, stages: int = 1) -> ResolvedConfig:
    cut = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    return planned(model, device="cpu", threads=8, **cut, **SIZES)


@pytest.mark.parametrize(
    ("model", "ranks", "times"),
    [
        ("llama-3.2-1b", 2, 1),  # eight key heads, divided
        ("qwen2.5-0.5b", 4, 2),  # two key heads for four processes
        ("deepseek-v2-lite", 2, 2),  # each process has all latent vectors
    ],
)
def test_the_cache_of_all_processes_is_planned(model: str, ranks: int, times: int) -> None:
    alone = divided(model, 1).memory.kv_cache
    assert divided(model, ranks).memory.kv_cache == times * alone


def test_undivided_parts_are_planned_for_each_process() -> None:
    """An untied embedding of 102,400 x 2,048 in bfloat16."""
    alone, two = (divided("deepseek-v2-lite", ranks).memory for ranks in (1, 2))
    assert two.overhead - alone.overhead > 102_400 * 2_048 * 2 and two.weights == alone.weights


def test_small_matrices_are_whole_in_each_process_of_the_fast_cut() -> None:
    """Latents of 512 + 64 numbers, and 64 experts of all layers but the first, in bfloat16."""
    options = {"device": "cpu", "kernels": "torch", "tensor_parallel_size": 2, "threads": 2}
    options |= {"dtype": "bfloat16", **SIZES}
    exact, fast = (
        planned("deepseek-v2-lite", tensor_parallel_cut=cut, **options).memory
        for cut in ("exact", "fast")
    )
    assert fast.overhead - exact.overhead == 2 * 2048 * (27 * 576 + 26 * 64)


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        ("llama-3.2-1b", (8, 16)),  # the single table is in both stages
        ("llama-3.2-1b", (2, 8, 14, 16)),
        ("deepseek-v2-lite", (14, 27)),
    ],
)
def test_layers_are_divided_by_their_bytes(model: str, ends: tuple[int, ...]) -> None:
    resolved = divided(model, 1, len(ends))
    assert resolved.runner.stage_ends == ends and resolved.scheduler.stages == len(ends)
    assert resolved.runner.threads == 8 // len(ends)


def test_entries_that_sum_up_tokens_are_in_every_process_and_in_the_stage_of_their_layer() -> None:
    """Layers that choose experts by the token are in the first stage."""
    spec = ModelSpec.from_config(PUBLIC["DeepSeek-V4-Flash"])
    options = {"device": "cpu", "kernels": "torch", "threads": 48, **SIZES, "num_blocks": 6000}
    alone, two = (planned(spec, tensor_parallel_size=ranks, **options) for ranks in (1, 2))
    staged = planned(spec, pipeline_parallel_size=41, **options)
    assert two.memory.kv_cache == 2 * alone.memory.kv_cache
    assert staged.runner.stage_ends == tuple(range(3, 44))
    for field, most in (("tensor_parallel_size", 8), ("pipeline_parallel_size", 41)):
        with pytest.raises(ConfigError, match=rf"^{field}: .*\b{most}\b"):
            planned(spec, **options, **{field: most + 1})


def test_a_pipeline_has_the_cache_of_one_process_and_the_head_twice() -> None:
    """A table of 128,256 x 2,048 in bfloat16."""
    alone, two = (divided("llama-3.2-1b", 1, stages).memory for stages in (1, 2))
    assert two.kv_cache == alone.kv_cache and two.weights == alone.weights
    assert two.overhead - alone.overhead > 128_256 * 2_048 * 2


@pytest.mark.parametrize(
    ("model", "most"), [("gpt-oss-20b", 1.0), ("gemma-3-4b", 1.21), ("mimo-v2-flash", 1.21)]
)
def test_each_stage_has_layers_of_each_group(model: str, most: float) -> None:
    """Every stage has room for every block, so a group in one stage would waste it in the other."""
    options = {"device": "cpu", "threads": 8, **SIZES, "num_blocks": 2000}
    alone, two = (
        planned(model, pipeline_parallel_size=stages, **options).memory.kv_cache
        for stages in (1, 2)
    )
    assert two <= most * alone


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_stage_has_the_head_that_drafts_and_the_table_that_it_reads(ranks: int) -> None:
    """A table of 151,552 x 4,096 in bfloat16, whole in each process; the head is a layer more."""
    options = {"device": "cpu", "tensor_parallel_size": ranks, "threads": 8, **SIZES}
    found = [
        planned("glm-4.5-air", pipeline_parallel_size=stages, spec_method=method, **options)
        for stages, method in ((1, "mtp"), (2, "mtp"), (2, "off"))
    ]
    alone, two, plain = (resolved.memory for resolved in found)
    assert two.weights == alone.weights > plain.weights and two.kv_cache == alone.kv_cache
    assert two.overhead - plain.overhead == ranks * 151_552 * 4_096 * 2
    assert found[1].runner.stage_ends > found[2].runner.stage_ends  # it takes the room of layers


def test_layers_that_read_the_same_choice_are_in_one_stage() -> None:
    """The first and the fifth of nine layers have an indexer."""
    small = {"num_hidden_layers": 9, "n_routed_experts": 8, "index_topk_pattern": "FSSSFSSSS"}
    model = ModelSpec.from_config({**public_configs()["glm-5"], **small})
    options = {"device": "cpu", "kernels": "torch", "threads": 2, **SIZES}
    divided = planned(model, pipeline_parallel_size=2, **options)
    assert divided.runner.stage_ends == (4, 9)
    with pytest.raises(ConfigError, match="^pipeline_parallel_size: cannot be 3"):
        planned(model, pipeline_parallel_size=3, **{**options, "threads": 3})


def test_layers_whose_keys_an_assistant_reads_are_in_the_last_stage() -> None:
    """The last layer with a window is the third of six."""
    model = ModelSpec.from_config(
        model_config(
            "Gemma4ForCausalLM", vocab=96, hidden=32, inner=64, layers=6, heads=4, kv_heads=2,
            head_dim=16, global_head_dim=16, hidden_size_per_layer_input=0, sliding_window=24,
            layer_types=["sliding_attention"] * 3 + ["full_attention"] * 3,
        )
    )  # fmt: skip
    layers = tuple(replace(model.layers[owner], kv_from=owner) for owner in (2, 5))
    source = DraftSource("a", replace(model, layers=layers, wiring=ASSISTANT))
    options = {"device": "cpu", "pipeline_parallel_size": 2, "threads": 2, **SIZES}
    drafting = planned(model, source=source, spec_method="assistant", spec_model="a", **options)
    assert planned(model, **options).runner.stage_ends == (3, 6)
    assert drafting.runner.stage_ends == (2, 6)


def test_a_model_on_several_machines_is_planned_for_one_of_them() -> None:
    """A machine of 32 GB holds a quarter of 64 GB of weights."""
    options = {"max_model_len": 1024, "max_num_seqs": 4, "threads": 4, "kv_cache_memory": 1 << 30}
    options |= {"device": "cpu", "pipeline_parallel_size": 4}
    asked = "qwen2.5-32b", replace(LARGE, memory_limit=32 << 30)
    with pytest.raises(CapacityError):
        planned(*asked, **options)
    memory = planned(*asked, distributed_executor_backend="ray", **options).memory
    assert 15 << 30 < memory.weights < 20 << 30 and memory.total < 32 << 30


BY_FIELD: dict[str, dict[str, Any]] = {  # usual options of what a field divides
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "pipeline_parallel_size": {"pipeline_parallel_size": 2},
    "expert_parallel": {"tensor_parallel_size": 2, "expert_parallel": True},
}


@pytest.mark.parametrize(
    ("field", "model", "options"),
    [
        ("tensor_parallel_size", "llama-3.2-1b", {"attention_backend": "sdpa"}),
        ("tensor_parallel_size", "llama-3.2-1b", {"tensor_parallel_size": 33}),
        ("tensor_parallel_size", "llama-3.2-1b", {"threads": 1}),
        ("tensor_parallel_size", "llama-3.2-1b", {"tensor_parallel_size": 0}),
        ("pipeline_parallel_size", "llama-3.2-1b", {"attention_backend": "sdpa"}),
        ("pipeline_parallel_size", "llama-3.2-1b", {"pipeline_parallel_size": 17}),
        ("pipeline_parallel_size", "llama-3.2-1b", {"threads": 1}),
        ("pipeline_parallel_size", "llama-3.2-1b", {"threads": 3, "tensor_parallel_size": 2}),
        ("expert_parallel", "olmoe-1b-7b", {"tensor_parallel_size": 1}),
        ("expert_parallel", "llama-3.2-1b", {}),
        ("expert_parallel", "mixtral-8x7b-v0.1", {"tensor_parallel_size": 9}),
    ],
)
def test_what_processes_cannot_share(field, model, options) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        planned(model, **{"device": "cpu", "threads": 64, **BY_FIELD[field], **options})


def test_an_engine_folder_for_other_kernels() -> None:
    built = Built("torch", "plain-1", "bfloat16", "none", 1 << 30)
    spec = replace(public_spec("llama-3.2-1b"), built=built)
    with pytest.raises(ConfigError, match="must be 1 with an engine folder for torch kernels"):
        planned(spec, tensor_parallel_size=2, threads=8)


# Groups joined by torch.

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 85_000_000_000, 80_000_000_000, (9, 0))
GPUS = (H100, replace(H100, index=1, free_memory=70_000_000_000))


@pytest.mark.parametrize(
    ("hardware", "options", "field"),
    [
        ({"native": False}, {}, "tensor_parallel_size"),
        ({}, {"engine_cache": "/tmp"}, "engine_cache"),
        ({}, {"tensor_parallel_size": 33}, "tensor_parallel_size"),
        ({}, {"kernels": "native", "tensor_parallel_cut": "fast"}, "tensor_parallel_cut"),
        ({}, {"tensor_parallel_cut": "half"}, "tensor_parallel_cut"),
        ({"gpus": GPUS[:1]}, {"device": "cuda"}, "tensor_parallel_size"),
        ({"gpus": GPUS}, {"device": "cuda", "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"gpus": GPUS}, {"device": "cuda:1"}, "tensor_parallel_size"),
        (
            {"gpus": (GPUS[0], replace(GPUS[1], name="A100"))},
            {"device": "cuda"},
            "tensor_parallel_size",
        ),
    ],
)
def test_refusals_of_a_group_that_torch_joins(hardware, options, field) -> None:
    common = {"device": "cpu", "kernels": "torch", "threads": 64, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=f"^{field}: "):
        planned("llama-3.2-1b", replace(LARGE, **hardware), **{**common, **options})


def test_whole_experts_divide_a_sum_in_a_torch_group() -> None:
    options = {"device": "cpu", "kernels": "torch", "threads": 8, **BY_FIELD["expert_parallel"]}
    assert planned("deepseek-v2-lite", **options).runner.fast_cut
    with pytest.raises(ConfigError, match=r"^tensor_parallel_cut: must be fast or auto with torch"):
        planned("deepseek-v2-lite", tensor_parallel_cut="exact", **options)


def test_the_fullest_of_four_gpus_has_two_of_six_experts() -> None:
    options = {"device": "cuda", **SIZES, "tensor_parallel_size": 4}
    six = {**public_configs()["olmoe-1b-7b"], "num_experts": 6, "num_experts_per_tok": 2}
    spec, four = ModelSpec.from_config(six), tuple(replace(H100, index=i) for i in range(4))
    divided, whole = (
        planned(spec, replace(LARGE, gpus=four), expert_parallel=some, **options).memory.weights
        for some in (False, True)
    )
    table = 50_304 * 2048 * 2  # whole in each
    assert (whole - table) / (divided - table) == pytest.approx((2 / 6) / (1 / 4), rel=0.01)


def test_each_gpu_of_a_group_is_planned_for_its_share() -> None:
    """With as much memory as the fullest GPU has left."""
    options = {"device": "cuda", **SIZES, "num_blocks": 512}
    both = replace(LARGE, gpus=GPUS)
    alone, two = (
        planned("qwen2.5-32b", both, tensor_parallel_size=ranks, **options) for ranks in (1, 2)
    )
    assert two.runner.fast_cut and not alone.runner.fast_cut
    assert [two.runner.device_of(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert two.memory.limit < 70_000_000_000 < alone.memory.limit
    table = 152_064 * 5120 * 2  # whole in each
    assert two.memory.kv_cache * 2 == alone.memory.kv_cache
    assert two.memory.weights == pytest.approx((alone.memory.weights + table) / 2, rel=0.01)
    assert not two.runner.graph_sizes
    with pytest.raises(ConfigError, match="must be 2, as when it was recorded"):
        with_ranks(two, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_gpu_of_a_pipeline_is_planned_for_its_stage(ranks: int) -> None:
    """The engine's process, which is the last stage, has the first GPUs."""
    gpus = tuple(replace(H100, index=index) for index in range(2 * ranks))
    options = {"device": "cuda", **SIZES, "num_blocks": 512, "tensor_parallel_size": ranks}
    hardware = replace(LARGE, gpus=gpus)
    group, two = (
        planned("qwen2.5-32b", hardware, pipeline_parallel_size=stages, **options)
        for stages in (1, 2)
    )
    assert two.runner.stage_ends == (32, 64)
    devices = [two.runner.of_stage(stage).device for stage in two.runner.stages]
    assert devices == [f"cuda:{ranks}", "cuda:0"]
    assert two.memory.kv_cache == pytest.approx(group.memory.kv_cache / 2, rel=0.01)
    table = 0 if ranks == 1 else 152_064 * 5120 * 2  # whole in each process of a group
    assert two.memory.weights == pytest.approx(group.memory.weights / 2 + table / 4, rel=0.01)
    elsewhere = replace(two.runner, backend="ray")
    assert elsewhere.of_stage(two.runner.stages[0]).device == "cuda:0"
