"""Runs of adapters that answer, crash, hang, report nonsense or use much memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvik_bench.peers.adapter_process import run_adapter
from kvik_bench.peers.engine_entries import EngineEntry
from kvik_bench.peers.engines.protocol import Job, Workload

GOOD = """
from .protocol import Answer

def run(job):
    work = job.workloads[0]
    rates = [100.0 * n for n, _ in enumerate(work.batches, 1)]
    tokens = [[1] * work.output] * work.batch
    return Answer("good 1.0", 0.25, {work.name: rates}, {work.name: tokens})
"""


@pytest.fixture
def job() -> Job:
    return Job(
        model="/models/story",
        threads=3,
        started=time.time(),
        workloads=[Workload("b2", 4, [[1, 2]] * 2, [[[1, 2]] * 2, [[3, 4]] * 2])],
        options={"wish": 7},
    )


def entry(folder: Path, text: str, env: dict[str, str] | None = None) -> EngineEntry:
    script = folder / "adapter.py"
    script.write_text(text)
    return EngineEntry(adapter=str(script), format="bf16", env=env or {})


def reason(folder: Path, text: str, job: Job, timeout: float = 60.0) -> str:
    return run_adapter(entry(folder, text), job, timeout).answer.failed


def test_an_answer_is_returned_unchanged(tmp_path: Path, job: Job) -> None:
    found = run_adapter(entry(tmp_path, GOOD), job, 60.0)
    assert found.answer.rates == {"b2": [100.0, 200.0]}
    assert found.answer.tokens == {"b2": [[1] * 4] * 2}
    assert (found.answer.engine, found.answer.start) == ("good 1.0", 0.25)
    assert not found.answer.failed
    assert found.peak_bytes > 1 << 20


def test_the_adapter_gets_the_whole_job(tmp_path: Path, job: Job) -> None:
    text = (
        "import os, sys\n"
        "def run(job):\n"
        "    work = job.workloads[0]\n"
        "    raise ValueError(job.model, job.threads, job.options, work.batches,\n"
        "        os.environ['OMP_NUM_THREADS'], os.environ['NAME'])"
    )
    found = run_adapter(entry(tmp_path, text, env={"NAME": "a b"}), job, 60.0)
    expected = ("/models/story", 3, {"wish": 7}, job.workloads[0].batches, "3", "a b")
    assert found.answer.failed.startswith(f"ValueError: {expected}")


def test_adapters_do_not_shadow_the_engines_they_import(tmp_path: Path, job: Job) -> None:
    text = "def run(job):\n    import kvik, protocol"
    assert "No module named 'protocol'" in reason(tmp_path, text, job)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_engine", "ModuleNotFoundError: No module named 'no_such_engine'"),
        ("def run(job):\n    raise MemoryError('no room\\nat all')", "MemoryError: no room at all"),
        (
            "from .protocol import EngineFailure as No\ndef run(job):\n    raise No('too old')",
            "too old",
        ),
        ("raise SystemExit('gave up')", "ended without an answer (exit code 1: gave up)"),
        ("import os; os._exit(0)", "ended without an answer (exit code 0)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        ("import sys; open(sys.argv[3], 'w').write('{]'); sys.exit()", "its answer cannot be read"),
        (
            'import sys; open(sys.argv[3], "w").write(\'{"start": "soon"}\'); sys.exit()',
            "`$.start`",
        ),
        (GOOD.replace("[100.0 * n", "[0.0 * n"), "its answer has rates [0.0, 0.0] for b2"),
        (GOOD.replace("(work.batches, 1)", "(work.batches[1:], 1)"), "rates [100.0] for b2"),
        (GOOD.replace("[[1] * work.output]", "[[1]]"), "its answer lacks tokens of b2"),
    ],
)
def test_a_failure_is_one_line_with_the_reason(
    tmp_path: Path, job: Job, text: str, said: str
) -> None:
    found = reason(tmp_path, text, job)
    assert said in found
    assert "\n" not in found
    assert "peak memory" in found


def test_noise_of_an_engine_does_not_matter(tmp_path: Path, job: Job) -> None:
    noise = "import os\nos.write(1, bytes(range(256)) * 1000)\nos.write(2, b'{\"ready\": 1}')\n"
    assert not reason(tmp_path, noise + GOOD, job)


def test_a_python_that_is_missing_is_named(tmp_path: Path, job: Job) -> None:
    wrong = EngineEntry(adapter="vllm", format="bf16", python=str(tmp_path / "nowhere"))
    answer = run_adapter(wrong, job, 60.0).answer
    assert "exit code 127" in answer.failed
    assert "nowhere" in answer.failed


@pytest.mark.full
def test_the_time_limit_kills_the_engine_and_its_children(tmp_path: Path, job: Job) -> None:
    child = tmp_path / "child"
    text = (
        "import pathlib, subprocess, sys, time\n"
        "code = 'import time; time.sleep(600)'\n"
        "def run(job):\n"
        "    child = subprocess.Popen([sys.executable, '-c', code])\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "    time.sleep(600)"
    )
    for limit in (2.0, 8.0, 32.0):  # on a busy machine, the first ends before there is a child
        assert reason(tmp_path, text, job, limit).startswith(f"took longer than {limit:g} s")
        if child.exists():
            break
    _wait_for_the_end(int(child.read_text()))


def test_children_do_not_outlive_an_engine_that_answered(tmp_path: Path, job: Job) -> None:
    child = tmp_path / "child"
    text = GOOD.replace(
        "def run(job):",
        "def run(job):\n"
        "    import pathlib, subprocess, sys\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(child.pid))",
    )
    assert not reason(tmp_path, text, job)
    _wait_for_the_end(int(child.read_text()))


def _wait_for_the_end(process: int) -> None:
    """Killed processes may stay as zombies in a container whose first process reaps none."""
    for _ in range(100):
        shown = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False
        ).stdout.strip()
        if not shown or shown.startswith("Z"):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {process} still runs: {shown}")


PEAK = """
import sys, time
from pathlib import Path
sys.path.insert(0, {source!r})
from kvik_bench.peers.adapter_process import run_adapter
from kvik_bench.peers.engine_entries import EngineEntry
from kvik_bench.peers.engines.protocol import Job
for megabytes in (0, 200):
    script = Path({folder!r}) / f"hog{{megabytes}}.py"
    script.write_text(f"def run(job):\\n    held = b'x' * ({{megabytes}} << 20)\\n    1 / 0")
    entry = EngineEntry(adapter=str(script), format="bf16")
    print(run_adapter(entry, Job("", 1, 0.0, [], {{}}), 60.0).peak_bytes)
begun, script = Path({folder!r}) / "begun", Path({folder!r}) / "late.py"
code = f"held = b'x' * (200 << 20); open({{str(begun)!r}}, 'w'); import time; time.sleep(600)"
script.write_text(
    "import subprocess, sys\\ndef run(job):\\n"
    f"    subprocess.run([sys.executable, '-c', {{code!r}}])"
)
entry = EngineEntry(adapter=str(script), format="bf16")
for limit in (2.0, 8.0, 32.0):  # on a busy machine, the first ends before it has the memory
    found = run_adapter(entry, Job("", 1, 0.0, [], {{}}), limit)
    if begun.exists():
        break
print(found.peak_bytes)
"""


@pytest.mark.full
def test_the_peak_of_an_engine_that_failed_is_known(tmp_path: Path) -> None:
    """Also of a program that an adapter runs, at its time limit."""
    # In a separate process: a child's figure starts at the memory of its parent.
    source = str(Path(__file__).parents[3] / "src")
    script = PEAK.format(source=source, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    small, large, late = map(int, done.stdout.split())
    assert small < 100 << 20 and late > 195 << 20
    assert 195 << 20 < large - small < 205 << 20
