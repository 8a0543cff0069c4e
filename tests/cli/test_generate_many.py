"""`kvik generate --prompts FILE`: a batch from a file."""

from __future__ import annotations

import fcntl
import io
import json
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers.commands import Command

from kvik import LLM, SamplingParams
from kvik.cli.main import main
from kvik.config.model_source import BUNDLED

OPTIONS = ("--device", "cpu", "--threads", "1", "--max-model-len", "128")
GREEDY = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos")


def written(text: str) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert len({one["line"] for one in found}) == len(found)
    return {one["line"]: one for one in found}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        '"Once upon a time"',
        "[1, 400, 5]",
        "",
        '{"prompt": "The king", "max_tokens": 3, "priority": 2, "logit_bias": {"300": 100}}',
        '{"messages": [{"role": "user", "content": "Hi"}], "n": 2}',
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_each_line_is_a_request_with_its_own_parameters(prompts: Path, command: Command) -> None:
    words = ["generate", "--prompts", str(prompts), "--policy", "priority", *OPTIONS, *GREEDY]
    found = written(command(*words).out)
    assert sorted(found) == [1, 2, 4, 5]
    counts = {
        line: [len(c["token_ids"]) for c in one["completions"]] for line, one in found.items()
    }
    assert counts == {1: [6], 2: [6], 4: [3], 5: [6, 6]}
    assert found[4]["completions"][0]["token_ids"] == [300] * 3
    with LLM(device="cpu", threads=1, max_model_len=128) as llm:
        params = llm.default_params.with_changes(temperature=0, max_tokens=6, ignore_eos=True)
        for line, prompt in ((1, "Once upon a time"), (2, [1, 400, 5])):
            assert found[line]["completions"][0]["text"] == llm.generate(prompt, params)[0].text
        chat = llm.chat([{"role": "user", "content": "Hi"}], params)[0]
        assert found[5]["completions"][0]["text"] == chat.text


def test_an_interrupted_batch_resumes_and_computes_failed_results_again(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    words = ["generate", "--prompts", str(prompts), "-o", str(out), "--policy", "priority"]
    assert main([*words, *OPTIONS, *GREEDY]) == 0
    whole = written(out.read_text())
    first, second, third, _ = out.read_text().splitlines(keepends=True)
    failed, kept = json.loads(first), json.loads(second)["line"]
    failed["completions"][0].update(finish_reason="error", token_ids=[], text="")
    failed["prompt"] = "a prompt that failed, and was corrected in the file"
    out.write_text(json.dumps(failed) + "\n" + second + third[:20])
    assert main([*words, *OPTIONS, *GREEDY]) == 0
    found = written(out.read_text())
    assert found.keys() == whole.keys()
    for line, one in found.items():
        assert one["completions"] == whole[line]["completions"]
        assert (one["seconds"] == whole[line]["seconds"]) == (line == kept)
    before = out.read_text()
    assert main([*words, *OPTIONS, *GREEDY]) == 0  # nothing is left to do
    assert out.read_text() == before
    assert capsys.readouterr().out == ""


def test_a_missing_policy_or_tokenizer_is_found_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("kvik.llm.start", lambda *_: pytest.fail("the model is loaded"))
    path, model = tmp_path / "prompts", tmp_path / "model"
    path.write_text('{"prompt": "A", "priority": 1}')
    shutil.copytree(BUNDLED, model, ignore=shutil.ignore_patterns("tokenizer*"))
    many = ["generate", "--prompts", str(path), *OPTIONS]
    for words, error in (
        (many, "priority"),
        ([*many, str(model), "--policy", "priority"], "tokenizer"),
        (["generate", str(model), "A"], "tokenizer"),
        (["chat", str(model)], "tokenizer"),
    ):
        assert error in command.refusal(*words)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no prompt"),
        ('"A"\n{"prompt": ', "line 2: must be JSON"),
        ('{"prompt": "A"}\n{"prompt": ""}', "line 2: prompt: must not be empty"),
        ("{}", "line 1: needs either prompt or messages"),
        ('{"prompt": "A", "messages": []}', "line 1: needs either prompt or messages"),
        ('{"prompt": "A", "max_token": 3}', "line 1: max_token"),
        ('{"prompt": "A", "top_p": 3}', "line 1: top_p: must be"),
        ('{"prompt": "A", "min_tokens": 3, "max_tokens": 2}', "must be at most max_tokens"),
        ('{"prompt": "A", "max_tokns": 3}', "did you mean max_tokens"),
        ('"A"\n\n7', "line 3: prompt: must be"),
        ('"A"\n["A", "B"]', "line 2: prompt: must be"),
        ('{"prompt": "A", "priority": 1}', "line 1: priority: needs"),
        ('{"prompt": "A", "priority": "high"}', "line 1: priority: must be an integer"),
        ('{"prompt": [5], "suffix": "A"}', "line 1: suffix: needs a text as prompt"),
    ],
)
def test_a_bad_line_is_named_before_the_model_is_loaded(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("kvik.llm.start", lambda *_: pytest.fail("the model is loaded"))
    path = tmp_path / "prompts"
    path.write_text(text)
    captured = command("generate", "--prompts", str(path), *OPTIONS, code=2)
    assert error in captured.err and not captured.out


def test_other_files_are_not_overwritten(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "notes"
    words = ["generate", "--prompts", str(prompts), "-o", str(mine), "--policy", "priority"]
    other = '{"line": 1, "prompt": "another", "prompt_token_ids": [1]}\n'
    damaged = other.replace("another", "\0" * 7)
    chat = '{"line": 5, "messages": [{"role": "user", "content": "Bye"}]}\n'
    notes = ("my notes", "my notes\n", '{"line": 1}', '{"line": "x"}\n')
    for text in (*notes, other, damaged, chat):
        mine.write_text(text)
        code = main([*words, *OPTIONS])
        if text == '{"line": 1}':
            continue  # truncated, it looks like the start of an object
        assert code == 2 and mine.read_text() == text
        assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--prompts", "/no/such"), "prompts"),
        (("--prompts", "-", "a model", "a prompt"), "prompts"),
        (("--prompts", "-", "--echo"), "echo"),
        (("--prompts", "-", "--suffix", "B"), "suffix"),
        (("A", "--suffix", "B"), "suffix"),  # the model has no tokens for it
        (("-o", "file", "A"), "output"),
        ((), "prompt"),
    ],
)
def test_incompatible_flags(words: tuple[str, ...], field: str, command: Command) -> None:
    message = command.refusal("generate", *words)
    assert message.startswith(f"--{field}: ") or field == "prompt"


