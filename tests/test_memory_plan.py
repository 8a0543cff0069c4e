"""The memory plan is a close upper bound of what a process uses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.adapters import draw_pairs, linear_layers, write_adapter
from helpers.configs import PUBLIC
from helpers.configs import config as model_config
from helpers.paged_model import PagedModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvik import LLM
from kvik.attention.fresh_prompts import PADDED
from kvik.attention.sdpa import MAX_KEYS
from kvik.build import build_engine
from kvik.config.config import EngineConfig
from kvik.config.hardware import detect
from kvik.config.memory import LOADING_BYTES, QUANTIZED_SCRATCH_BYTES, TRANSPOSED_LOADING_BYTES
from kvik.config.step_memory import GATHERED_KEYS, PROMPT_PADDING
from kvik.config.units import GIB, MIB
from kvik.kernels.fp8 import PIECE
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import RUN_BYTES, SINGLE, TRANSPOSED_BYTES
from kvik.nn.loader import RANDOM_DRAWS
from kvik.nn.parts import RUN_WEIGHTS
from kvik.spec.engine_folder import WEIGHTS

native = pytest.mark.skipif(
    find_spec("kvik.kernels.cpu._native") is None,
    reason="kvik was installed without native kernels",
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")

SMALL = model_config(
    "Qwen2ForCausalLM",
    vocab=60_000, hidden=256, inner=1024, layers=2, heads=8, kv_heads=2, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_1B = PUBLIC["llama-3.2-1b"]

# Uses all kinds of memory: all blocks of the cache at once, a step of the most tokens, sampling
# with every rule, prompt logprobs and, if there is a tokenizer, a grammar.
SCRIPT = """
import json, pathlib, sys
from kvik import LLM, SamplingParams

def status(field):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[field].split()[0]) * 1024

with LLM(sys.argv[1], device="cpu", threads=2, enable_prefix_caching=False,
         **json.loads(sys.argv[2])) as llm:
    cache, limits = llm.resolved.cache, llm.resolved.scheduler
    every_rule = SamplingParams(temperature=0.9, top_p=0.9, typical_p=0.9, min_p=0.01,
                                repetition_penalty=1.1, logit_bias={5: 1.0}, ignore_eos=True)
    count = 12 if llm.resolved.speculation else 2  # so that there is a step full of drafts
    requests = limits.max_num_seqs
    length = min(cache.num_blocks * cache.block_size // requests, limits.max_model_len)
    prompts = [[3 + (i * 31 + j) % 900 for j in range(length - count)] for i in range(requests)]
    outputs = llm.generate(prompts, every_rule.with_changes(max_tokens=count))
    drafts = sum(output.num_drafted_tokens for output in outputs)
    scored = [7] * min(300, limits.max_model_len - 1)
    llm.generate([scored], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    if (pathlib.Path(sys.argv[1]) / "tokenizer.json").exists():
        llm.generate([scored], SamplingParams(max_tokens=1, structured={"choice": ["a", "b"]}))
    memory = llm.resolved.memory
    print(json.dumps({"peak": status("VmHWM"), "planned": memory.total, "weights": memory.weights,
                      "activations": memory.activations, "kv_cache": memory.kv_cache,
                      "overhead": memory.overhead, "drafts": drafts}))
"""


@dataclass(frozen=True)
class Measured:
    """The peak of a process and its plan, in bytes."""

    peak: int
    planned: int
    weights: int
    activations: int
    kv_cache: int
    overhead: int
    drafts: int


def run(config: dict[str, Any], folder: Path, **wishes: Any) -> Measured:
    (folder / "config.json").write_text(json.dumps(config))
    return measured(folder, load_format="random", **wishes)


def measured(folder: Path, **wishes: Any) -> Measured:
    command = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(wishes)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return Measured(**json.loads(result.stdout))


def write_tokenizer(folder: Path, entries: int) -> None:
    """Write a byte-level BPE tokenizer with tokens of up to three bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(letters, letters))
    longer = product(map("".join, pairs), letters)
    merges = [*islice(chain(pairs, longer), entries - len(letters))]
    tokens = [*letters, *map("".join, merges)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.full
@linux
@pytest.mark.parametrize(
    ("kernels", "quantization"),
    [
        ("auto", "int8"),
        ("torch", "none"),
        pytest.param("auto", "none", marks=pytest.mark.nightly),
        pytest.param("torch", "int8", marks=pytest.mark.nightly),
    ],
)
def test_the_peak_stays_below_the_plan(quantization: str, kernels: str, tmp_path: Path) -> None:
    found = run(
        SMALL,
        tmp_path,
        quantization=quantization,
        kernels=kernels,
        max_num_seqs=48,
        max_num_batched_tokens=1024,
        max_model_len=4096,
        num_blocks=600,
    )
    assert found.peak <= found.planned <= 1.5 * found.peak


@pytest.mark.full
@linux
def test_attention_over_entries_is_planned(tmp_path: Path) -> None:
    facts = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 2048,
        "hidden_size": 512,
        **{"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 128},
        **{"qk_rope_head_dim": 16, "q_lora_rank": 256, "o_groups": 4, "o_lora_rank": 128},
        **{"moe_intermediate_size": 256, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"num_hidden_layers": 4, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 4]},
        **{"index_n_heads": 16, "index_head_dim": 64, "index_topk": 64},
    }
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 1024, "max_model_len": 1536}
    found = run(facts, tmp_path, kernels="auto", num_blocks=520, **sizes)
    assert found.peak <= found.planned <= 1.7 * found.peak


