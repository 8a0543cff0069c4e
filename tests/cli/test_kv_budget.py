"""`kvik kv-budget`: from a text to a file of budgets."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.commands import Command
from helpers.configs import config
from helpers.tiny_models import save_tiny

from kvik.config.model_source import BUNDLED
from kvik.model_files import model_files

SIZES = {
    **{"vocab": 96, "hidden": 32, "inner": 64, "layers": 4, "heads": 4, "kv_heads": 2},
    **{"head_dim": 16, "positions": 256},
}


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


@pytest.mark.full
def test_a_model_with_states(tmp_path, command: Command):
    """Only some layers attend (Nemotron-H)."""
    save_tiny(tmp_path, "NemotronH", vocab_size=2048, max_position_embeddings=512)
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    full = model_files(tmp_path).spec().full_layers
    words = ["kv-budget", str(tmp_path), "--save", str(tmp_path / "b.json"), "--context", "256"]
    printed = command.json(*words, "--bytes", "0.3")
    assert [i for i, tokens in enumerate(printed["budgets"]) if tokens] == full
    assert all(0 < printed["scores"][i] <= 1 for i in full)
    answer = command("generate", str(tmp_path), "--kv-budget", words[3], "once " * 99).out
    assert answer


@pytest.mark.full
def test_layers_with_windows_have_no_budget(tmp_path, command: Command):
    """Gemma 2: every second layer has one."""
    facts = config("Gemma2ForCausalLM", **SIZES, sliding_window=24)
    (tmp_path / "config.json").write_text(json.dumps(facts))
    file = tmp_path / "b.json"
    words = ["kv-budget", str(tmp_path), "--save", str(file), "--by", "uniform", "--bytes", "0.5"]
    out = command(*words).out
    assert json.loads(file.read_text())["budgets"] == [None, 128, None, 128]
    assert "in the layers that see all keys" in out
    assert [row.split()[0] for row in out.split("\n")[3:] if row] == ["1", "3"]


WINDOWS = {"model_type": "mistral", "sliding_window": 64}


def test_a_model_without_budgets_is_what_is_wrong(tmp_path, command: Command):
    model = tmp_path / "config.json"
    facts = json.loads((BUNDLED / "config.json").read_text())
    model.write_text(json.dumps(facts | {"architectures": ["MistralForCausalLM"], **WINDOWS}))
    error = command.refusal("kv-budget", str(tmp_path), "--save", str(tmp_path / "b.json"))
    assert error.startswith("model: ") and "left out" not in error
