"""Quantised checkpoints in the engine: detected by their config, planned and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.optional_native import needs_native
from helpers.planned import decision
from helpers.stored_layers import awq_config, gptq_config
from helpers.stored_models import CONFIGS, SIZES, save_quantised
from helpers.tiny_models import GREEDY, greedy_and_scores, save_tiny, tokens

from kvik import LLM
from kvik.cli.main import main

# Error of a log probability. torch multiplies in fp32; the native kernels round activations to bf16
# or, for weights of four bits, to eight bits; and they round the numbers of NF4. Measured: 0.00001,
# 0.06, 0.13 and 0.24.
OFF = {"torch": 1e-4, "native": 0.08, "native, 4 bits": 0.18, "native, nf4": 0.3}
EIGHT_BITS = ("gptq-8", "int8", "fp8", "fp8-e5m2", "bnb-8")
FP8_ACTIVATIONS = ("fp8-dynamic", "fp8-blocks", "fp8-static")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_tiny(folder, "Qwen2", **SIZES)
    return folder


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("case", [case for case in CONFIGS if case not in FP8_ACTIVATIONS])
def test_the_engine_matches_the_dequantised_floats(
    case: str, kernels: str, plain: Path, tmp_path: Path
) -> None:
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", CONFIGS[case])
    expected, scores = greedy_and_scores(tmp_path / "twin", kernels="torch", dtype="float32")
    found, found_scores = greedy_and_scores(tmp_path / "q", kernels=kernels, dtype="float32")
    four = kernels == "native" and case not in EIGHT_BITS
    bits = "nf4" if case == "bnb-nf4" else "4 bits"
    off = float((found_scores - scores).abs().max())
    # Rounded activations decide between equally likely tokens.
    assert four or found == expected
    assert off < OFF[f"{kernels}, {bits}" if four else kernels]


@needs_native
@pytest.mark.parametrize("case", FP8_ACTIVATIONS)
def test_activations_in_fp8(case: str, plain: Path, tmp_path: Path) -> None:
    """The native kernels round them as torch does, with another result than floats."""
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", CONFIGS[case])
    _, floats = greedy_and_scores(tmp_path / "twin", kernels="torch", dtype="float32")
    _, expected = greedy_and_scores(tmp_path / "q", kernels="torch", dtype="float32")
    _, scores = greedy_and_scores(tmp_path / "q", kernels="native", dtype="float32")
    moved = float((expected - floats).norm())
    assert 0 < float((scores - expected).norm()) < moved / 2


def test_less_memory_is_planned(plain: Path, tmp_path: Path) -> None:
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", gptq_config())
    with LLM(str(tmp_path / "q"), device="cpu", threads=1, num_blocks=32) as llm:
        found = llm.resolved
    with LLM(str(tmp_path / "twin"), device="cpu", threads=1, num_blocks=32) as llm:
        assert found.memory.weights < 0.5 * llm.resolved.memory.weights
    assert decision(found, "quantization")[1].endswith("(gptq: 4 bits, in groups of 32)")


def test_random_weights_are_floats(plain: Path, tmp_path: Path) -> None:
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", gptq_config())
    planned = []
    for folder in ("q", "twin"):
        with LLM(
            str(tmp_path / folder), load_format="random", device="cpu", threads=1, num_blocks=32
        ) as llm:
            planned.append(llm.resolved.memory)
            llm.generate([tokens(5)], GREEDY)
    assert planned[0].weights == planned[1].weights
    assert planned[0].overhead == planned[1].overhead


def test_info_names_the_stored_quantisation(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", awq_config())
    assert main(["info", str(tmp_path / "q"), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "awq: 4 bits, in groups of 32, zero points" in text
    assert main(["info", str(tmp_path / "q"), "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stored_as"].startswith("awq: 4 bits")
    assert facts["weight_bytes"] == facts["memory"]["weights"]
