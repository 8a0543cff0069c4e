"""`kvik quantize`: refusals, leftovers and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.commands import Command
from helpers.tiny_models import save_tiny
from safetensors.torch import load_file, save_file

from kvik import LLM, SamplingParams
from kvik.cli.main import main
from kvik.config.model_source import BUNDLED, CONFIG
from kvik.nn.checkpoint import SINGLE
from kvik.quantize.save import REPORT
from kvik.spec.engine_folder import MANIFEST

CPU = ("--device", "cpu")
FAST = ("--eval", "none", "--no-speed", *CPU)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.full
def test_a_model_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quantise the bundled model from start to end."""
    out = tmp_path / "out"
    assert main(["quantize", "-o", str(out), "--method", "rtn", "--bits", "8", *CPU]) == 0
    printed = capsys.readouterr()
    assert "rtn, 8 bits, groups of 64, symmetric" in printed.out
    assert "perplexity" in printed.out and "tokens/s" in printed.out
    assert f"saved in {out}" in printed.err
    report = json.loads((out / REPORT).read_text())
    assert report["bytes"]["after"] < 0.62 * report["bytes"]["before"]
    # A 16-bit scale per group, and the shape of each layer.
    assert report["bits_per_weight"] == pytest.approx(8 + 16 / 64, rel=1e-3)
    perplexity = report["perplexity"]
    assert abs(perplexity["after"] / perplexity["before"] - 1) < 0.005
    assert abs(perplexity["change"]) < 0.005 and 0 < perplexity["change_error"] < 0.005
    speed = report["tokens_per_second"]
    for name, values in speed["rounds"].items():
        assert len(values) == 3 and speed[name] == sorted(values)[1]
    assert speed["rounds"]["ratio"] == pytest.approx(
        [a / b for a, b in zip(speed["rounds"]["after"], speed["rounds"]["before"], strict=True)]
    )
    assert len(report["layers"]) == 42 and all(0 < la["error"] < 0.02 for la in report["layers"])
    with LLM(str(out), device="cpu") as llm:
        assert llm.generate(["Once upon a time"], GREEDY)[0].outputs[0].text
    assert main(["info", str(out), "--device", "cpu"]) == 0
    assert "compressed-tensors: 8 bits, in groups of 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--bits", "x"), "--bits:"),
        (("--group-size", "all"), "--group-size:"),
        (("--method", "fp8", "--asym"), "--sym:"),
        (("--budget-bits", "12"), "--budget-bits:"),
        (("--skip", "*"), "--skip:"),
        (("--eval", "nowhere.txt"), "--eval:"),
        (("--eval", "SHORT"), "--eval:"),
        (("--device", "tpu"), "--device:"),
        (("--calib-tokens", "1025"), "--calib-tokens:"),
        (("model.gguf",), "model:"),
        (("ENGINE",), "model:"),
        (("--calib", "nowhere.txt"), "--calib:"),
        (("--calib", __file__, "--samples", f"{10**20}"), "--samples:"),
        (("--samples", "0"), "--samples:"),
        (("/no/where",), "model:"),
    ],
)
def test_refusals(
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("SHORT").write_text("a")
    Path("model.gguf").write_bytes(b"GGUF")
    Path("ENGINE").mkdir()
    Path("ENGINE", MANIFEST).write_text("{}")
    Path("ENGINE", CONFIG).write_text("{}")
    error = command.refusal("quantize", "-o", str(tmp_path / "out"), *FAST, *flags)
    assert error.startswith(message)
    assert not (tmp_path / "out").exists()


def test_the_folder_is_required(command: Command) -> None:
    assert "-o" in command.refusal("quantize")
    assert command.refusal("quantize", "-o") == "--output: expected one argument"


@pytest.mark.parametrize("fault", ["lack 'lm_head.weight'", "hold 'x.weight', unknown"])
def test_weights_that_the_model_does_not_have(fault: str, tmp_path: Path, command: Command) -> None:
    """They would not be found out before the output is loaded."""
    save_tiny(tmp_path / "m", "Llama")
    weights = load_file(tmp_path / "m/model.safetensors")
    head = weights.pop("lm_head.weight")
    if "x.weight" in fault:
        weights |= {"lm_head.weight": head, "x.weight": head[0].clone()}
    save_file(weights, tmp_path / "m/model.safetensors", {"format": "pt"})
    words = ["quantize", str(tmp_path / "m"), "-o", str(tmp_path / "out"), "--method", "rtn"]
    error = command.refusal(*words, *FAST)
    assert f"its weights {fault}" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["rtn", "fp8"])
def test_weights_that_are_not_finite(method: str, tmp_path: Path, command: Command) -> None:
    save_tiny(tmp_path / "model", "Llama")
    tensors = load_file(tmp_path / "model" / SINGLE)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, tmp_path / "model" / SINGLE)
    flags = ["--method", method, "--group-size", "-1", *FAST]
    error = command.refusal(
        "quantize", str(tmp_path / "model"), "-o", str(tmp_path / "out"), *flags
    )
    assert "model.layers.2.mlp.up_proj" in error and "NaN" in error
    assert not (tmp_path / "out").exists()


def test_defaults_by_method(tmp_path: Path, command: Command) -> None:
    """Eight bits and whole rows for methods without alternatives; the largest group that fits."""
    out = tmp_path / "out"
    report = command.json("quantize", "-o", str(out), "--method", "fp8", *FAST)
    assert report["recipe"]["bits"] == 8 and report["recipe"]["group_size"] == -1
    assert report["perplexity"] is None and report["tokens_per_second"] is None
    assert report["calibration"] == "none: the weights alone"
    assert json.loads((out / REPORT).read_text()) == report
    # All except down_proj have 256 inputs.
    out = tmp_path / "other"
    flags = ("--method", "rtn", "--skip", "*.down_proj", "--json", *FAST)
    report = command.json("quantize", str(BUNDLED), "-o", str(out), *flags)
    assert report["recipe"]["group_size"] == 128
    kept = [layer for layer in report["layers"] if layer["bits"] is None]
    assert len(kept) == 6 and all(layer["name"].endswith("down_proj") for layer in kept)


def test_a_second_run_into_the_same_folder(tmp_path: Path, command: Command) -> None:
    arguments = ["quantize", "-o", str(tmp_path / "out"), "--method", "rtn", *FAST]
    command(*arguments)
    assert "--output: " in command.refusal(*arguments)
    # Before a model is looked for, which may be a download.
    assert "--output: " in command.refusal(*arguments, "/no/such/model")