@pytest.mark.full
@linux
@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.nightly)])
def test_a_draft_model_is_planned_with_its_cache_and_probabilities(
    kernels: str, tmp_path: Path
) -> None:
    """Every draft is sampled, with probabilities of all tokens."""
    small = tmp_path / "draft"
    small.mkdir()
    draft = {**SMALL, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
    (small / "config.json").write_text(json.dumps(draft))
    wish = {"method": "draft_model", "model": str(small), "adaptive": False}
    wish["num_speculative_tokens"] = 6
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 1024}
    wishes = {"kernels": kernels, "dtype": "bfloat16", "num_blocks": 239, **sizes}
    found = run(SMALL, tmp_path, speculative_config=wish, **wishes)
    assert found.drafts > 16 * 6
    own, drafts = 2 * 2 * 32, 6 * 2 * 16  # layers, heads, head_dim
    assert found.kv_cache == 240 * 16 * 2 * 2 * (own + drafts)
    assert found.peak <= found.planned <= 1.5 * found.peak


@pytest.mark.full
@linux
@pytest.mark.parametrize("experts", [False, True], ids=["layers", "experts"])
@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.nightly)])
def test_adapters_are_in_memory_once(kernels: str, experts: bool, tmp_path: Path) -> None:
    config = SMALL
    if experts:
        config = {**SMALL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
        config |= {"num_hidden_layers": 4, "intermediate_size": 512, "num_experts_per_tok": 4}
    layers = linear_layers(ModelSpec.from_config(config), experts=experts)
    pairs = draw_pairs(layers, rank=32)
    count = 100 if experts else 150
    folders = {f"a{i}": str(write_adapter(tmp_path / f"a{i}", pairs)) for i in range(count)}
    write_tokenizer(tmp_path, config["vocab_size"])
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024}
    wishes = {"kernels": kernels, "num_blocks": 300, "dtype": "bfloat16", **sizes}
    found = run(config, tmp_path, adapters=folders, **wishes)
    assert found.weights > 150 * MIB
    assert found.peak <= found.planned <= 1.3 * found.peak


