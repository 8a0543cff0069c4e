"""Several processes that divide a model generate the same as one, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.calibrated import FAMILIES as CALIBRATED
from helpers.drafted_columns import EAGER, METHODS, SPECULATION
from helpers.drafters import Scripted, install, with_probability
from helpers.matrix import (
    BOTH,
    CONTEXT,
    DISK_TIER,
    FORMATS,
    MEMORY_TIER,
    SQUEEZED,
    STAGES,
    TIGHT,
    TWO,
    Column,
    checked_bits,
    make_model,
)
from helpers.optional_native import needs_native
from helpers.stored_models import CONFIGS as STORED
from helpers.stored_models import SIZES, save_quantised
from helpers.tiny_models import COMPRESSED, IN_BLOCKS, LONGCAT, ZAMBA2, save_tiny, tokens
from helpers.untrained_heads import save_heads
from safetensors.torch import load_file, save_file

from kvik import LLM, SamplingParams
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.export import plan_export
from kvik.nn.checkpoint import SINGLE
from kvik.spec.weights import SCHEMES

pytestmark = [needs_native, pytest.mark.usefixtures("forked")]

FOUR = {"tensor_parallel_size": 4, "threads": 4}
TIGHT_STAGES = {**TIGHT, **STAGES, "max_num_seqs": 4}  # each stage has requests that share a step
COLUMNS = [
    Column("tp2", TWO),
    Column("tp4", FOUR),
    Column("tp2, hits, chunks", {**TWO, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("tp2, preemption, siblings", {**TWO, **SQUEEZED}, siblings=2, must="preemptions"),
    *(
        Column(f"tp2, drafts by {method}", {**TWO, "spec_method": method, **EAGER, **more})
        for method, more in METHODS.items()
    ),
    Column("pp2", STAGES),
    Column("pp4", {"pipeline_parallel_size": 4, "threads": 4}),
    Column("pp2, hits, chunks", {**STAGES, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("pp2, preemption, siblings", {**STAGES, **SQUEEZED}, siblings=2, must="preemptions"),
    *(
        Column(f"pp2, drafts by {method}", {**STAGES, "spec_method": method, **EAGER, **more})
        for method, more in METHODS.items()
    ),
    Column("tp2 pp2", BOTH),
    Column("tp2, whole experts", {**TWO, "expert_parallel": True}),
    Column(
        "tp2 pp2, preemption, chunks",
        {**BOTH, **SQUEEZED, "max_num_batched_tokens": 16},
        must="preemptions",
    ),
]
COLUMNS += [
    Column("tp2, memory tier", {**TIGHT, **TWO}, rounds=2, must="loads"),
    Column("tp4, disk tier", {**TIGHT, **DISK_TIER, **TWO, **FOUR}, rounds=2, must="loads"),
    Column("tp2, swap, siblings", {**SQUEEZED, **MEMORY_TIER, **TWO}, siblings=2, must="swaps"),
    Column("pp2, memory tier", TIGHT_STAGES, rounds=2, must="loads"),
    Column("pp2, disk tier", {**TIGHT_STAGES, **DISK_TIER}, rounds=2, must="loads"),
    Column(
        "pp3, disk tier",
        {**TIGHT_STAGES, **DISK_TIER, "pipeline_parallel_size": 3, "threads": 3, "max_num_seqs": 6},
        rounds=2,
        must="loads",
    ),
    Column("pp2, swap, siblings", {**SQUEEZED, **MEMORY_TIER, **STAGES}, siblings=2, must="swaps"),
    Column(
        "tp2 pp2, both tiers, chunks",
        {
            **TIGHT,
            **BOTH,
            "max_num_seqs": 4,
            "kv_tiers": "memory:1MiB,disk:{folder}:1GiB",
            "max_num_batched_tokens": 33,
        },
        rounds=2,
        must="loads",
    ),
]
BY_NAME = {column.name: column for column in COLUMNS}
# Each format with two processes that divide matrices, and each column with one format. Stages do
# not divide matrices, but one format skips a layer by its number.
CASES = [("bundled", name, BY_NAME["tp2"]) for name in FORMATS]
CASES += [("bundled", "KV in int8", BY_NAME["pp2"])]
# Those without more than another column has are elsewhere.
ELSEWHERE = ("tp2", "tp4", "pp2", "pp2, memory tier", "tp2 pp2", "tp2, whole experts")
ELSEWHERE += ("pp3, disk tier",)
CASES += [("bundled", "int8", column) for column in COLUMNS if column.name not in ELSEWHERE]
FAST = [("int8", BY_NAME[name]) for name in ("pp2, hits, chunks", "tp2, memory tier")]
CASES += [("capped", "bfloat16", BY_NAME[name]) for name in ("tp2", "tp4", "tp2 pp2")]
CASES += [(name, "int4", BY_NAME["tp2"]) for name in ("windowed", "chunked", "latent")]
CASES += [("windowed", "bfloat16", BY_NAME["tp4, disk tier"])]
CASES += [("capped", "bfloat16", BY_NAME["pp3, disk tier"])]  # a stage has no layer of a group
STATEFUL = ("tp2, memory tier", "tp2, swap, siblings", "tp2 pp2, both tiers, chunks")
CASES += [("states", "bfloat16", BY_NAME[name]) for name in (*STATEFUL, "pp2, disk tier")]
CASES += [("alibi", "bfloat16", BY_NAME["tp2 pp2, preemption, chunks"])]
CASES += [("alibi", "int8", BY_NAME["tp2, memory tier"])]
CASES += [("adapted windowed", "bfloat16", BY_NAME["tp2"])]
CASES += [("adapted capped", "bfloat16", BY_NAME["tp2 pp2, preemption, chunks"])]
CASES += [(name, "int4", BY_NAME["pp2"]) for name in ("chunked", "latent", "indexed")]
CASES += [
    (model, "bfloat16", BY_NAME[name])
    for model in ("indexed", "blocks", "entries")
    for name in ("tp2 pp2, preemption, chunks", "pp2, hits, chunks", "tp2, memory tier")
]
CASES += [("pools", "bfloat16", BY_NAME[name]) for name in ("tp2 pp2, both tiers, chunks", "tp4")]
CASES += [
    (name, weights, BY_NAME["tp2, whole experts"])
    for name, weights in (("windowed", "bfloat16"), ("chunked", "int4"), ("latent", "int8"))
]


@pytest.mark.parametrize(
    ("name", "format", "column"),
    [
        pytest.param(
            *case,
            marks=() if case[1:] in FAST else pytest.mark.full,
            id=f"{case[0]}, {case[1]}, {case[2].name}",
        )
        for case in CASES
    ],
)
def test_logprobs_are_those_of_one_process(model, format, column, one_at_a_time, caplog) -> None:
    checked_bits(column, model, format, one_at_a_time)
    assert not caplog.records  # every step was replayed


# Each layout of layers.
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, object]] = {
    "Qwen2": HEADS,
    "GPT2": {"n_embd": 64},
    "OpenAIGPT": {"n_embd": 64},
    **{family: CALIBRATED[family] for family in ("Mamba2", "FalconMamba")},
    "Jamba": {**HEADS, **CALIBRATED["Jamba"]},
    "GPTBigCode": {"n_embd": 64},
    "CodeGen": {"n_embd": 64, "rotary_dim": 8},
    "Persimmon": {"hidden_size": 64, "num_key_value_heads": 4},
    "Falcon": {"hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2},
    "Phi3": HEADS,
    "Cohere2": HEADS,
    "Apertus": {**HEADS, "head_dim": 16},
    "Qwen3_5": {  # the second of two stages has no states
        **CALIBRATED["Qwen3_5"],
        **HEADS,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "OlmoHybrid": {**CALIBRATED["OlmoHybrid"], **HEADS, "head_dim": 16},
    "KimiLinear": {
        **CALIBRATED["KimiLinear"],
        **{"num_attention_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
    },
    "MiniMaxM3VL": IN_BLOCKS,
    "DeepseekV4": {**COMPRESSED, "o_groups": 4},
    "HYV4": {
        **CALIBRATED["HYV4"],
        **{"num_attention_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
        **{"index_head_dim": 32, "index_topk": 10},
    },
    "BailingHybrid": {
        **CALIBRATED["BailingHybrid"],
        **{"num_attention_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
    },
    "MiniMax": {**CALIBRATED["MiniMax"], **HEADS},
    "LongcatFlash": {**LONGCAT, "kv_lora_rank": 32},
    "Zamba2": {**ZAMBA2, "hidden_size": 64, "use_shared_attention_adapter": True},
    "Step3p7": {**CALIBRATED["Step3p7"], **HEADS, "head_dim": 16},
    "Laguna": {**CALIBRATED["Laguna"], **HEADS, "head_dim": 16},
    "ModernBertDecoder": {**CALIBRATED["ModernBertDecoder"], "hidden_size": 64},
    "Dbrx": {"d_model": 64},
    "BioGpt": {"hidden_size": 64, "intermediate_size": 64},
    "Bloom": {"hidden_size": 96, "n_head": 6},
    "BitNet": HEADS,
    "Flint": {**CALIBRATED["Flint"], **HEADS, "head_dim": 16},
    "MiMoV2Flash": {
        **CALIBRATED["MiMoV2Flash"],
        **HEADS,
        **{"num_key_value_heads": 1, "head_dim": 32, "v_head_dim": 16},
    },
    "FalconH1": {**CALIBRATED["FalconH1"], **HEADS, "head_dim": 16},
    "Lfm2": {**CALIBRATED["Lfm2"], **HEADS},
    "GraniteMoeHybrid": {**CALIBRATED["GraniteMoeHybrid"], **HEADS},
    "NemotronH": {**CALIBRATED["NemotronH"], **HEADS, "head_dim": 16},
    "Qwen3Moe": {**CALIBRATED["Qwen3Moe"], **HEADS, "head_dim": 16},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **CALIBRATED["DeepseekV3"],
        "num_attention_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
    },
    "OPT": {"hidden_size": 64, "word_embed_proj_dim": 16, "ffn_dim": 64},
    "Gemma3n": {**CALIBRATED["Gemma3n"], **HEADS, "head_dim": 16},
    "Gemma4": {
        **CALIBRATED["Gemma4"],
        "moe_intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "head_dim": 16,
        "global_head_dim": 32,
    },
    "HunYuanMoEV1": {**CALIBRATED["HunYuanMoEV1"], **HEADS, "head_dim": 16},
}

EXPERTS = (
    "GptOss",
    "DeepseekV3",
    "NemotronH",
    "Jamba",
    "KimiLinear",
    "HYV4",
    "MiniMaxM3VL",
    "DeepseekV4",
    "BailingHybrid",
    "LongcatFlash",
    "MiniMax",
    "Step3p7",
    "Laguna",
    "MiMoV2Flash",
    "Flint",
    "Dbrx",
)


def answers(
    model: Path, count: int, way: str = "tensor_parallel_size", **options: object
) -> list[object]:
    """Return the results of some prompts, the second time with prefix hits, to the bit."""
    common = {"device": "cpu", "max_model_len": 64, "num_blocks": 64, "threads": count}
    ids = [tokens(24, seed) for seed in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    with LLM(str(model), **common, **{way: count}, **options) as llm:
        outputs = llm.generate(ids, params)
        outputs += llm.generate(ids, params.with_changes(prompt_logprobs=None))
    return [(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.full
@pytest.mark.parametrize(("number", "family"), [*enumerate(FAMILIES)])
def test_models_of_each_kind(number, family, tmp_path, monkeypatch) -> None:
    """With three processes, some have fewer key heads, and a share may be empty. Of two stages each
    has one layer."""
    save_tiny(tmp_path, family, **FAMILIES[family])
    found = [answers(tmp_path, ranks, dtype="float32") for ranks in (1, 2 + number % 2)]
    if "Moe" in family or family in EXPERTS:
        found.append(answers(tmp_path, 2, dtype="float32", expert_parallel=True))
    # Layers of the others read vectors of tokens, or are parts of blocks.
    if family not in ("Gemma3n", "Gemma4", "LongcatFlash", "Zamba2"):
        found.append(answers(tmp_path, 2, "pipeline_parallel_size", dtype="float32"))
    if family in (
        "Qwen3_5",
        "OlmoHybrid",
        "KimiLinear",
        "BailingHybrid",
        "MiniMax",
        "Mamba2",
        "FalconMamba",
        "Jamba",
        "FalconH1",
        "Lfm2",
        "GraniteMoeHybrid",
        "NemotronH",
        "Zamba2",
    ):  # states keep drafts, in all processes
        texts = [[*tokens(24, seed), *found[0][seed][1]] for seed in range(4)]
        install(monkeypatch, lambda parts: Scripted(parts, texts, with_probability(0.6)))
        ways = ("tensor_parallel_size", "pipeline_parallel_size")
        for way in ways[:1] if family == "Zamba2" else ways:
            found.append(answers(tmp_path, 2, way, dtype="float32", **SPECULATION))
    assert found == [found[0]] * len(found)


@pytest.mark.parametrize("family", ["GPT2", pytest.param("OPT", marks=pytest.mark.full)])
def test_an_eagle_layer_reads_embeddings_in_the_last_stage(family, tmp_path) -> None:
    """Of tokens and, in some models, of positions."""
    save_tiny(tmp_path / "model", family, **FAMILIES[family])
    (tmp_path / "heads").mkdir()
    save_heads(tmp_path / "heads", "eagle", hidden=64)
    options = {"spec_method": "eagle", "spec_model": str(tmp_path / "heads"), "dtype": "float32"}
    ids = [tokens(24, seed) for seed in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=9)
    found = []
    for processes in ({}, TWO, STAGES, BOTH):
        common = {"device": "cpu", "max_model_len": 64, "num_blocks": 64, **EAGER, **processes}
        with LLM(str(tmp_path / "model"), **common, **options) as llm:
            outputs = llm.generate(ids, greedy)
            drafts = llm.stats().speculation.drafts
        found.append((drafts, [output.outputs[0].token_ids for output in outputs]))
    assert found == [found[0]] * len(found) and found[0][0].accepted


PROCESSES = ({}, TWO, {"tensor_parallel_size": 3, "threads": 3}, STAGES, BOTH, {})


@pytest.mark.full
@pytest.mark.each(1)  # a format does not know the layers
@pytest.mark.usefixtures("loads_always")
@pytest.mark.parametrize("name", ["bundled", "capped", "latent", "states", "beside"])
@pytest.mark.parametrize("format", ["auto", "int8"])
def test_pages_are_alike_for_all_numbers_of_processes(name, format, tmp_path) -> None:
    """Engines with other numbers of processes load the pages of the first one, also where several
    processes have the same head."""
    model = make_model(name, tmp_path)
    common = {"device": "cpu", "max_model_len": CONTEXT, "kv_cache_dtype": format}
    common["kv_tiers"] = f"disk:{tmp_path / 'kv'}:1GiB"
    vocab, sampling = 96, SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    asked = [tokens(90, seed, vocab) for seed in range(3)]
    found, first = [], {}
    for processes in PROCESSES:
        with LLM(**model, **common, **{"threads": 1, **processes}) as llm:
            outputs = llm.generate(asked, sampling)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            (disk,) = llm.stats().moves.tiers
        assert [output.num_cached_tokens for output in outputs] == [80 * bool(first)] * 3
        assert disk.failed == 0 and not (first and disk.stored)
        pages = {path.name: path.read_bytes() for path in (tmp_path / "kv").glob("*/*/*.kv")}
        first = first or pages  # the first engine writes its pages when it is closed
        assert pages and pages == first
    assert found == [found[0]] * len(found)


@pytest.mark.full
@pytest.mark.parametrize(("number", "case"), [*enumerate(STORED)])
def test_quantised_checkpoints(number, case, tmp_path) -> None:
    """Scales that all rows of a matrix share are available on ranks with rows of other layers."""
    save_tiny(tmp_path / "plain", "Qwen2", **SIZES)
    save_quantised(tmp_path / "plain", tmp_path / "model", tmp_path / "twin", STORED[case])
    if case == "fp8-static":
        widen_input_scales(tmp_path / "model" / SINGLE)
    found = [answers(tmp_path / "model", ranks) for ranks in (1, 2 + number % 2)]
    assert found[0] == found[1]


def widen_input_scales(file: Path) -> None:
    """Of keys, values and up: matrices take the largest scale of their layers."""
    weights = load_file(file)
    for name, tensor in weights.items():
        times = {"k_proj": 2, "v_proj": 3, "up_proj": 4}.get(name.split(".")[-2], 1)
        weights[name] = tensor * times if name.endswith("input_scale") else tensor
    save_file(weights, file)


# Model, quantization and dtype of an engine folder.
FOLDERS = [("Qwen2", scheme, "float32") for scheme in SCHEMES]
FOLDERS += [
    ("Qwen2", "none", "bfloat16"),
    ("Qwen3Moe", "int8", "bfloat16"),
    ("DeepseekV3", "int4", "float32"),
    ("GPT2", "none", "float32"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "quantization", "dtype"), FOLDERS, ids=[", ".join(case) for case in FOLDERS]
)
def test_one_engine_folder_serves_groups_of_all_sizes(
    family, quantization, dtype, tmp_path
) -> None:
    save_tiny(tmp_path / "model", family, **FAMILIES[family])
    options = {"quantization": quantization, "dtype": dtype}
    alone = answers(tmp_path / "model", 1, **options)
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu", threads=2, **options)
    build_engine(config, tmp_path / "engine", lambda done, total: None)
    for ranks in (1, 2, 3):
        assert answers(tmp_path / "engine", ranks) == alone
    assert answers(tmp_path / "engine", 2, "pipeline_parallel_size") == alone
    if "Moe" in family:
        assert answers(tmp_path / "engine", 2, expert_parallel=True) == alone


@pytest.mark.full
def test_an_engine_folder_of_a_quantised_checkpoint(tmp_path) -> None:
    """Its inputs are reordered."""
    save_tiny(tmp_path / "plain", "Qwen2", **SIZES)
    config = STORED["gptq-order"]
    save_quantised(tmp_path / "plain", tmp_path / "model", tmp_path / "twin", config)
    made = EngineConfig(model=str(tmp_path / "model"), device="cpu", threads=2)
    build_engine(made, tmp_path / "engine", lambda done, total: None)
    assert answers(tmp_path / "engine", 3) == answers(tmp_path / "model", 1)


@pytest.mark.full
def test_a_gguf_file(tmp_path) -> None:
    save_tiny(tmp_path / "model", "Llama", **HEADS)
    plan_export(tmp_path / "model", "Q4_0").write(tmp_path / "model.gguf", lambda size: None)
    alone = answers(tmp_path / "model.gguf", 1)
    assert answers(tmp_path / "model.gguf", 3) == alone
