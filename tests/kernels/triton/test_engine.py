"""A whole engine on Triton's kernels generates the tokens of the plain one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.adapters import draw_pairs, linear_layers, write_adapter
from helpers.configs import small
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.interpreted_engine import interpret_engines
from helpers.tiny_models import COMPRESSED, DELTA, GEMMA3N, IN_BLOCKS, INDEXED

from kvik import LLM, SamplingParams
from kvik.attention.fresh_prompts import FreshPrompts
from kvik.kernels.triton import attention_chosen as chosen
from kvik.kernels.triton import attention_paged as decode
from kvik.kernels.triton import draw, entries, experts, indexer, norm, rotary, rows, states
from kvik.models.model_spec import ModelSpec

pytestmark = INTERPRETED_ONLY

# Small, because everything is interpreted.
CONFIG = small(architectures=["MistralForCausalLM"], num_hidden_layers=2, sliding_window=6)
EXPERTS = small(
    architectures=["MixtralForCausalLM"],
    num_hidden_layers=2,
    num_local_experts=4,
    num_experts_per_tok=2,
)
LATENT = small(
    architectures=["DeepseekV2ForCausalLM"],
    num_hidden_layers=2,
    first_k_dense_replace=2,
    num_experts_per_tok=2,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=24,
    v_head_dim=16,
)
# Heads of two sizes, of which the wide ones use keys as values; a layer reads another's cache.
WIDE_HEADS = small(
    architectures=["Gemma4ForCausalLM"],
    hidden_act=None,
    num_hidden_layers=4,
    head_dim=16,
    global_head_dim=512,
    sliding_window=9,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=1,
    hidden_size_per_layer_input=16,
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
)
PROMPTS = [[5, 17, 40], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12]]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=2, ignore_eos=True),
]


def tokens(
    model: Path, sampling: Sequence[SamplingParams] = SAMPLING, **options: Any
) -> list[list[int]]:
    """Prefill in chunks with decodes, as a step has no budget for two prompts."""
    limits = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    common = {"device": "cpu", "dtype": "float32", "threads": 1, "load_format": "random", **limits}
    with LLM(str(model), **common, **options) as llm:
        outputs = llm.generate(PROMPTS, sampling)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.full
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_tokens_are_those_of_the_reference(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plain = {"kernels": "torch", "attention_backend": "reference", "kv_cache_dtype": kv}
    expected = tokens(tmp_path, **plain)
    calls = []
    for module, name in ((rotary, "store_kernel"), (draw, "pick_kernel")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, Counted(kernel, calls))
    interpret_engines(monkeypatch)
    assert tokens(tmp_path, kernels="torch", kv_cache_dtype=kv) == expected
    assert {"store_kernel", "pick_kernel"} == set(calls)  # Triton's kernels ran


STATES = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"], **DELTA}
STREAMS = {**GEMMA3N, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1}
STREAMS |= {"activation_sparsity_pattern": [0.9, 0.0], "hidden_act": None}


CHOSEN = {indexer: ("index_scores", "largest_places"), chosen: ("attention_chosen",)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "changes", "kernels"),
    [
        ("Qwen3_5ForCausalLM", STATES, {states: ("gated", "causal_conv", "recurrence")}),
        (
            "Gemma3nForCausalLM",
            STREAMS,
            {norm: ("rescaled", "activate_top"), rows: ("weighted_sums",)},
        ),
        (
            "MiniMaxM3VLForCausalLM",
            {**IN_BLOCKS, "layer_types": ["full_attention", "minimax_m3_sparse"]}
            | {"mlp_layer_types": ["dense", "sparse"]},
            {decode: ("attention_decode",)},
        ),
        (
            "HYV4ForCausalLM",
            {**INDEXED, "hidden_act": None},
            {
                norm: ("stream_weights",),
                rows: ("weighted_sums",),
                **CHOSEN,
            },
        ),
        (
            "DeepseekV4ForCausalLM",
            {**COMPRESSED, "layer_types": COMPRESSED["layer_types"][1:], "index_topk": 2},
            {entries: ("make_entries", "turn_last"), **CHOSEN},
        ),
    ],
)
def test_layers_with_kernels_of_their_own(
    architecture: str,
    changes: dict[str, Any],
    kernels: dict[Any, tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {**changes, "architectures": [architecture], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(small(**changes)))
    expected = tokens(tmp_path, kernels="torch", attention_backend="reference")
    calls: list[str] = []
    names = [(module, f"{name}_kernel") for module in kernels for name in kernels[module]]
    for module, name in names:
        monkeypatch.setattr(module, name, Counted(getattr(module, name), calls))
    interpret_engines(monkeypatch)
    assert tokens(tmp_path, kernels="torch") == expected
    assert set(calls) == {name for _, name in names}


@pytest.mark.full
def test_heads_of_512_and_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes first chunks with small heads, Triton wide heads and the rest."""
    (tmp_path / "config.json").write_text(json.dumps(WIDE_HEADS))
    expected = tokens(tmp_path, kernels="torch", attention_backend="reference")
    interpret_engines(monkeypatch, torch_prompts=3)
    assert tokens(tmp_path, kernels="torch") == expected


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_of_a_model(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    options = {"kernels": "torch", "quantization": quantization}
    expected = tokens(tmp_path, **options, attention_backend="reference")
    calls: list[str] = []
    for name in ("float_experts_kernel", "byte_experts_kernel", "combine_kernel"):
        monkeypatch.setattr(experts, name, Counted(getattr(experts, name), calls))
    interpret_engines(monkeypatch)
    assert tokens(tmp_path, **options) == expected
    product = "float_experts_kernel" if quantization == "none" else "byte_experts_kernel"
    assert {product, "combine_kernel"} == set(calls)


@pytest.mark.full
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["layers", "experts"])
def test_requests_with_adapters(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = linear_layers(ModelSpec.from_config(config), experts=config is EXPERTS)
    folders = {
        name: write_adapter(tmp_path / name, draw_pairs(layers, seed=seed, size=1.0))
        for seed, name in enumerate("ab")
    }
    sampling = [one.with_changes(adapter=name) for one, name in zip(SAMPLING, "ba", strict=True)]
    options = {"kernels": "torch", "adapters": folders, "sampling": sampling}
    plain = tokens(tmp_path, kernels="torch", attention_backend="reference")
    expected = tokens(tmp_path, **options, attention_backend="reference")
    interpret_engines(monkeypatch)
    assert tokens(tmp_path, **options) == expected != plain


@pytest.mark.full
@pytest.mark.parametrize(("config", "kind"), [(CONFIG, "attend"), (LATENT, "attend_latent")])
def test_first_chunks_by_torch_and_the_rest_by_triton(
    config: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes the first chunk of each prompt, Triton later chunks and decodes."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = tokens(tmp_path, kernels="torch", attention_backend="reference")
    taken = []
    attend = getattr(FreshPrompts, kind)

    def noted(self: FreshPrompts, *args: Any) -> Any:
        taken.append(args[3].end - args[3].start)
        return attend(self, *args)

    monkeypatch.setattr(FreshPrompts, kind, noted)
    interpret_engines(monkeypatch, torch_prompts=3)
    assert tokens(tmp_path, kernels="torch") == expected
    assert set(taken) == {3, 5}  # of the window of 6, the second sees no more


class Counted:
    """A kernel that records its launches."""

    def __init__(self, kernel: Any, calls: list[str]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: Any) -> Any:
        self.calls.append(self.kernel.fn.__name__)
        return self.kernel[grid]