@pytest.mark.full
@linux
def test_mapped_weights_are_planned_like_loaded_ones(
    tmp_path: Path,
) -> None:
    """Mapped pages occupy as much memory as loaded weights."""
    model, engine = tmp_path / "model", tmp_path / "engine"
    model.mkdir()
    config = {**SMALL, "vocab_size": 120_000}
    (model / "config.json").write_text(json.dumps(config))
    declared = PagedModel(None, spec=ModelSpec.from_config(config)).builder.declared
    tensors = {t.name: torch.zeros(t.shape, dtype=torch.bfloat16) for t in declared.tensors}
    save_file(tensors, model / SINGLE)
    wishes = EngineConfig(model=str(model), device="cpu", threads=2)
    build_engine(wishes, engine, lambda done, total: None)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 512}
    mapped, loaded = (measured(folder, num_blocks=40, **sizes) for folder in (engine, model))
    assert mapped.weights == (engine / WEIGHTS).stat().st_size > 60 * MIB
    assert mapped.weights == pytest.approx(loaded.weights, rel=0.01)
    assert mapped.peak == pytest.approx(loaded.peak, rel=0.13)  # the weights are 14 %
    assert mapped.planned == pytest.approx(loaded.planned, rel=0.001)
    assert max(mapped.peak, loaded.peak) <= mapped.planned


