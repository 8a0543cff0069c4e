"""`kvik build` and its flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import Command

from kvik.cli.main import main
from kvik.spec.engine_folder import MANIFEST, WEIGHTS

THREADS = ["--threads", "1"]


def test_a_folder_that_generates_like_the_model(tmp_path: Path, command: Command) -> None:
    engine = str(tmp_path / "engine")
    printed = command("build", "-o", engine, "--quantization", "int8", *THREADS).out
    assert "quantization int8" in printed
    words = ["--temperature", "0", "--max-tokens", "8", "--num-blocks", "64", *THREADS]
    text = command("generate", *words, engine, "Once upon a time").out
    assert command("generate", *words, "--quantization", "int8", "Once upon a time").out == text
    memory = command.json("info", engine)["memory"]
    assert memory["weights"] == (tmp_path / "engine" / WEIGHTS).stat().st_size


def test_every_byte_is_verified(tmp_path: Path, command: Command) -> None:
    command("build", "-o", str(tmp_path / "engine"), *THREADS)
    assert "all as they were built" in command("build", "--verify", str(tmp_path / "engine")).out
    weights = tmp_path / "engine" / WEIGHTS
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    error = command.refusal("build", "--verify", str(tmp_path / "engine"))
    assert error.startswith(f"{WEIGHTS}: ")


def test_an_existing_output_is_only_replaced_by_force(tmp_path: Path, command: Command) -> None:
    for verb, name in ((["build", *THREADS], "engine"), (["export"], "m.gguf")):
        output = tmp_path / name
        words = [*verb, "-o", str(output)]
        command(*words)
        before = output.stat().st_ino
        assert command.refusal(*words) == f"--output: {str(output)!r} exists; --force replaces it"
        assert output.stat().st_ino == before
        command(*words, "--force")
        assert output.stat().st_ino != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--output: is missing: give -o"),
        (["-o", "there", "--verify", "here"], "--output: must be left out with --verify"),
        (["--verify", "nowhere"], "--verify: 'nowhere' is not an engine folder"),
        (["-o", "x", "--quantization", "int2"], "--quantization: must be one of none, "),
        (["-o", "x", "--max-num-seqs", "3"], "arguments: --max-num-seqs is not a flag of kvik "),
    ],
)
def test_refusals(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.refusal("build", *words).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_has_no_paths_of_the_machine(tmp_path: Path) -> None:
    assert main(["build", "-o", str(tmp_path / "engine"), *THREADS]) == 0
    assert str(tmp_path) not in (tmp_path / "engine" / MANIFEST).read_text()
