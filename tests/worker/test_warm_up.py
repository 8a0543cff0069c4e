"""What an idle engine compiles: all that requests then launch, and nothing that they could see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

from kvik import LLM, SamplingParams
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
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "threads": 1, "kernels": "torch"}
OPTIONS |= {"load_format": "random", "quantization": "int8", "max_model_len": 640}
OPTIONS |= {"max_num_seqs": 2, "max_num_batched_tokens": 600, "kv_cache_memory": 1 << 20}
OPTIONS |= {"enable_prefix_caching": False}


# ------------------------------------------------------------------ without kernels


class Network:
    """Notes what steps it is to compute."""

    groups = (None, None)
    kv = (SimpleNamespace(k=torch.zeros(1)),)

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def forward(self, input_ids, positions, layouts, logits_indices) -> None:
        (length, *others) = {len(input_ids), len(positions), *layouts[0].num_scheduled}
        first, second = layouts
        assert first is second and not others and logits_indices.tolist() == [length - 1]
        assert first.slot_mapping.tolist() == [-1] * length  # stored nowhere
        assert not first.block_table.any() and first.block_table.shape == (1, 8)
        assert first.query_start_loc.tolist() == [0, length] and first.seq_lens.tolist() == [length]
        self.steps.append((length, first.contexts[0]))


def test_a_step_for_each_length_fresh_and_behind_others() -> None:
    network = Network()
    warm_up = forwards(network, (30, 8), 4, 30)
    assert [warm_up.rest() for _ in range(4)] == [True, True, False, False]
    assert network.steps == [(30, 30), (8, 8), (8, 30)]


def test_one_that_fails_is_told_and_ends_it(caplog) -> None:
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("no such instruction")

    warm_up = WarmUp([lambda: done.append(1), fail, lambda: done.append(2)])
    assert [warm_up.rest() for _ in range(3)] == [True, False, False]
    (record,) = caplog.records
    assert done == [1] and "no such instruction" in record.exc_text


# ------------------------------------------------------------------ with them


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """What Triton would have compiled since it was last asked. Engines launch its kernels, which do
    nothing: all they should write is 0."""
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
    monkeypatch.setattr(torch, "empty", torch.zeros)
    return take


def ask(llm: LLM) -> None:
    """Prompts of every class, alone and together, and draws by the usual rules."""
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=2, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for lengths in ((3, 40), (520,), (12,)):
        prompts = [[7 + i % 50 for i in range(length)] for length in lengths]
        outputs = llm.generate(prompts, [greedy, sampled][: len(prompts)], progress=False)
        assert all(output.completions[0].error is None for output in outputs)


@INTERPRETED_ONLY
@pytest.mark.parametrize("format", ["none", "int4", "int8", "fp8"])
def test_requests_of_an_engine_that_was_idle_wait_for_nothing(
    format: str, tmp_path: Path, compiled
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with LLM(str(tmp_path), **(OPTIONS | {"quantization": format})) as llm:
        loop = llm._client._loop
        compiled()
        while loop.rest():
            pass
        ready = compiled()
        names = {launch.split()[0] for launch in ready}
        assert {"attention_prefill_kernel", "attention_decode_kernel", "pick_kernel"} <= names
        ask(llm)
        assert compiled() - ready == set()


@INTERPRETED_ONLY
def test_an_engine_without_idle_time_compiles_what_it_needs(tmp_path: Path, compiled) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        llm.generate([[1, 2, 3]], greedy, progress=False)
        names = {launch.split()[0] for launch in compiled()}
        assert "attention_decode_kernel" in names
        assert not names & {"attention_prefill_kernel", "pick_kernel"}
