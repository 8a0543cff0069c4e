"""`kvik generate`: prompts as input, text, figures and errors as output."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.commands import Command

from kvik.cli.main import main
from kvik.config.model_source import BUNDLED
from kvik.llm import LLM

Loads = list[dict[str, Any]]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
STATS = re.compile(
    r"\d+ prompt \+ 8 output tokens, TTFT \d+ ms, TPOT [\d.]+ ms, [\d.]+ tokens/s, "
    r"prefix-cache hit \d+%\n"
)


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def expected(llm: LLM, prompt: str) -> str:
    params = llm.default_params.with_changes(temperature=0.0, max_tokens=8)
    return llm.generate(prompt, params)[0].text


def test_text_to_standard_output_and_figures_to_standard_error(
    llm: LLM, loads: Loads, command: Command
) -> None:
    captured = command("generate", *GREEDY, "The fox")
    assert captured.out == expected(llm, "The fox") + "\n"
    assert STATS.fullmatch(captured.err)
    assert loads == [{}]


@pytest.mark.parametrize(
    ("words", "prompt", "note"),
    [
        (["--max-tokens", "8"], "The fox", None),
        ([], "The fox", "--max-tokens 9 (the default)"),
        ([], "The fox " * 60, "--max-model-len"),
        (["--stop-token-ids", ",".join(map(str, range(2048)))], "The fox", None),
    ],
)
def test_a_text_cut_by_a_default_limit_is_noted(
    words: list[str],
    prompt: str,
    note: str | None,
    llm: LLM,
    loads: Loads,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.setattr(llm, "default_params", llm.default_params.with_changes(max_tokens=9))
    if note == "--max-model-len":
        ids = llm.tokenizer.encode(prompt)[:124]  # of 128
        prompt = llm.tokenizer.decode(ids)
    arguments = ["--temperature", "0", "--ignore-eos", *words]
    _, *notes = command("generate", *arguments, prompt).err.splitlines()
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


def test_it_runs_with_a_real_model(command: Command) -> None:
    words = ["--num-blocks", "8", "--block-size", "8", "--device", "cpu", "--verbose"]
    captured = command("generate", *GREEDY, "--seed", "1", *words, "Once upon a")
    assert captured.out.strip()
    assert "num_blocks = 8: as asked" in captured.err
    assert STATS.search(captured.err)


def test_the_model_comes_first(loads: Loads) -> None:
    model = str(BUNDLED)
    assert main(["generate", model, "--max-num-seqs", "4", "--max-tokens", "1", "A"]) == 0
    assert loads == [{"model": model, "max_num_seqs": 4}]


def test_text_is_flushed_as_it_is_generated(
    llm: LLM, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipe(io.StringIO):
        pieces: list[str] = []  # noqa: RUF012

        def flush(self) -> None:
            if self.getvalue():
                self.pieces.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Pipe())
    assert main(["generate", *GREEDY, "The fox"]) == 0
    assert len(set(Pipe.pieces)) >= 6


@pytest.mark.parametrize(
    ("data", "prompt"),
    [(b"The fox\n", "The fox"), (b"\xef\xbb\xbfThe fox", "The fox"), (b"A\n\n", "A\n")],
)
def test_a_dash_reads_standard_input(
    data: bytes,
    prompt: str,
    llm: LLM,
    loads: Loads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    (tmp_path / "-").touch()  # is not meant
    monkeypatch.chdir(tmp_path)
    feed(monkeypatch, data)
    assert command("generate", *GREEDY, "-").out.rstrip("\n") == expected(llm, prompt).rstrip("\n")


def test_echo(llm: LLM, loads: Loads, command: Command) -> None:
    text = command("generate", *GREEDY, "--echo", "The fox").out
    assert text == "The fox" + expected(llm, "The fox") + "\n"


def test_json(llm: LLM, loads: Loads, command: Command) -> None:
    flags = ["--json", "--n", "2", "--logprobs", "1", "--prompt-logprobs", "0"]
    captured = command("generate", *GREEDY, *flags, "The fox")
    found = json.loads(captured.out)
    assert [c["text"] for c in found["completions"]] == [expected(llm, "The fox")] * 2
    first = found["completions"][0]
    assert first["finish_reason"] == "length"
    assert len(first["logprobs"]) == len(first["token_ids"]) == 8
    assert first["logprobs"][0]["top"][0][0] == first["token_ids"][0]
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == len(found["prompt_token_ids"])
    assert found["usage"]["output_tokens"] == 16
    assert found["seconds"]["e2e"] >= found["seconds"]["ttft"] > 0
    assert captured.err == ""


def test_json_is_whole_where_the_encoding_is_not(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["generate", "--json", *GREEDY, "Zwölf"]) == 0
    stdout.seek(0)
    assert json.loads(stdout.read())["prompt"] == "Zwölf"


def test_siblings_are_numbered(loads: Loads, command: Command) -> None:
    text = command("generate", *GREEDY, "--n", "2", "The fox").out
    assert [line[:3] for line in text.splitlines()] == ["[0]", "[1]"]


def test_the_length_is_the_models_own_where_none_is_given(
    llm: LLM,
    loads: Loads,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.setattr(llm, "default_params", llm.default_params.with_changes(max_tokens=5))
    flags = ["--ignore-eos", "--seed", "1", "--json"]
    assert command.json("generate", *flags, "The fox")["usage"]["output_tokens"] == 5


def test_errors_found_by_the_model_are_one_line(loads: Loads, command: Command) -> None:
    message = command.refusal("generate", "word " * 2000)
    assert re.fullmatch(r"prompt: has \d+ tokens, .*128.*", message)
    error = command.refusal("generate", "--stop-token-ids", "99999", "x")
    assert error.startswith("--stop-token-ids: ")


@pytest.mark.parametrize(
    ("word", "is_model"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("./model", True),
        ("~someone", True),
        ("MODEL.GGUF", True),
        ("a folder", True),
        ("notes.txt", True),
        ("Hello", False),
        ("Hello.", False),
        ("/* sort a list */ int main", False),
        ("either/or, he said", False),
        ("what is a .gguf", False),
    ],
)
def test_a_single_word_that_names_a_model_is_not_a_prompt(
    word: str,
    is_model: bool,
    loads: Loads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    words = ["--max-tokens", "1", word]
    if not is_model:
        command("generate", *words)
        assert loads == [{}]
        return
    assert command.refusal("generate", *words).startswith("prompt: ") and not loads
    command("generate", *words[:-1], "", word)  # '' is the bundled model
    assert loads == [{}]


def test_binary_input(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    feed(monkeypatch, b"\xff\xfe")
    assert command.refusal("generate", "-") == "prompt: must be UTF-8 text"


def test_endless_input(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr("kvik.cli.generate.MAX_PROMPT_BYTES", 10)
    feed(monkeypatch, b"x" * 11)
    assert "prompt: must be at most" in command.refusal("generate", "-")


def test_a_request_that_fails_inside_the_engine(
    llm: LLM,
    loads: Loads,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    (output,) = llm.generate("The fox", llm.default_params.with_changes(max_tokens=2))
    failed = replace(output.outputs[0], finish_reason="error", error="sampler: boom")
    monkeypatch.setattr(llm, "generate", lambda *_: [replace(output, outputs=[failed])])
    message = command("generate", "--json", "The fox", code=1).err
    assert message == "kvik: error: request: sampler: boom\n"


def test_environment_variables_apply(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("KVIK_BLOCK_SIZE", "0")
    assert command.refusal("generate", "x").startswith("KVIK_BLOCK_SIZE: must be")
    assert command.refusal("generate", "x", "--block-size=-1").startswith("--block-size: must be")
    monkeypatch.delenv("KVIK_BLOCK_SIZE")
    monkeypatch.setenv("KVIK_OUTPUT", "x")  # not an option of the engine
    assert command.refusal("generate", "x", "-o", "y").startswith("--output: ")
    monkeypatch.delenv("KVIK_OUTPUT")
    monkeypatch.setenv("KVIK_DATA_PARALLEL_SIZE", "2")  # without a flag here
    assert command.refusal("generate", "x").startswith("KVIK_DATA_PARALLEL_SIZE: must be 1")
