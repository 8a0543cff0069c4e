"""The command: verbs, exit codes, and error messages."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.commands import Command

from kvik import __version__
from kvik.cli import main as cli
from kvik.cli.flags import Parser
from kvik.cli.plugins import added_verbs
from kvik.config.model_source import BUNDLED
from kvik.errors import ConfigError, KvikError, ModelError


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvik", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


VERBS = {**cli.VERBS, **added_verbs()}


def verb(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int = 0) -> None:
    """Make every verb raise `error`, or return `code`."""

    def act(arguments: object) -> int:
        if error is not None:
            raise error
        return code

    def build_parser() -> Parser:
        parser = Parser("verb", "", "")
        parser.parse_intermixed_args = lambda rest: Namespace()
        parser.add_argument("model", nargs="?")
        for flag in ("--model", "--max-model-len", "--num-blocks"):
            parser.add_argument(flag)
        return parser

    module = SimpleNamespace(build_parser=build_parser, run=act)
    monkeypatch.setattr(cli, "import_module", lambda name: module)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help_names_every_verb(arguments: list[str], command: Command) -> None:
    out = command(*arguments).out
    assert all(f"  {verb} " in out for verb in VERBS)


def test_without_arguments_help_and_an_error_code(command: Command) -> None:
    assert "usage: kvik" in command(code=2).out


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["-h"], 0), (["help"], 0), ([], 2)])
def test_help_on_a_group_of_verbs_names_each(words: list[str], code: int, command: Command) -> None:
    out = command("bench", *words, code=code).out
    assert out.startswith("usage: kvik bench COMMAND [options]\n")
    assert all((f"  {verb} " in out) == verb.startswith("bench ") for verb in VERBS)


def test_version(command: Command) -> None:
    assert command("--version").out == f"kvik {__version__}\n"


def test_help_imports_nothing_slow() -> None:
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


def test_an_unknown_verb_is_one_line(command: Command) -> None:
    assert command.refusal("serv").endswith("did you mean serve?")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_loading_a_model_is_reported_on_a_terminal(flags: list[str], command: Command) -> None:
    small = ["--device", "cpu", "--threads", "1", "--max-model-len", "64", "--max-num-seqs", "1"]
    for _ in range(2):  # for each command separately
        words = [*small, *flags, "--max-tokens", "1", "Hi"]
        lines = command("generate", *words).err.splitlines()
        assert [line for line in lines if line.startswith("kvik: loading stories: ")] == lines[:1]
        assert bool(lines) == (not flags)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("max_model_len", "must be 1"), "--max-model-len: must be 1"),
        (ConfigError("x", "needs num_blocks (5), no max_k"), "x: needs --num-blocks (5), no max_k"),
        (ModelError("model", "there is no 'a/num_blocks'"), "model: there is no 'a/num_blocks'"),
        (ConfigError("KVIK_NUM_BLOCKS", "must be 1"), "KVIK_NUM_BLOCKS: must be 1"),
        (ModelError("a.json", "num_blocks must be 1"), "a.json: num_blocks must be 1"),
    ],
)
def test_errors_name_flags(
    error: KvikError, line: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    verb(monkeypatch, error)
    assert command.refusal("info") == line


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    verb(monkeypatch, KeyboardInterrupt())
    assert command("generate", code=130).err == ""


def test_a_verbs_exit_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, None, code=1)
    assert cli.main(["generate"]) == 1


def test_a_panic_of_a_library_is_one_line(command: Command, tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}
    for file in BUNDLED.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    facts = json.loads((BUNDLED / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps({**facts, "normalizer": normalizer}))
    printed = command("generate", str(tmp_path), "Hello", "--device", "cpu", code=2)
    loading, error = printed.err.splitlines()
    assert loading.startswith("kvik: loading ")
    assert error.startswith("kvik: error: tokenizer")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "/model"), "/model: Permission denied"),
        (OSError(40, "Too many levels of symbolic links", "/a"), "/a: Too many levels of symbol"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            OSError(28, "No space left", "/model", None, "/tmp/copy"),
            "/model -> /tmp/copy: No space",
        ),
        (TimeoutError(), "TimeoutError"),
        (MemoryError(), "memory: there is too little of it"),
        (OSError(12, "Cannot allocate memory", "/model"), "memory: there is too little of it"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), "memory: there is too"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "memory: the GPU"),
        (RuntimeError("CUDA error: out of memory"), "memory: the GPU has too little"),
        (ImportError("libtorch_cpu.so: failed to map segment"), "memory: there is too little"),
        (RuntimeError("can't start new thread"), "threads: "),
        (ModuleNotFoundError("no torch", name="torch.nn"), "torch: is not installed: pip "),
    ],
)
def test_errors_of_the_machine_are_one_line(
    error: Exception,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    verb(monkeypatch, error)
    assert command.refusal("info").startswith(line)


BUGS = [RuntimeError("a bug"), ImportError("no module named x"), ZeroDivisionError("a bug")]
BUGS.append(ModuleNotFoundError("no kvik.nothing", name="kvik.nothing"))


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_of_the_same_kinds_are_not_hidden(
    bug: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb(monkeypatch, bug)
    with pytest.raises(type(bug)):
        cli.main(["info"])


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run `kvik` in a user's shell, which may close a stream or set a limit first."""
    script = command.replace("kvik", f"{shlex.quote(sys.executable)} -m kvik")
    return subprocess.run(
        ["/bin/sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize(
    "command", ["kvik info", "kvik --help", "kvik models --help", "kvik generate --help"]
)
def test_a_full_standard_output_is_one_line(command: str) -> None:
    result = shell(f"{command} >/dev/full")
    assert result.stderr == "kvik: error: standard output: No space left on device\n"
    assert result.returncode == 2


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("kvik info >&-", 0, ""),
        ("kvik info --help >&-", 0, ""),
        ("kvik generate - <&-", 2, "kvik: error: prompt: must not be empty\n"),
        ("kvik info >/dev/null 2>&-", 0, ""),
        ("kvik info /no/such/folder 2>&-", 2, ""),
        ("kvik info /no/such/folder 2>/dev/full", 2, ""),
        ("cd `mktemp -d`; rmdir `pwd`; kvik quantize -o /q", 2, "kvik: error: folder: "),
        ("ulimit -v 300000; kvik quantize -o q", 2, "kvik: error: memory: there is too little"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="has /dev/full and enforces limits")
def test_a_closed_stream_or_a_limit_does_not_crash(command: str, code: int, error: str) -> None:
    result = shell(command)
    assert result.returncode == code
    assert result.stderr.startswith(error) and result.stderr.count("\n") == bool(error)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="enforces limits of the address space")
