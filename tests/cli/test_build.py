"""`kvik build` and its flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.refusals import refused

from kvik.cli.main import main
from kvik.spec.engine_folder import MANIFEST, WEIGHTS

THREADS = ["--threads", "1"]


def test_a_folder_that_generates_like_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = str(tmp_path / "engine")
    assert main(["build", "-o", engine, "--quantization", "int8", *THREADS]) == 0
    assert "quantization int8" in capsys.readouterr().out
    words = ["--temperature", "0", "--max-tokens", "8", "--num-blocks", "64", *THREADS]
    assert main(["generate", *words, engine, "Once upon a time"]) == 0
    text = capsys.readouterr().out
    assert main(["generate", *words, "--quantization", "int8", "Once upon a time"]) == 0
    assert capsys.readouterr().out == text
    assert main(["info", "--json", engine]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["weights"] == (tmp_path / "engine" / WEIGHTS).stat().st_size


def test_every_byte_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "-o", str(tmp_path / "engine"), *THREADS]) == 0
    assert main(["build", "--verify", str(tmp_path / "engine")]) == 0
    assert "all as they were built" in capsys.readouterr().out
    weights = tmp_path / "engine" / WEIGHTS
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    error = refused(capsys, "build", "--verify", str(tmp_path / "engine"))
    assert error.startswith(f"{WEIGHTS}: ")


def test_an_existing_output_is_only_replaced_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, name in ((["build", *THREADS], "engine"), (["export"], "m.gguf")):
        output = tmp_path / name
        words = [*command, "-o", str(output)]
        assert main(words) == 0
        before = output.stat().st_ino
        capsys.readouterr()
        assert main(words) == 2
        error = f"kvik: error: --output: {str(output)!r} exists; --force replaces it\n"
        assert capsys.readouterr().err == error and output.stat().st_ino == before
        assert main([*words, "--force"]) == 0
        assert output.stat().st_ino != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--output: is missing: give -o"),
        (["-o", "there", "--verify", "here"], "--output: is missing: give -o"),
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
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "build", *words).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_has_no_paths_of_the_machine(tmp_path: Path) -> None:
    assert main(["build", "-o", str(tmp_path / "engine"), *THREADS]) == 0
    assert str(tmp_path) not in (tmp_path / "engine" / MANIFEST).read_text()
