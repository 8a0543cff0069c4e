"""`kvik train-heads`: from the command line to a folder of heads."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest
from helpers.commands import Command

from kvik.config.draft_heads import read_heads_spec
from kvik.config.model_source import BUNDLED

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
    kind: str, text: str, tmp_path: Path, command: Command
) -> None:
    sizes = ["--depth", "2", "--tokens", "64", "--rows", "32"]
    sizes += ["--inner", "64"] if kind == "eagle" else ["--layers", "2"]
    report = command.json(*words(text, tmp_path, "--kind", kind, *sizes))
    spec = read_heads_spec(tmp_path / "heads", kind)
    assert report["accuracies"] == [list(ranks) for ranks in spec.accuracies]
    assert report["finished"] and report["bytes"] > 1e5 and list(report["tokens_per_step"]) == [
        "4", "8", "16", "32",
    ]  # fmt: skip
    assert spec.depth == 2 and len(spec.accuracies[0]) == 10

    before = (tmp_path / "heads" / "model.safetensors").stat().st_mtime_ns
    assert "--output: " in command.refusal(*words(text, tmp_path, "--kind", kind, *sizes))
    assert (tmp_path / "heads" / "model.safetensors").stat().st_mtime_ns == before
    shown = command(*words(text, tmp_path, "--kind", kind, *sizes, "--force")).out
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
    command: Command,
) -> None:
    assert message in command.refusal(*words(text, tmp_path, *more))
    assert not (tmp_path / "heads").exists()


def test_a_full_disk_is_named(text: str, tmp_path: Path, command: Command) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        assert command.refusal(*words(text, tmp_path)).startswith("--output: ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.full
def test_the_window_of_the_text_is_not_the_models(
    text: str, tmp_path: Path, command: Command
) -> None:
    from helpers.tiny_models import save_tiny

    model = tmp_path / "model"
    save_tiny(model, "Gemma3", vocab_size=2048, head_dim=16, sliding_window=9)
    shutil.copy(BUNDLED / "tokenizer.json", model)
    command(*words(text, tmp_path, "--tokens", "64", "--rows", "32", str(model)))