def test_a_limit_of_the_address_space_is_in_the_plan() -> None:
    result = shell("ulimit -v 2200000; kvik generate --device cpu --max-tokens 1 --verbose A")
    assert result.returncode == 0, result.stderr
    assert "ulimit -v" in shell("ulimit -v 1100000; kvik generate --device cpu A").stderr


def test_a_closed_reader_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        command = [sys.executable, "-m", "kvik", "--help"]
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 0
    assert result.stderr == ""


@pytest.mark.full
def test_binary_arguments_do_not_crash() -> None:
    command = [sys.executable, "-m", "kvik", "chat"]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "KVIK_THREADS": "1"}
    said = b"/system caf\xe9\n"
    result = subprocess.run(command, input=said, capture_output=True, check=False, env=strict)
    assert result.returncode == 0, result.stderr
    assert "system message: caf\ufffd" in result.stdout.decode()


def test_the_module_can_be_run() -> None:
    result = run("info", "/no/such/folder")
    assert result.returncode == 2
    assert result.stderr == "kvik: error: model: there is no folder '/no/such/folder'\n"


@pytest.mark.parametrize(
    ("verb", "flag", "more"),
    [
        ("serve", "--record", ["--port", "0"]),
        ("build", "--output", []),
        ("train-heads", "--output", ["--data", "text.txt"]),
        ("kv-budget", "--save", []),
        ("export", "--output", []),
        ("generate", "--output", ["--prompts", "text.txt"]),
        ("bench throughput", "--json", []),
    ],
)
def test_an_output_is_checked_before_a_model_is_looked_for(
    verb: str,
    flag: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Once upon a time")
    words = [*verb.split(), "/no/such/model", flag, "text.txt/is-no-folder.gguf", *more]
    assert command.refusal(*words).startswith(f"{flag}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
