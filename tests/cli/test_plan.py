"""`kvik plan`: its output and refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands import Command
from helpers.public_configs import NAMES

from kvik.cli.plan import as_text
from kvik.planner.plan import Question, plan

LLAMA = "llama-3-70b"
DEEPSEEK = "deepseek-v3"


def test_the_bundled_model(command: Command) -> None:
    out = command("plan", "--hardware", "h200").out
    assert "3,072 bytes per token" in out


def test_costs_by_a_measured_throughput(command: Command) -> None:
    words = [LLAMA, "--hardware", "h200", "--tp", "4", "--context", "1000", "--price", "3.5"]
    words += ["--output-tokens", "200", "--tokens-per-second", "2000"]
    facts = command.json("plan", *words, "--load", "30/s")
    assert facts["cost"]["copies"] == 3 and facts["cost"]["per_hour"] == 42.0


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES[::8])
def test_all_figures_are_finite(name: str, command: Command) -> None:
    words = ["--hardware", "h100", "--batch", "512", "--context", "1000", "--price", "2.5"]
    out = command("plan", name, *words, "--load", "5G").out
    assert not {"nan", "inf"} & set(re.findall(r"[a-z]+", out.replace(name, "")))


def test_json(command: Command) -> None:
    words = [LLAMA, "--hardware", "h100", "--dtype", "bfloat16"]
    facts = command.json("plan", *words)
    assert facts["model"]["parameters"] == 70_553_706_496
    assert facts["model"]["kv_bytes_per_token"] == 327_680 and facts["model"]["runs"] is True
    assert len(facts["attention_variants"]) == 4
    assert facts["speed"]["speculation"][0]["rows"][0]["acceptance"] == 0.5
    memory = facts["memory"]
    parts = ("weights", "kv_cache", "activations", "runtime")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert memory["missing"] == memory["total"] - memory["limit"] > 0
    assert memory["fits"] is False
    fitting = [row["format"] for row in facts["weight_formats"] if row["fits"]]
    assert fitting == ["int8", "int8-weight-only", "fp8", "int4", "mxfp4"]
    assert [remedy["flags"] for remedy in facts["remedies"]] == ["--dtype int8", "--tp 2"]
    (row,) = facts["speed"]["decode"]
    assert row["ceiling"] == pytest.approx(3.35e12 / (139.0e9 + 2.7e9), rel=0.01)
    assert row["fits"] is False


def test_whole_experts(command: Command) -> None:
    words = ["qwen3-30b-a3b", "--hardware", "h100", "--tp", "4", "--expert-parallel"]
    facts = command.json("plan", *words)
    assert facts["expert_parallel"] and facts["division"]["exact"] is None
    assert "tp 4, whole experts" in command("plan", *words).out


def test_without_speeds_the_reason_is_named() -> None:
    answer = plan(Question(hardware="h200", context=512))
    device = replace(answer.at.device, bandwidth=None, rates={}, unknown="run it first")
    assert "run it first" in as_text(
        replace(answer, speed=None, at=replace(answer.at, device=device))
    )


def test_a_device_from_a_file(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "abacus.toml"
    path.write_text(
        'kind = "cuda"\nmemory = 68719476736\nbandwidth = 1e12\nprice = 0.5\n'
        'source = "made of wood"\n[rates]\nbf16 = 1e14\n'
    )
    facts = command.json("plan", "--hardware", str(path))
    assert facts["cost"]["per_hour"] == 0.5


def test_processes_of_a_cpu(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "cores.toml"
    path.write_text('kind = "cpu"\nmemory = 68719476736\nbandwidth = 1e11\n[rates]\nbf16 = 1e12\n')
    words = ["llama-3.2-1b", "--hardware", str(path), "--context", "512", "--batch", "8"]
    text = command("plan", *words, "--tp", "2", "--pp", "2").out
    rows = [line.split() for line in text.partition("by stage and rank\n")[2].splitlines()[1:5]]
    assert [row[:2] for row in rows] == [["0.0", "8"], ["0.1", "8"], ["1.0", "8"], ["1.1", "8"]]
    facts = command.json("plan", *words, "--tp", "2", "--pp", "2")
    assert facts["division"]["cut"] == "exact"


@pytest.mark.full
def test_gpus_that_share_layers_and_stages(command: Command) -> None:
    words = [DEEPSEEK, "--hardware", "h200", "--tp", "8", "--pp", "4", "--context", "4096"]
    facts = command.json("plan", *words)
    assert [part["layers"] for part in facts["parts"]] == [17, 15, 15, 14]
    assert facts["division"]["cut"] == "fast" and facts["division"]["rate_of_one"] is None
    assert facts["division"]["collectives"]["count"] == 2 * 61
    text = command("plan", *words).out
    assert max(map(len, text.splitlines())) <= 100


def test_a_long_context_on_several_gpus(command: Command) -> None:
    words = ["llama-3.1-8b", "--hardware", "h100", "--context", "131072"]
    facts = command.json("plan", *words)
    assert [row["parts"] for row in facts["context_parts"]] == [1, 2, 4, 8]
    text = command("plan", *words).out
    assert max(map(len, text.splitlines())) <= 100


def test_this_machine_without_a_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("kvik.planner.plan.find_gpus", lambda: ())
    monkeypatch.setattr("kvik.planner.plan.calibration_path", lambda: tmp_path / "none.json")
    out = command("plan").out
    assert "no speeds are known" in out and "kvik calibrate" in out
    assert "fits, " in out
