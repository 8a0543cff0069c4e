"""`kvik compare`: from the command line to tables and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Command

import kvik
from kvik.cli.main import main

BUNDLED = Path(kvik.__file__).parent / "bundled"
SMALL = ("--device", "cpu", "--threads", "1", "--window", "64")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.jsonl"
    stories = ["Once upon a time there was an old fox by the river.", "The king had three sons."]
    path.write_text("\n".join(json.dumps({"text": story}) for story in stories))
    return str(path)


def compare(file: Path, *words: str) -> dict[str, dict[str, Any]]:
    """Return the values of the figures by row."""
    assert main(["compare", *words, *SMALL, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["group"], found["kind"]) == ("", "compare")
    return {
        row["label"]: {
            **row["facts"],
            **{figure["name"]: figure["values"] for figure in row["figures"]},
        }
        for row in found["rows"]
    }


@pytest.mark.full
def test_formats_of_one_model(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--quantizations", "int8,int4", "--kv-cache-dtypes", "int4", "--data", text)
    speed = ("--output-tokens", "8", "--repeats", "2")
    rows = compare(tmp_path / "out.json", *words, *speed)
    names = ["bundled", "bundled int8", "bundled int4", "bundled KV int4"]
    assert list(rows) == names
    plain, int8, int4, kv = (rows[name] for name in names)
    assert plain["bits"] == [16] and "KL" not in plain and "over the reference" not in plain
    assert 8 < int8["bits"][0] < 9 and 4 < int4["bits"][0] < 5 and kv["bits"] == [16]
    assert int4["weights in"] == "bfloat16, rounded to int4"
    assert kv["KV cache in"] == "int4" and kv["KV"][0] < plain["KV"][0] / 3
    assert 0 < int8["KL"][0] < int4["KL"][0]
    for row in (int8, int4, kv):
        change = 100 * (row["perplexity"][0] / plain["perplexity"][0] - 1)
        assert row["change"][0] == pytest.approx(change, abs=1e-3)
        ratios = [a / b for a, b in zip(row["decode"], plain["decode"], strict=True)]
        assert row["over the reference"] == pytest.approx(ratios)
    out = capsys.readouterr().out
    assert "Medians of 2 rounds" in out and "The reference is bundled." in out


def test_several_models_are_compared_in_one_table(
    tmp_path: Path, text: str, command: Command
) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(BUNDLED / "stories", twin)
    models = (str(BUNDLED / "stories"), str(BUNDLED / "stories-draft"), str(twin))
    rows = compare(tmp_path / "out.json", *models, "--data", text, "--no-speed")
    assert list(rows) == ["stories", "stories-draft", "twin"]
    assert all("decode" not in row for row in rows.values())
    assert rows["twin"]["KL"] == pytest.approx([0], abs=1e-12)
    assert rows["twin"]["top-1"] == [100] and rows["twin"]["change"] == [0]
    assert rows["stories-draft"]["KL"][0] > 0.1
    out = command("compare", *models, "--data", text, "--no-speed", "--markdown", *SMALL).out
    assert out.startswith("# kvik compare\n")


@pytest.mark.full
def test_plots(tmp_path: Path, text: str) -> None:
    pytest.importorskip("matplotlib")
    words = ("--quantizations", "int8", "--data", text, "--no-speed", "--plot", str(tmp_path / "p"))
    compare(tmp_path / "out.json", *words)
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert {"compare-perplexity.png", "compare-weights-in-memory.png"} <= names


def test_errors_take_one_line(command: Command) -> None:
    for words, wrong in (
        (("--quantizations", "int8,int8"), "--quantizations: must be different names"),
        (("--quantizations", "int3"), "--quantizations: must be one of"),
        (("--kv-cache-dtypes", "int3"), "--kv-cache-dtypes: must be one of"),
        (("--repeats", "0"), "--repeats: must be in"),
        (("--output-tokens", "1"), "--output-tokens: must be at least 2"),
        (("--prompt-tokens", "0"), "--prompt-tokens: must be at least 1"),
        (("--prompt-tokens", "2000"), "--prompt-tokens: 2000, and 64 of output, are more than"),
        (("--data", "none"), "--data: none cannot be read"),
        (("/a/b", "/a/b"), "model: /a/b is given twice"),
        (("/a/b",), "model: "),
    ):
        assert command.refusal("compare", *SMALL, *words).startswith(wrong)
