"""A process of a group reads its share of each matrix of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.optional_native import needs_native
from helpers.stored_models import CONFIGS, save_quantised
from helpers.tiny_models import LATENT, LLAMA4, save_tiny

from kvik.config.config import EngineConfig
from kvik.export import plan_export
from kvik.launch import resolve_config
from kvik.nn.checkpoint import Checkpoint, Selection, TensorRun
from kvik.nn.gguf_checkpoint import open_weights
from kvik.nn.loader import load_model
from kvik.nn.safetensors import TensorEntry
from kvik.worker.group import RankSetup
from kvik.worker.loading import make_builder
from kvik.worker.platforms import platform

pytestmark = [needs_native, pytest.mark.full]

MORE = 1.05  # times its share: partial tiles, and scales of blocks
# A multiple of six tiles of 32 outputs, so that shares of two and of three processes are equal.
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
EXPERTS = {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 192,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "inputs first": ("GPT2", {"vocab_size": 384, "n_embd": 192, "n_layer": 2, "n_head": 6}),
    "one layer for q, k and v": ("Phi3", {}),
    "neighbours turn": ("Cohere2", {"head_dim": 32}),
    "experts": ("Qwen3Moe", EXPERTS),
    "experts, inputs first": ("Llama4", {**LLAMA4, "head_dim": 32, "intermediate_size": 192}),
    "experts, gate and up mixed": ("GptOss", {"head_dim": 32, "num_local_experts": 4}),
    "latent": (
        "DeepseekV3",
        {
            **LATENT,
            **{"num_key_value_heads": 6, "q_lora_rank": 96, "kv_lora_rank": 64},
            **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
            **{"moe_intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2},
        },
    ),
}
STORED = (
    *("gptq", "gptq-order", "awq", "packed", "int8", "fp8-blocks", "fp8-static"),
    *("bnb-fp4", "bnb-8"),
)


class CountedReads:
    """A checkpoint that counts the bytes it returns, by tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.read = Counter[str]()

    @property
    def facts(self) -> str:
        return self._checkpoint.facts

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._checkpoint.entries

    def runs(self, wanted: Mapping[str, Selection]) -> Iterator[TensorRun]:
        for run in self._checkpoint.runs(wanted):
            self.read[run.name] += run.values.nbytes
            yield run


def read_bytes() -> int:
    """Return the bytes that this process has read from files, as counted by the system."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def reads(model: Path, rank: int, size: int) -> tuple[Counter[str], int]:
    """Return the bytes of each tensor that one process of a group receives, and the bytes of files
    that it reads for them."""
    config = resolve_config(
        EngineConfig(
            model=str(model), device="cpu", threads=size, tensor_parallel_size=size, num_blocks=64
        )
    )
    parts = platform(config, setup=RankSetup(rank, size, np.zeros(1 << 20, np.uint8))).parts
    counted = CountedReads(open_weights(model))
    spec, groups = config.model, config.cache.groups
    builder = make_builder(config, parts, spec, groups, "none", counted, None)
    before = read_bytes()
    with torch.inference_mode():
        load_model(spec, builder)
    return counted.read, read_bytes() - before


def check(model: Path, size: int) -> None:
    """Check that no process reads more than its share of the matrices."""
    spec = resolve_config(EngineConfig(model=str(model), device="cpu")).model
    whole = {f"{table.name}.weight" for table in spec.declaration.tables if not table.tied}
    entries = open_weights(model).entries
    divided = {n: e.size for n, e in entries.items() if len(e.shape) > 1 and n not in whole}
    found = [reads(model, rank, size) for rank in range(size)]
    for rank, (given, read) in enumerate(found):
        matrices = sum(count for name, count in given.items() if name in divided)
        assert matrices <= MORE * sum(divided.values()) / size, f"rank {rank}"
        assert abs(read - given.total()) <= 1 << 14, f"rank {rank} reads what it does not use"
    for name, count in divided.items():
        assert sum(given[name] for given, _ in found) >= count, f"{name} is not read whole"


def save(folder: Path, case: str) -> None:
    family, more = FAMILIES[case]
    save_tiny(folder, family, **({} if family == "GPT2" else SIZES) | more)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", FAMILIES)
def test_floats(case: str, size: int, tmp_path: Path) -> None:
    save(tmp_path, case)
    check(tmp_path, size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", STORED)
def test_quantised_checkpoints(case: str, size: int, tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", "Qwen2", **SIZES)
    save_quantised(tmp_path / "plain", tmp_path / "model", tmp_path / "twin", CONFIGS[case])
    check(tmp_path / "model", size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("type", ["F16", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("case", ["plain", "experts"])
def test_gguf_files(case: str, type: str, size: int, tmp_path: Path) -> None:
    save(tmp_path / "model", case)
    file = tmp_path / "model.gguf"
    nothing: Callable[[int], None] = lambda size: None  # noqa: E731
    plan_export(tmp_path / "model", type).write(file, nothing)
    check(file, size)