def test_a_dash_reads_the_prompts_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"A"\n"B"\n')))
    text = command("generate", "", "--prompts", "-", *OPTIONS, *GREEDY).out
    assert sorted(written(text)) == [1, 2]


def test_lines_end_only_at_line_feeds(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "prompts"
    path.write_bytes('\ufeff"A\u2028\x85"\r\n'.encode() + b'\r\n"B"')
    out = command("generate", "--prompts", str(path), "-o", "-", *OPTIONS, *GREEDY).out
    lines = map(json.loads, out.rstrip("\n").split("\n"))
    assert {line["line"]: line["prompt"] for line in lines} == {1: "A\u2028\x85", 3: "B"}


def test_outputs_that_cannot_be_written(tmp_path: Path, command: Command) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text('"A"')
    for output, error in (
        ("/no/such/file", "--output: cannot write"),
        ("/dev/full", "/dev/full: "),
    ):
        words = ["generate", "--prompts", str(prompts), "-o", output, *OPTIONS]
        assert error in command(*words, code=2).err


def test_an_output_that_is_deleted_meanwhile_is_an_error(tmp_path: Path, command: Command) -> None:
    prompts, output = tmp_path / "prompts", tmp_path / "output"
    prompts.write_text('"A"\n' * 60)

    def delete() -> None:
        while not (output.exists() and output.stat().st_size):
            time.sleep(0.001)
        output.unlink()

    thread = Thread(target=delete, daemon=True)
    thread.start()
    words = ["generate", "--prompts", str(prompts), "-o", str(output), "--max-num-seqs", "1"]
    assert f"{output}: " in command(*words, *OPTIONS, *GREEDY, code=2).err
    thread.join()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_output_that_another_process_writes_is_refused(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    prompts, output = tmp_path / "prompts", tmp_path / "output"
    prompts.write_text('"A"\n"B"\n')
    words = ["generate", "--prompts", str(prompts), "-o", str(output), *OPTIONS, *GREEDY]
    with ExitStack() as other:

        def begin(*_: object) -> None:
            file = other.enter_context(output.open("xb", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b'{"line": ')

        if when == "before":
            begin()
        else:  # the tokenizer is looked for after the output
            monkeypatch.setattr("kvik.launch.check_tokenizer", begin)
        assert "error: --output: " in command(*words, code=2).err
        assert output.read_bytes() == b'{"line": '
    monkeypatch.undo()
    command(*words)
    assert sorted(written(output.read_text())) == [1, 2]


def test_outputs_are_written_when_ready_and_urgent_ones_first() -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (90, 4, 50)]
    with LLM(device="cpu", threads=1, max_model_len=128, policy="priority") as llm:
        order = [index for index, _ in llm.as_completed(["A", "B", "C"], params)]
        assert order == [1, 2, 0]
        outputs = llm.as_completed(["A", "B"], params[:1] * 2)
        next(outputs)
        outputs.close()
        assert llm.stats().num_running == 0
    sizes = {"max_num_seqs": 1, "max_queued_requests": 2, "policy": "priority"}
    with LLM(device="cpu", threads=1, max_model_len=128, **sizes) as llm:
        short = SamplingParams(max_tokens=2, ignore_eos=True)
        found = [index for index, _ in llm.as_completed(["A"] * 8, short, priority=[9] * 7 + [-1])]
        assert found[0] == 7
