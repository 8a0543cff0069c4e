"""What an idle engine compiles: all that requests then launch, and nothing that they could see."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.drafters import TREE_METHOD, install
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON
from helpers.tiny_models import DELTA
from helpers.untrained_heads import eagle, medusa
from torch import Tensor

from kvik import LLM, SamplingParams
from kvik.spec.kv import KVCacheSpec, group_layers
from kvik.spec.visible_keys import Budget
from kvik.worker.input_batch import StepTensors
from kvik.worker.step_inputs import StepSizes
from kvik.worker.warm_up import WarmUp, forwards

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
OTHERS: dict[str, dict[str, Any]] = {
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "states": {
        **DELTA,
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
    },
}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "threads": 1, "kernels": "torch"}
OPTIONS |= {"load_format": "random", "quantization": "int8", "max_model_len": 640}
OPTIONS |= {"max_num_seqs": 2, "max_num_batched_tokens": 600, "kv_cache_memory": 1 << 20}
OPTIONS |= {"enable_prefix_caching": False}
SAMPLES = 10  # rows of logits


# ------------------------------------------------------------------ without kernels


class Network:
    """Notes what steps it is to compute."""

    groups = group_layers([KVCacheSpec(1, 16, 64), KVCacheSpec(1, 16, 64, budget=Budget(48))])
    kv = SimpleNamespace(storages=(torch.zeros(3),))
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, bool]] = []
        self.copied: list[int] = []
        self.ops = SimpleNamespace(copy_blocks=self.copy)

    def copy(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        assert not source.any() and not target.any()  # block 0 is nobody's
        self.copied.append(len(source))

    def forward(self, step: StepTensors) -> None:
        lengths = {len(step.input_ids), len(step.positions), *step.layouts[0].num_scheduled}
        (length, *others), (first, second) = lengths, step.layouts
        assert first.first_keys is None and second.first_keys.tolist() == [0]
        assert first.block_table is second.block_table and not others
        assert step.logits_indices.tolist() == list(range(length))[-SAMPLES:]
        assert first.slot_mapping.tolist() == [-1] * length  # stored nowhere
        assert not first.block_table.any() and first.block_table.shape == (1, 8)
        assert first.query_start_loc.tolist() == [0, length] and first.seq_lens.tolist() == [length]
        assert first.tree is None or (not first.tree.any() and len(first.tree) == length)
        self.steps.append((length, first.contexts[0], first.tree is not None))


def test_a_step_for_each_length_fresh_and_behind_others() -> None:
    network = Network()
    warm_up = WarmUp(forwards(network, (30, 8), StepSizes(30, 4, SAMPLES), 4, 30, (5,)))
    assert [warm_up.idle_step() for _ in range(7)] == [True] * 5 + [False] * 2
    fresh_and_behind = [(8, 8, False), (8, 30, False), (5, 5, True), (5, 30, True)]
    assert network.steps == [(30, 30, False), *fresh_and_behind]
    assert network.copied == [1, 2]


def test_a_failed_warm_up_is_logged_and_ends_warming_up(caplog) -> None:
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("no such instruction")

    warm_up = WarmUp([lambda: done.append(1), fail, lambda: done.append(2)])
    assert [warm_up.idle_step() for _ in range(3)] == [True, False, False]
    (record,) = caplog.records
    assert done == [1] and "no such instruction" in record.exc_text


# ------------------------------------------------------------------ with them


@pytest.fixture
def compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[], set[str]]]:
    """What Triton would have compiled since it was last asked. Engines launch its kernels, which do
    nothing: all they should write is 1. No drafter fails, or requests would continue without it."""
    pytest.importorskip("triton", reason=NO_TRITON)
    from helpers.compilations import compilation
    from helpers.interpreted_engine import interpret_engines
    from triton.runtime.interpreter import InterpretedFunction

    launched: set[str] = set()

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.add(compilation(self, *args, **options))

    def take() -> set[str]:
        taken = launched.copy()
        launched.clear()
        return taken

    interpret_engines(monkeypatch)
    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr(torch, "empty", torch.ones)
    yield take
    assert not [record for record in caplog.get_records("call") if record.exc_info]


GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=2, ignore_eos=True)
LENGTHS = ((3, 40), (520,), (12,))  # prompts of every class, alone and together
RARER = [
    replace(GREEDY, n=2, temperature=1.0),  # which copies a block
    *(replace(SAMPLED, top_k=top_k, min_p=0.1) for top_k in (0, 5)),
    *(replace(SAMPLED, seed=None, typical_p=0.9, top_p=top_p) for top_p in (0.9, 1.0)),
    replace(SAMPLED, top_k=5, top_p=1.0, typical_p=0.9, min_p=0.1, repetition_penalty=1.2),
    replace(GREEDY, frequency_penalty=0.5, logprobs=3, prompt_logprobs=3),
    replace(GREEDY, logit_bias={3: 1.0}, bad_words=((4, 5), (6,)), min_tokens=2),
    replace(SAMPLED, allowed_token_ids=(3, 4, 5), presence_penalty=0.5),
]


def ask(llm: LLM, *wishes: tuple[tuple[int, ...], list[SamplingParams]]) -> None:
    """Prompts of so many tokens with these parameters."""
    for lengths, params in wishes:
        prompts = [[7 + i % 50 for i in range(length)] for length in lengths]
        outputs = llm.generate(prompts, params[: len(prompts)], progress=False)
        assert all(output.outputs[0].error is None for output in outputs)


def ready(llm: LLM, compiled: Callable[[], set[str]]) -> set[str]:
    """What an engine compiles while it is idle."""
    compiled()
    while llm._loop.idle_step():
        pass
    return compiled()


@pytest.mark.full
@INTERPRETED_ONLY
@pytest.mark.parametrize("format", ["none", "int4", "int8", "fp8", *OTHERS])
def test_requests_of_an_engine_that_was_idle_wait_for_nothing(
    format: str, tmp_path: Path, compiled
) -> None:
    config = CONFIG | OTHERS.get(format, {})
    format = "none" if format in OTHERS else format
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), **(OPTIONS | {"quantization": format})) as llm:
        known = ready(llm, compiled)
        names = {launch.split()[0] for launch in known}
        assert {"attention_prefill_kernel", "attention_decode_kernel", "pick_kernel"} <= names
        assert ("chunks_kernel" in names) == ("layer_types" in config)
        ask(llm, *((lengths, [GREEDY, SAMPLED]) for lengths in LENGTHS))
        assert compiled() - known == set()


@pytest.mark.full
@INTERPRETED_ONLY
@pytest.mark.parametrize("method", ["ngram", "draft_model", "medusa", "eagle"])
def test_nor_do_requests_with_drafts_and_rarer_rules(
    method: str, tmp_path: Path, compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    small = CONFIG | {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(small))
    options: dict[str, Any] = {"spec_method": method, "spec_tokens": 4}
    options["speculative_config"] = {"adaptive": False}
    if method == "draft_model":
        options["spec_model"] = str(tmp_path / "small")
    elif method != "ngram":
        install(monkeypatch, {"medusa": medusa, "eagle": eagle}[method])
        options |= {"spec_method": TREE_METHOD, "spec_model": str(tmp_path)}
        options["speculative_config"]["typical_acceptance"] = method == "medusa"
    with LLM(str(tmp_path), **(OPTIONS | options)) as llm:
        known = ready(llm, compiled)
        names = {launch.split()[0] for launch in known}
        assert {"penalize_kernel", "settle_kernel", "scatter_kernel"} <= names
        assert ("shares_kernel" in names) == (method in ("draft_model", "medusa"))
        longer = [replace(params, max_tokens=4) for params in (GREEDY, SAMPLED)]
        ask(llm, *((lengths, longer) for lengths in LENGTHS))
        ask(llm, *(((3, 9), [params, replace(params, max_tokens=4)]) for params in RARER))
        assert compiled() - known == set()


@pytest.mark.full
@INTERPRETED_ONLY
def test_an_engine_without_idle_time_compiles_on_demand(tmp_path: Path, compiled) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        llm.generate([[1, 2, 3]], greedy, progress=False)
        names = {launch.split()[0] for launch in compiled()}
        assert "attention_decode_kernel" in names
        assert not names & {"attention_prefill_kernel", "pick_kernel"}
