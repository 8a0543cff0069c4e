"""`kvik spec-report` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.commands import Command

ENGINE = ("--device", "cpu", "--threads", "1", "--max-model-len", "96", "--max-num-seqs", "2")
SMALL = ("--batch", "2", "--output-tokens", "24", "--repeats", "1", "--warmup", "0")


def test_json(tmp_path: Path, command: Command) -> None:
    file, data = tmp_path / "out.json", tmp_path / "text.jsonl"
    data.write_text(json.dumps({"text": "Tom had a red ball. Tom had a red"}))
    eager = ("--speculative-config", '{"adaptive": false}')
    flags = ("--spec-method", "suffix", "--spec-tokens", "4", "--data", str(data), *eager)
    out = command("spec-report", *flags, *SMALL, *ENGINE, "--json", str(file)).out
    found = json.loads(file.read_text())
    assert (found["group"], found["kind"]) == ("", "spec-report")
    assert found["facts"]["method"] == "suffix"
    assert found["facts"]["prompts from"] == str(data)
    assert found["facts"]["prefix caching"] == "off"
    (row,) = found["rows"]
    figures = {figure["name"]: figure["values"] for figure in row["figures"]}
    assert figures["equal tokens"] == [100.0]
    assert figures["drafts"][0] > 0
    assert 0 < figures["K"][0] <= 4
    assert "predicted" in out


def test_markdown_and_the_default_method(command: Command) -> None:
    text = command("spec-report", *SMALL, *ENGINE, "--markdown").out
    assert text.startswith("# kvik spec-report\n")
    assert "- **method**: ngram" in text
    assert "- **prompts from**: the story that ships with kvik" in text


def test_invalid_options_are_refused(command: Command) -> None:
    for flags, message in (
        (("--spec-method", "off"), "--spec-method: must name a method"),
        (("--spec-method", "draft_model"), "--spec-model: must name a draft model"),
        (("--enable-prefix-caching",), "--enable-prefix-caching: is what this benchmark varies"),
        (("--batch", "3"), "--batch: must be in [1, 2] (--max-num-seqs), not 3"),
        (("--batch", "1", "--output-tokens", "1"), "--output-tokens: must be at least 2, not 1"),
        (("--batch", "1", "--prompt-tokens", "96"), "--prompt-tokens: 96, and "),
        (("--data", "no.txt"), "--data: no.txt cannot be read"),
        (("--prompt-tokens", "0"), "--prompt-tokens: must be at least"),
        (("--repeats", "0"), "--repeats: must be in [1, 1000], not 0"),
    ):
        assert command.refusal("spec-report", *ENGINE, *flags).startswith(message)
