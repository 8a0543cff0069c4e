"""Memory of draft heads is planned before they are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import small_qwen
from helpers.planned import planned
from safetensors.torch import save_file

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.draft_heads import EAGLE, MEDUSA, HeadsFootprint, HeadsSpec
from kvik.launch import resolve_config
from kvik.models.model_spec import ModelSpec
from kvik.planner.families import public_configs

MODEL = small_qwen(
    vocab_size=40_000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    tie_word_embeddings=True,
)
HEADS = {
    "medusa": HeadsSpec(MEDUSA, 256, 40_000, depth=4, layers=2),
    "medusa, own": HeadsSpec(MEDUSA, 256, 40_000, depth=4, own_logits=True),
    "eagle": HeadsSpec(EAGLE, 256, 40_000, depth=4, inner_size=512),
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "load_format": "random",
    "num_blocks": 200,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "max_model_len": 64,
}
SCRIPT = """
import json, sys
from kvik import LLM, SamplingParams

with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    prompts = [[3 + i, 5, 7] for i in range(32)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    print(int(lines["VmHWM"].split()[0]) * 1024, llm.stats().speculation.drafts.drafts)
"""


def tensors(spec: HeadsSpec) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    h, v = spec.hidden_size, spec.vocab_size
    if spec.kind == EAGLE:
        inner = spec.inner_size
        mlp = {f"mlp.{name}_proj.weight": zeros(inner, h) for name in ("gate", "up")}
        mlp["mlp.down_proj.weight"] = zeros(h, inner)
        join = {"fc.weight": zeros(h, 2 * h), "fc.bias": zeros(h), "norm.weight": zeros(h)}
        return join | mlp
    found = {}
    for head in range(spec.depth):
        for layer in range(spec.layers):
            found[f"{head}.{layer}.linear.weight"] = zeros(h, h)
            found[f"{head}.{layer}.linear.bias"] = zeros(h)
        if spec.own_logits:
            found[f"{head}.{spec.layers}.weight"] = zeros(v, h)
    return found


def folders(spec: HeadsSpec, root: Path) -> tuple[Path, dict[str, Any]]:
    """Write a model, and return options with heads for it."""
    model, heads = root / "model", root / "heads"
    for folder, config in ((model, MODEL), (heads, spec.as_config("model"))):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(spec), heads / "model.safetensors")
    wish = {"method": spec.kind, "model": str(heads), "num_speculative_tokens": 4}
    return model, {**OPTIONS, "speculative_config": {**wish, "adaptive": False}}


def resolved(model: Path, options: dict[str, Any]) -> ResolvedConfig:
    return resolve_config(EngineConfig(model=str(model), **options))


@pytest.mark.parametrize("name", HEADS)
def test_weights_and_the_step_are_in_the_plan(name: str, tmp_path: Path) -> None:
    spec = HEADS[name]
    model, options = folders(spec, tmp_path)
    size = sum(tensor.nbytes for tensor in tensors(spec).values())
    assert HeadsFootprint(spec, "bfloat16", 4).weights == size
    assert HeadsFootprint(spec, "float32", 4).weights == 2 * size
    found = resolved(model, options)
    drafting = HeadsFootprint(spec, found.runner.dtype, 4)
    # A lookup drafter needs no weights, and has as many rows of logits.
    lookup = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    without = resolved(model, {**options, "speculative_config": lookup})
    assert found.memory.weights - without.memory.weights == drafting.weights
    assert found.memory.activations - without.memory.activations == drafting.step(32)
    # Each request with drafts has one row of logits per head, or per node with children.
    rows = {MEDUSA: 32 * 4, EAGLE: 32 * 2}[spec.kind]
    assert drafting.step(32) > rows * spec.vocab_size * 4
    few = {**options, "max_num_batched_tokens": 32 + 2 * 5}
    assert resolved(model, few).memory.activations < found.memory.activations - drafting.step(20)


def test_deeper_and_longer_heads_take_more() -> None:
    one = HeadsFootprint(HEADS["medusa"], "bfloat16", 4)
    deep = HeadsFootprint(replace(one.spec, depth=8), "bfloat16", 4)
    assert deep.weights == 2 * one.weights and deep.step(32) > 1.5 * one.step(32)
    eagle = HeadsFootprint(HEADS["eagle"], "bfloat16", 4)
    assert replace(eagle, drafts=16).step(32) > 2 * eagle.step(32)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_peak_stays_below_the_plan(tmp_path: Path) -> None:
    model, options = folders(HEADS["medusa, own"], tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    peak, drafts = map(int, result.stdout.split())
    assert drafts > 32
    planned = resolved(model, options).memory.total
    assert peak <= planned <= 1.5 * peak


COMPUTED = 512 * (32 * 129 + 128) * 2  # queries, weights and keys of an indexer, of 512 tokens


@pytest.mark.parametrize(
    ("kernels", "length", "least"),
    [
        ("torch", 2048, COMPUTED),
        # Keys in fp32 and their products with 32 heads; copies of 8 x 2,048 latent vectors of 576.
        ("torch", 4096, COMPUTED + 4096 * 4 * (128 + 32) + 8 * 2048 * 576 * (4 + 2)),
        ("native", 2048, COMPUTED),
        ("native", 4096, COMPUTED + 512 * 4096 // 8 + 64 * 4096 * 4),  # bits; scores of 64 queries
    ],
)
def test_what_an_indexer_takes_is_planned(kernels: str, length: int, least: int) -> None:
    small = {"num_hidden_layers": 3, "n_routed_experts": 8, "index_topk": 2048}
    indexed = ModelSpec.from_config({**public_configs()["glm-5"], **small})
    whole = replace(indexed, layers=tuple(replace(layer, index=None) for layer in indexed.layers))
    sizes = {"max_model_len": length, "max_num_seqs": 2, "max_num_batched_tokens": 512}
    options = {"device": "cpu", "kernels": kernels, "threads": 2, "num_blocks": 600, **sizes}
    more, less = (planned(spec, **options).memory.activations for spec in (indexed, whole))
    assert least <= more - less <= 4 * least
