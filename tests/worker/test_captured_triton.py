"""Captured decoding steps on Triton's kernels: padded, they say what others say. Under Triton's
interpreter, so few and small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.captured import Again
from helpers.interpreted_engine import interpret_engines
from helpers.overlapping import steps_in_flight

from kvik import LLM, SamplingParams
from kvik.config.config import ResolvedConfig
from kvik.worker import cuda_graphs, platforms

pytestmark = INTERPRETED_ONLY

MODEL = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 6,
}
PROMPTS = [[5, 17, 40], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12], [1]]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
]


def tokens(model: Path, **options: Any) -> list[list[int]]:
    limits = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    common = {"device": "cpu", "dtype": "float32", "threads": 1, "load_format": "random", **limits}
    with LLM(str(model), kernels="torch", **common, **options) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING, progress=False)
        assert all(output.completions[0].error is None for output in outputs)
        return [list(output.completions[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_padded_steps_say_the_same(kv, tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    expected = tokens(tmp_path, attention_backend="reference", kv_cache_dtype=kv)
    again = Again()

    def captured(config: ResolvedConfig) -> platforms.Platform:
        choice = {"kernels": "triton", "attention_backend": "triton", "graph_sizes": (4,)}
        return platforms.TritonPlatform(replace(config, runner=replace(config.runner, **choice)))

    interpret_engines(monkeypatch)
    monkeypatch.setattr("kvik.worker.worker.platform", captured)
    monkeypatch.setattr(platforms, "CudaCapturer", lambda device: again)
    monkeypatch.setattr(cuda_graphs, "OFTEN", 1)
    with steps_in_flight(2):
        assert tokens(tmp_path, kv_cache_dtype=kv) == expected
    assert again.replayed >= 3
