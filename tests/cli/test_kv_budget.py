"""`kvik kv-budget`: from a text to a file of budgets."""

from __future__ import annotations

import json

import pytest
from helpers.commands import Command

from kvik.config.model_source import BUNDLED


@pytest.mark.full
def test_it_measures_and_saves(tmp_path, command: Command):
    text, file = tmp_path / "a.txt", tmp_path / "b.json"
    text.write_text("Once upon a time there was a small dog. " * 20)
    words = ["kv-budget", "--data", str(text), "--save", str(file), "--context", "512"]
    printed = command.json(*words)
    saved = json.loads(file.read_text())
    assert saved == {"kv_budget": 1, **printed}
    assert printed["data"] == "a.txt" and printed["tokens"] > 100
    assert sum(printed["budgets"]) <= 0.25 * 512 * len(printed["budgets"])
    assert len(set(printed["budgets"])) > 1
    assert "--force" in command.refusal(*words)


@pytest.mark.parametrize("by", ["uniform", "pyramid"])
def test_baselines_need_no_text(tmp_path, command: Command, by):
    file = tmp_path / "b.json"
    words = ["--save", str(file), "--by", by, "--bytes", "0.5", "--context", "1024"]
    out = command("kv-budget", *words).out.split("\n")
    budgets = json.loads(file.read_text())["budgets"]
    rows = [line.split() for line in out if line[:5].strip().isdigit()]
    assert [int(row[-1].replace(",", "")) for row in rows] == budgets
    assert sum(budgets) == 512 * len(budgets)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--bytes", "0"], "--bytes"),
        (["--bytes", "0.001"], "--bytes"),
        (["--context", "10"], "--context"),
        (["--context", "2000"], "--context: must be at most the model's 1024"),
        (["--by", "luck"], "--by"),
        (["--by", "uniform", "--context", "1024", "--bytes", "0.02"], "--bytes"),
        (["--save", "/proc/b.json"], "--save: '/proc/b.json' cannot be written"),
    ],
)
def test_wrong_options(tmp_path, command: Command, words, named):
    error = command.refusal(
        "kv-budget", "--save", str(tmp_path / "b.json"), "--by", "uniform", *words
    )
    assert named in error
    assert not (tmp_path / "b.json").exists()


WINDOWS = {"model_type": "mistral", "sliding_window": 64}


def test_a_model_without_budgets_is_what_is_wrong(tmp_path, command: Command):
    model = tmp_path / "config.json"
    facts = json.loads((BUNDLED / "config.json").read_text())
    model.write_text(json.dumps(facts | {"architectures": ["MistralForCausalLM"], **WINDOWS}))
    error = command.refusal("kv-budget", str(tmp_path), "--save", str(tmp_path / "b.json"))
    assert error.startswith("model: ") and "left out" not in error
