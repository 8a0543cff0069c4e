"""`kvik advise`: its flags, and advice as text and JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from helpers.commands import Command
from helpers.configs import PUBLIC

from kvik.cli import serve

MACHINE = """
kind = "cpu"
memory = 34359738368
bandwidth = 5.0e10
[rates]
fp32 = 4.0e11
bf16 = 8.0e11
int8 = 1.6e12
"""


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "box.toml"
    path.write_text(MACHINE)
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "Llama-3-8B.json"
    path.write_text(json.dumps(PUBLIC["llama-3-8b"]))
    return str(path)


def test_the_bundled_model(machine: str, command: Command) -> None:
    text = command("advise", "--hardware", machine).out
    kvik, verb, *flags = shlex.split(text.splitlines()[-1])
    assert (kvik, verb) == ("kvik", "serve")
    serve.build_parser().parse_intermixed_args(flags)
    assert max(map(len, text.splitlines())) <= 100


def test_a_machine_that_was_never_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("kvik.planner.plan.find_gpus", lambda: ())
    monkeypatch.setattr("kvik.planner.plan.calibration_path", lambda: tmp_path / "none.json")
    found = command.json("advise")
    assert not found["measured"] and "kvik calibrate" in found["doubt"]
    assert found["end"]["load"]["output_rate"] > 0


def test_latency_limits(machine: str, llama: str, command: Command) -> None:
    text = command("advise", llama, "--hardware", machine, "--slo", "ttft=30s,tpot=400ms").out
    assert "--max-num-seqs" in text.splitlines()[-1]


def test_the_command_names_what_can_be_served(
    machine: str, llama: str, tmp_path: Path, command: Command
) -> None:
    """A description is not a model."""
    Path(llama).rename(tmp_path / "config.json")
    served = {}
    for model in (
        str(tmp_path),
        str(tmp_path / "config.json"),
        "llama-3-8b",
        "meta-llama/Llama-3-8B",
        "gpt2",
    ):
        text = command("advise", model, "--hardware", machine).out
        served[model] = shlex.split(text.splitlines()[-1])[2]
    assert [model for model, name in served.items() if name == model] == [
        str(tmp_path),
        "meta-llama/Llama-3-8B",
        "gpt2",
    ]


def test_a_model_that_fits_nowhere_has_no_command(
    llama: str, command: Command, tmp_path: Path
) -> None:
    big = tmp_path / "Llama-3-70B.json"
    big.write_text(json.dumps(PUBLIC["llama-3-70b"]))
    assert "kvik serve" not in command("advise", str(big), "--hardware", "rtx4090").out


def test_an_unsupported_model_has_no_command(
    machine: str, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "novel.json"
    path.write_text(json.dumps(PUBLIC["llama-3-8b"] | {"architectures": ["NovelForCausalLM"]}))
    assert "kvik serve" not in command("advise", str(path), "--hardware", machine).out


def test_json(machine: str, llama: str, command: Command) -> None:
    # --output is the former name of --output-tokens.
    arguments = ["--rate", "0.05", "--prompt-tokens", "100", "--output", "20", "--shared", "50"]
    found = command.json("advise", llama, "--hardware", machine, *arguments)
    assert found["traffic"] == {"prompt": 100, "output": 20, "shared": 50}
    assert found["slo"] is None and found["assumed"] == []
    assert found["end"]["load"]["rate"] == 0.05
    verdicts = {advice["topic"]: advice["verdict"] for advice in found["advice"]}
    assert verdicts["attention"] == "keep"
    assert {advice["verdict"] for advice in found["later"]} <= {"not in this version", "no use"}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--slo", "foo"], "slo"),
        (["--prompt-tokens", "many"], "prompt-tokens"),
        (["--hardware", "abacus"], "hardware"),
    ],
)
def test_a_bad_question_is_one_line(
    arguments: list[str], field: str, machine: str, command: Command
) -> None:
    assert command.refusal("advise", "--hardware", machine, *arguments).startswith(f"--{field}: ")


def test_a_wrong_slo_is_told_the_syntax(command: Command) -> None:
    assert "such as ttft=300ms" in command.refusal("advise", "--slo", "ttft=0ms")
