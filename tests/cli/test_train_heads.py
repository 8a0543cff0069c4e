"""`kvik train-heads`: from the command line to a folder of heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvik.cli.main import main
from kvik.config.draft_heads import read_heads_spec

CPU = ("--device", "cpu", "--threads", "1")
TEXT = "Once upon a time there was a fox. The fox lived by the river, and it was very old. " * 12


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def words(text: str, tmp_path: Path, *more: str) -> list[str]:
    out = str(tmp_path / "heads")
    return ["train-heads", "--data", text, "-o", out, "--window", "16", *CPU, *more]


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_are_saved_and_reported(
    kind: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--depth", "2", "--tokens", "64", "--rows", "32"]
    sizes += ["--inner", "64"] if kind == "eagle" else ["--layers", "2"]
    assert main([*words(text, tmp_path, "--kind", kind, *sizes), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    spec = read_heads_spec(tmp_path / "heads", kind)
    assert report["accuracies"] == [list(ranks) for ranks in spec.accuracies]
    assert report["finished"] and report["bytes"] > 1e5 and list(report["tokens_per_step"]) == [
        "4", "8", "16", "32",
    ]  # fmt: skip
    assert spec.depth == 2 and len(spec.accuracies[0]) == 10

    before = (tmp_path / "heads" / "model.safetensors").stat().st_mtime_ns
    assert main(words(text, tmp_path, "--kind", kind, *sizes)) == 2
    assert "--output: " in capsys.readouterr().err
    assert (tmp_path / "heads" / "model.safetensors").stat().st_mtime_ns == before
    assert main(words(text, tmp_path, "--kind", kind, *sizes, "--force")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{kind} heads, ") and "tokens of a step that they promise" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--kind", "hydra"), "kind: must be one of medusa, eagle, not 'hydra'"),
        (("--depth", "0"), "depth: must be an integer in [1, 16], not 0"),
        (("--kind", "eagle", "--layers", "1"), "layers: must be left out: it is for medusa heads"),
        (("--inner", "64"), "inner: must be left out: it is for eagle heads"),
        (("--learning-rate", "0"), "learning-rate: must be a number in (0, 1], not 0.0"),
        (("--window", "1"), "window: must be an integer in [2, 65536], not 1"),
        (("--window", "500"), "data: must fill 16 windows or more, not 1: more text is needed"),
        (("--tokens", "many"), "tokens: must be an integer, not 'many'"),
    ],
)
def test_a_bad_option_is_named(
    more: tuple[str, ...],
    message: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words(text, tmp_path, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "heads").exists()