@linux
@native
@pytest.mark.full
@pytest.mark.parametrize(
    ("quantization", "layers", "within"),
    [  # loading varies by 5 %; tokenizers of real models are larger
        pytest.param("none", 16, 0.05, marks=pytest.mark.nightly),
        pytest.param("none", 4, 0.15, marks=pytest.mark.nightly),
        pytest.param("int8", 8, 0.1, marks=pytest.mark.nightly),
        ("int4", 4, 0.15),
    ],
)
def test_the_plan_matches_the_peak_of_a_large_model(
    quantization: str, layers: int, within: float, tmp_path: Path
) -> None:
    if detect(()).memory_limit < 6 * GIB:
        pytest.skip("less than 6 GiB of memory are free")
    write_tokenizer(tmp_path, LLAMA_1B["vocab_size"])
    config = {**LLAMA_1B, "num_hidden_layers": layers}
    # Four prompts fill the cache and, together, a step.
    sizes = {"max_num_seqs": 4, "max_model_len": 512, "num_blocks": 4 * 512 // 16}
    sizes["max_num_batched_tokens"] = 4 * 512
    found = run(config, tmp_path, quantization=quantization, **sizes)
    assert found.peak <= found.planned <= (1 + within) * found.peak


@pytest.mark.full
@native
@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"architectures": ["LlamaForCausalLM"], "intermediate_size": 300},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64},
        {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 3000, "head_dim": 32},
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 256, "n_layer": 3, "n_head": 8}
        | {"n_positions": 4096, "n_inner": 1024},
        {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "qk_rope_head_dim": 32}
        | {"kv_lora_rank": 128, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"first_k_dense_replace": 3, "num_experts_per_tok": 2},
        {"architectures": ["ApertusForCausalLM"], "intermediate_size": 3000, "hidden_act": None},
        {"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 32, "key_multiplier": 0.5}
        | {"ssm_in_multiplier": 0.5},
        {"architectures": ["KimiLinearForCausalLM"], "qk_rope_head_dim": 32, "kv_lora_rank": 128}
        | {"qk_nope_head_dim": 32, "v_head_dim": 32, "linear_num_heads": 12, "linear_head_dim": 64}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"first_k_dense_replace": 3},
        {"architectures": ["LagunaForCausalLM"], "mlp_layer_types": ["dense"] * 3}
        | {"num_attention_heads_per_layer": [4, 16, 4], "num_experts_per_tok": 2},
        {"architectures": ["Step3p7ForConditionalGeneration"], "head_dim": 32}
        | {"mlp_layer_types": ["dense"] * 3, "swiglu_limits_shared": [1.0] * 3},
        {"architectures": ["BitNetForCausalLM"], "hidden_act": "relu2"},
        {"architectures": ["Gemma4ForCausalLM"], "hidden_act": None, "head_dim": 32}
        | {"global_head_dim": 32, "hidden_size_per_layer_input": 1024},
        {"architectures": ["Gemma3nForCausalLM"], "hidden_act": None, "num_kv_shared_layers": 1}
        | {"layer_types": ["full_attention"] * 3, "activation_sparsity_pattern": [0.9] * 3},
        {"architectures": ["LongcatFlashForCausalLM"], "num_layers": 2, "zero_expert_num": 2}
        | {"ffn_hidden_size": 1024, "expert_ffn_hidden_size": 256, "q_lora_rank": 64}
        | {"qk_rope_head_dim": 32, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"n_routed_experts": 4, "moe_topk": 2},
        {"architectures": ["MiniMaxForCausalLM"], "num_experts_per_tok": 2}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {"architectures": ["Zamba2ForCausalLM"], "hidden_act": "gelu", "n_mamba_heads": 32}
        | {"layers_block_type": ["hybrid", "mamba", "hybrid"], "num_mem_blocks": 1},
        {"architectures": ["MiniMaxM3VLForCausalLM"], "hidden_act": None, "index_n_heads": 2}
        | {"mlp_layer_types": ["dense"] * 3, "layer_types": ["minimax_m3_sparse"] * 3}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
        | {"index_head_dim": 32, "index_block_size": 16, "dense_intermediate_size": 1024}
        | {"num_experts_per_tok": 2, "rotary_dim": 32},
        {"architectures": ["HYV4ForCausalLM"], "mlp_layer_types": ["dense"] * 3}
        | {"qk_rope_head_dim": 32, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"num_experts_per_tok": 2, "index_head_dim": 64, "q_lora_rank": 64},
        {"architectures": ["OlmoForCausalLM"], "clip_qkv": 8.0, "intermediate_size": 300},
        {"architectures": ["MiMoV2FlashForCausalLM"], "mlp_layer_types": ["dense"] * 3}
        | {"head_dim": 48, "v_head_dim": 32, "num_experts_per_tok": 2},
        {"architectures": ["Mamba2ForCausalLM"], "num_heads": 32, "head_dim": 16},
        {"architectures": ["FalconMambaForCausalLM"], "intermediate_size": 1024},
        {"adapters": 2},
        {"adapters": 2, "architectures": ["GPT2LMHeadModel"], "n_embd": 256, "n_layer": 3}
        | {"n_head": 8, "n_positions": 4096, "n_inner": 1024},
    ],
)
def test_the_buffers_of_a_tape_are_planned(
    facts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**SMALL, "num_hidden_layers": 3, **facts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = linear_layers(ModelSpec.from_config(config))
    adapters = {
        f"adapter-{i}": write_adapter(tmp_path / str(i), draw_pairs(layers, rank=16))
        for i in range(config.get("adapters", 0))
    }
    buffers = pytest.importorskip("kvik.kernels.cpu.buffers")
    pooled: list[int] = []

    def noted(bytes: int, huge: bool) -> np.ndarray:
        if not huge:
            pooled.append(bytes)
        return allocate(bytes, huge)

    allocate = buffers._native.allocate
    monkeypatch.setattr(buffers._native, "allocate", noted)

    def sizes(tokens: int) -> tuple[int, int]:
        """Return planned and actual bytes of a step with this many tokens."""
        pooled.clear()
        wishes = {"max_num_seqs": 2, "max_model_len": 512, "max_num_batched_tokens": tokens}
        with LLM(
            str(tmp_path),
            load_format="random",
            device="cpu",
            dtype="bfloat16",
            adapters=adapters,
            **wishes,
        ) as llm:
            return llm.resolved.memory.activations, sum(pooled)

    small, large = sizes(512), sizes(1024)  # the difference is the memory per token
    planned, taken = large[0] - small[0], large[1] - small[1]
    assert taken <= planned <= 3.5 * taken  # some models use buffers for fewer than all layers


def test_constants_of_the_plan_cover_those_of_the_kernels() -> None:
    assert 2 * RUN_BYTES + max(RUN_WEIGHTS, RANDOM_DRAWS) * 4 <= LOADING_BYTES
    assert 2 * TRANSPOSED_BYTES <= TRANSPOSED_LOADING_BYTES
    assert GATHERED_KEYS >= MAX_KEYS
    assert PROMPT_PADDING >= PADDED
    assert QUANTIZED_SCRATCH_BYTES >= 6 * 4 * PIECE  # copies in fp32
