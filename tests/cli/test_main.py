"""The command itself: verbs, exit codes, and what a user sees when something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvik import __version__
from kvik.cli import main as cli
from kvik.config.errors import ModelError


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvik", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def verb(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int = 0) -> None:
    """Make every verb raise `error`, or return `code`."""

    def act(arguments: object) -> int:
        if error is not None:
            raise error
        return code

    parser = SimpleNamespace(parse_intermixed_args=lambda rest: rest)
    module = SimpleNamespace(build_parser=lambda: parser, run=act)
    monkeypatch.setattr(cli, "import_module", lambda name: module)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help_names_every_verb(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in cli.VERBS)


def test_without_arguments_help_and_an_error_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: kvik" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvik {__version__}\n"


def test_help_imports_nothing_that_takes_time() -> None:
    script = """
import sys
from kvik.cli.main import main
assert main(["--help"]) == 0
slow = {"argparse", "dataclasses", "numpy", "rich", "tokenizers", "torch"} & set(sys.modules)
assert not slow, slow
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: kvik {name} [options]" in capsys.readouterr().out


def test_an_unknown_verb_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serv"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvik: error: command: must be one of generate, ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_an_error_of_the_user_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(monkeypatch, ModelError("config.json", "is missing"))
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err == "kvik: error: config.json: is missing\n"


def test_ctrl_c_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(monkeypatch, KeyboardInterrupt())
    assert cli.main(["generate"]) == 130
    assert capsys.readouterr().err == ""


def test_a_verbs_exit_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, None, code=1)
    assert cli.main(["generate"]) == 1


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["generate"])


def test_a_reader_that_left_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        command = [sys.executable, "-m", "kvik", "--help"]
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 141
    assert result.stderr == ""


def test_bytes_that_are_no_text_are_no_crash() -> None:
    command = [sys.executable, "-m", "kvik", "chat"]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "KVIK_THREADS": "1"}
    said = b"/system caf\xe9\n"
    result = subprocess.run(command, input=said, capture_output=True, check=False, env=strict)
    assert result.returncode == 0, result.stderr
    assert "system message: caf\ufffd" in result.stdout.decode()


def test_the_module_runs_too() -> None:
    result = run("info", "/no/such/folder")
    assert result.returncode == 2
    assert result.stderr == "kvik: error: model: there is no folder '/no/such/folder'\n"
