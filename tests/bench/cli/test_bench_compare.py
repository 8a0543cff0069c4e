"""`kvik bench compare`: from the command line to the table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Command

from kvik.cli.main import main
from kvik_bench.peers import compare
from kvik_bench.peers.adapter_process import Outcome
from kvik_bench.peers.engine_entries import EngineEntry
from kvik_bench.peers.engines.protocol import Answer, Job

ENGINES = """
threads = 2
[engines.ours]
adapter = "kvik"
format = "bf16"
options = { dtype = "bfloat16" }
[engines.known]
adapter = "known.py"
format = "bf16"
model = "/converted/{model}"
[engines.broken]
adapter = "broken.py"
format = "bf16"
[engines.short]
adapter = "short.py"
format = "bf16"
"""

KNOWN = """
from .protocol import Answer
def run(job):
    assert job.model == "/converted/stories" and job.threads == 2
    return Answer("known 2.0", 0.5, {"b1": [100.0, 200.0, 300.0]}, {"b1": [[1, 2, 3, 4]]})
"""
BROKEN = "def run(job):\n    raise OSError('no such device')"
SHORT = """
from .protocol import measure
class Short:
    name = "short 3.0"
    def generate(self, prompts, output, clock):
        for step in range(min(output, 3)):
            clock.tokens(0, [5])
def run(job):
    return measure(Short(), job)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for name, text in (("known", KNOWN), ("broken", BROKEN), ("short", SHORT)):
        (tmp_path / f"{name}.py").write_text(text)
    path = tmp_path / "engines.toml"
    path.write_text(ENGINES)
    return path


def small(*more: str) -> list[str]:
    sizes = ["--workloads", "b1", "--prompt-tokens", "9", "--output-tokens", "4"]
    return ["bench", "compare", *sizes, *more]


@pytest.mark.full
def test_kvik_is_compared_with_valid_failing_and_cheating_engines(
    config: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out.json"
    shown = command(*small("--config", str(config), "--rounds", "1", "--json", str(out)))
    result = json.loads(out.read_text())
    rows = {row["label"]: row for row in result["rows"]}
    ours, known = figures(rows["ours"]), figures(rows["known"])
    assert known["b1"] == [200.0]  # the median of one process
    assert known["start"] == [0.5]
    assert known["kvik / this, b1"] == [ours["b1"][0] / 200.0]
    assert known["equal tokens"][0] < 100
    assert rows["known"]["facts"]["engine"] == "known 2.0"
    assert rows["broken"]["facts"]["failed"].startswith("b1: OSError: no such device")
    assert rows["short"]["facts"]["failed"].startswith("b1: its rows have [3] tokens, not 4 each")
    assert result["facts"]["threads"] == "2"
    assert re.search(r"b1: ours is \S+ times as fast as known, the best other bf16", shown.out)
    assert "round 1 of 1" in shown.err


def figures(row: dict[str, Any]) -> dict[str, list[float]]:
    return {figure["name"]: figure["values"] for figure in row["figures"]}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineEntry, Job, float]]:
    """Record the runs instead of running them."""
    asked: list[tuple[EngineEntry, Job, float]] = []

    def run(entry: EngineEntry, job: Job, timeout: float) -> Outcome:
        asked.append((entry, job, timeout))
        if len(asked) == 4:
            raise KeyboardInterrupt
        rates = {work.name: [2.0] * len(work.batches) for work in job.workloads}
        return Outcome(Answer("fake", 1.0, rates), 1 << 20)

    monkeypatch.setattr(compare, "run_adapter", run)
    return asked


def test_installed_engines_run_in_the_models_format_by_default(
    runs: list[tuple[EngineEntry, Job, float]],
) -> None:
    flags = ["--engines", "transformers", "--rounds", "1", "--threads", "1", "--timeout", "7"]
    assert main(small(*flags)) == 0
    assert [(e.adapter, e.format, j.threads, t) for e, j, t in runs] == [
        ("kvik", "bf16", 1, 7.0),
        ("transformers", "bf16", 1, 7.0),
    ]
    assert runs[0][1].workloads == runs[1][1].workloads


def test_ctrl_c_prints_the_results_so_far(
    runs: list[tuple[EngineEntry, Job, float]], command: Command
) -> None:
    shown = command(*small("--engines", "transformers", "--rounds", "5"), code=130)
    assert "interrupted" in shown.err
    assert "kvik / this" in shown.out


STUCK = """
import os, pathlib, time
def run(job):
    pathlib.Path(job.options["pid"]).write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_the_command_end_the_engine_too(
    number: signal.Signals, in_background: bool, tmp_path: Path
) -> None:
    """In the background, a shell starts jobs with Ctrl-C ignored."""
    (tmp_path / "stuck.py").write_text(STUCK)
    pid, config = tmp_path / "pid", tmp_path / "engines.toml"
    config.write_text(
        '[engines.ours]\nadapter = "kvik"\nformat = "bf16"\npython = "/nowhere"\n'
        '[engines.stuck]\nadapter = "stuck.py"\nformat = "bf16"\n'
        f'options = {{ pid = "{pid}" }}\n'
    )
    command = [sys.executable, "-m", "kvik", *small("--config", str(config))]
    # These tests may run under nohup, and an ignored signal is inherited.
    before = signal.signal(number, signal.SIG_DFL)
    ctrl_c = signal.signal(
        signal.SIGINT, signal.SIG_IGN if in_background else signal.default_int_handler
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    signal.signal(number, before)
    signal.signal(signal.SIGINT, ctrl_c)
    with process:
        while not (pid.exists() and pid.read_text()) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"exit code 127" in shown  # earlier results are printed
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_errors_are_reported_before_any_run(
    runs: list[tuple[EngineEntry, Job, float]], command: Command
) -> None:
    for flags, message in (
        (["--rounds", "0"], "--rounds: must be at least 1, not 0"),
        (["--timeout", "nan"], "--timeout: must be at least 1, not nan"),
        (["--threads", "0"], "--threads: must be at least 1, not 0"),
        (["--engines", "nobody"], "--engines: must be of kvik"),
        (["--format", "q5"], "--format: must be of fp32"),
        (["--workloads", "b0"], "--workloads: must be prefill, or b1"),
        (["--prompt-tokens", "1020"], "--prompt-tokens: and the output are 1032 tokens"),
        (["--config", "/nowhere.toml"], "--config: /nowhere.toml cannot be read"),
    ):
        assert command.refusal(*small(*flags)).startswith(message)
    assert not runs
