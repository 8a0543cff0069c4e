"""`kvik info`: facts and decisions, without torch and without loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.commands import Command
from helpers.configs import PUBLIC, small
from helpers.on_terminal import OnTerminal

from kvik.config.model_source import BUNDLED
from kvik.models.model_spec import read_model_spec

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 16_384,
    "intermediate_size": 53_248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
}


@pytest.fixture
def large(tmp_path: Path) -> str:
    """Return a model of 405 billion parameters, with only its config."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return str(tmp_path)


def test_the_bundled_model(command: Command) -> None:
    out = command("info", "--device", "cpu").out
    spec = read_model_spec(BUNDLED)
    for fact in ("LlamaForCausalLM", f"{spec.num_parameters:,}", "bytes per token", "num_blocks"):
        assert fact in out


def test_json(command: Command) -> None:
    facts = command.json("info", "--device", "cpu", "--num-blocks", "9")
    assert facts["fits"] is True
    assert facts["parameters"] == read_model_spec(BUNDLED).num_parameters
    assert ("num_blocks", "9") in {(d["name"], d["value"]) for d in facts["decisions"]}
    memory = facts["memory"]
    parts = ("weights", "activations", "kv_cache", "overhead")
    assert memory["total"] == sum(memory[part] for part in parts) <= memory["limit"]


def test_chunks_of_layers(tmp_path: Path, command: Command) -> None:
    model = small(architectures=["Llama4ForCausalLM"], head_dim=16, attention_chunk_size=64)
    (tmp_path / "config.json").write_text(json.dumps(model))
    words = ["info", str(tmp_path), "--device", "cpu", "--max-model-len", "1024"]
    layers = command.json(*words)["layers"]
    found = [(kind["count"], kind["window"], kind["chunked"]) for kind in layers]
    assert found == [(3, 64, True), (1, None, False)]


def test_kinds_of_layers(tmp_path: Path, command: Command) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["Gemma-3-1B"]))
    words = ["info", str(tmp_path), "--device", "cpu", "--max-model-len", "1024"]
    facts = command.json(*words)
    layers = facts["layers"]
    assert [(kind["count"], kind["window"]) for kind in layers] == [(22, 512), (4, None)]
    # Tokens kept per request: 512 in layers with a window, else all 1,024.
    tokens = [kind["kv_bytes_per_token"] for kind in layers]
    assert sum(tokens) == facts["kv_bytes_per_token"] and tokens[0] * 4 == tokens[1] * 22
    kept = [kind["kv_bytes_per_request"] for kind in layers]
    assert kept == [tokens[0] * 512, tokens[1] * 1024]


EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {"first_k_dense_replace": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("config", "figures"),
    [
        (PUBLIC["Gemma-3-1B"], ("22 ", "512 tokens", "10,000")),
        (PUBLIC["Gemma-3-1B"], ("4 ", "all tokens", "1,000,000")),
        (PUBLIC["Gemma-3n-E2B"], ("30 of width 2048", "4 residual streams")),
        (PUBLIC["Gemma-3n-E2B"], ("8 ", "512 tokens", "5% of gates")),
        (PUBLIC["MiniMax-M3"], ("57 ", "key/value head chooses 16 blocks of 128")),
        (PUBLIC["gemma-4-31b"], ("10 ", "4 key/value heads of 512", "1,000,000 in 25%")),
        (
            small(architectures=["Glm4MoeForCausalLM"], n_shared_experts=2, **EXPERTS),
            ("3 of 8 experts", "24", "48"),
        ),
        (small(architectures=["DeepseekV3ForCausalLM"], **LATENT), ("latent vectors of 576",)),
        (
            small(architectures=["Llama4ForCausalLM"], head_dim=16, attention_chunk_size=64),
            ("3 ", "chunks of 64"),
        ),
    ],
)
def test_the_report_has_the_figures_of_each_kind_of_layer(
    config: dict[str, object],
    figures: tuple[str, ...],
    tmp_path: Path,
    command: Command,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["info", str(tmp_path), "--device", "cpu", "--max-model-len", "1024"]
    lines = command(*words).out.splitlines()
    assert any(all(figure in line for figure in figures) for line in lines), lines


def test_a_model_that_does_not_fit_is_still_described(large: str, command: Command) -> None:
    assert "405,853,388,800" in command("info", large, "--memory-utilization", "0.01").out
    facts = command.json("info", large, "--memory-utilization", "0.01")
    assert facts["fits"] is False
    assert facts["kv_bytes_per_token"] == 516_096
    assert facts["refusal"].startswith("memory: ")


def test_the_cache_in_fewer_bits(command: Command) -> None:
    words = ["info", "--device", "cpu", "--kv-cache-dtype", "int8", "--dtype", "bfloat16"]
    for skipped, size in (((), 6 * (32 + 2)), (("0,5",), 4 * (32 + 2) + 2 * 64)):
        layers = ["--kv-cache-dtype-skip-layers", *skipped] if skipped else []
        assert command.json(*words, *layers)["kv_bytes_per_token"] == 2 * 4 * size


@pytest.mark.parametrize("columns", [50, 80])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    with OnTerminal("info", columns=columns) as terminal:
        code, written = terminal.finish()
    assert code == 0 and "max_num_batched_tokens" in written
    assert max(map(len, written.splitlines())) <= columns


def test_a_window_with_sinks(command: Command) -> None:
    words = ["--device", "cpu", "--window", "252", "--attention-sinks", "4"]
    (layers,) = command.json("info", *words)["layers"]
    assert (layers["window"], layers["sinks"]) == (252, 4)
    assert layers["kv_bytes_per_request"] == 256 * layers["kv_bytes_per_token"]
