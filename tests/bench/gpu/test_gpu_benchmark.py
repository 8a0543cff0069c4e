"""The script that measures kvik on a GPU, as far as it runs without one: the selection of jobs,
isolation and naming of failed jobs, and the table."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
JOBS_FOR_TESTS = """
import logging, os, time

def good(notes, value):
    notes.fact("copy", float(value))
    notes.attempt("part", lambda: 1 / 0)
    notes.attempt("another part", lambda: notes.check("right", True, op="add"))
    notes.attempt("a long part", lambda: None, needs=1e9)

def broken(notes):
    try:
        [][1]
    except IndexError:
        logging.getLogger("x").warning("half of it", exc_info=True)
    raise ValueError("this one is broken")

def lost(notes):
    print("a word before the end")
    notes.fact("kept", 1)
    os._exit(139)

def deadly(notes):
    notes.attempt("first part", lambda: notes.fact("before", 1))
    notes.attempt("deadly part", lambda: os._exit(139))
    notes.attempt("last part", lambda: notes.fact("behind", 1))

def endless(notes):
    time.sleep(600)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`run`, with its sibling modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    own = {path.stem for path in FOLDER.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    yield importlib.import_module("run")
    for name in own:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def report() -> ModuleType:
    return importlib.import_module("report")


def test_sections_are_chosen(script: ModuleType) -> None:
    every = script.select(script.JOBS, None)
    assert every == list(script.JOBS)
    assert [job.section for job in every][:2] == ["facts", "engine"]
    some = script.select(script.JOBS, script.parse(["--only", "kernels"]).only)
    assert {job.section for job in some} == {"facts", "kernels"}  # ceilings are always measured
    with pytest.raises(SystemExit):
        script.parse(["--only", "nothing"])


def test_only_jobs_that_are_not_timed_run_in_parallel(script: ModuleType) -> None:
    """Timed jobs have the device to themselves."""
    together = [group for group in script.groups(script.JOBS) if len(group) > 1]
    assert {job.module for group in together for job in group} == {
        "correctness",
        "invariance",
        "warm",
    }
    assert len({job.name for job in script.JOBS}) == len(script.JOBS)


def test_the_jobs_of_all_bars_fit_into_one_call(script: ModuleType) -> None:
    """If every job takes its limit; all further jobs fit if each takes less."""
    jobs = importlib.import_module("jobs")
    assert (*jobs.BARS, *jobs.BEYOND) == script.JOBS
    most = sum(max(job.seconds for job in group) + jobs.GRACE for group in jobs.groups(jobs.BARS))
    assert most <= jobs.TOTAL - 40 < 600 - 40
    assert all(job.needs <= job.seconds for job in script.JOBS)
    # Every bar is noted by these jobs, by section and job.
    of = {(job.section, job.name) for job in jobs.BARS}
    assert of >= {
        *(("engine", "8b bf16"), ("engine", "8b int4"), ("peers", "transformers in batches")),
        *(("kernels", "attention kernels"), ("start", "first answer"), ("memory", "soak")),
        *(("correctness", "cases 0"), ("correctness", "tokens"), ("facts", "ceilings")),
    }


def test_warm_ups_run_before_what_they_are_for_and_checks_after_it(script: ModuleType) -> None:
    jobs = importlib.import_module("jobs")
    modules = [group[0].module for group in script.groups(jobs.BARS)]
    assert modules[:2] == ["ceilings", "warm"] and modules[-1] == "correctness"
    checks = [job for job in jobs.BARS if job.section == "correctness"]
    assert len(checks) <= 16 - 1  # cores; one job runs its tests in three processes, one is short


def test_all_checks_fit_into_a_call_of_their_own(script: ModuleType) -> None:
    """As in docs/performance-gpu.md."""
    text = (FOLDER.parents[1] / "docs" / "performance-gpu.md").read_text("utf-8")
    (asked,) = re.findall(r"`--only (correctness --stretch \S+)`", text)
    args = script.parse(["--only", *asked.split()])
    facts, *checks = script.select(script.JOBS, args.only)
    (seconds,) = {args.stretch * job.seconds for job in checks}
    assert seconds >= 240 and facts.seconds + seconds < args.seconds


def test_processes_share_all_cases(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the same kind of attention, which share kernels, are checked by one process."""
    correctness, jobs = (importlib.import_module(name) for name in ("correctness", "jobs"))
    monkeypatch.setattr(correctness, "triton_ops", lambda device: None)

    def names(function: str, part: int, parts: int) -> list[str]:
        found: list[str] = []
        notes = SimpleNamespace(attempt=lambda name, call: found.append(name))
        getattr(correctness, function)(notes, str(part), str(parts))
        return found

    for function, parts in (("cases", jobs.CASE_PARTS), ("attention", jobs.ATTENTION_PARTS)):
        found = [names(function, part, parts) for part in range(parts)]
        assert sorted(chain.from_iterable(found)) == sorted(names(function, 0, 1))
        assert max(map(len, found)) < 1.3 * min(map(len, found))
    steps = "|".join(correctness.STEPS)
    kinds = [{re.sub(f"^({steps}) ", "", name) for name in part} for part in found]
    assert sum(map(len, kinds)) == len(set().union(*kinds)) < sum(map(len, found))


def test_every_shape_and_format_at_every_batch_and_context(script: ModuleType) -> None:
    models, shapes = importlib.import_module("models"), importlib.import_module("shapes")
    batches, contexts = (1, 8, 64, 256), (1024, 8192, 32768)
    assert sorted(models.CELLS) == sorted(product(batches, contexts))
    engines = [job.arguments for job in script.JOBS if job.module == "models"]
    assert sorted(engines) == sorted(product(shapes.SHAPES, models.QUANTIZATION))
    for batch, context in models.CELLS:  # as requested by `decode`
        tokens = 2 * (batch * context // models.BUDGET + 2) + models.MARGIN
        assert context + tokens <= models.LONGEST


def test_a_soak_of_ten_minutes_can_be_requested(script: ModuleType) -> None:
    """As in docs/performance-gpu.md, with 20 seconds for start and end."""
    text = (FOLDER.parents[1] / "docs" / "performance-gpu.md").read_text("utf-8")
    (asked,) = re.findall(r"`--only (memory --stretch 15 --seconds \d+)`", text)
    args = script.parse(["--only", *asked.split()])
    facts, job = script.select(script.JOBS, args.only)
    soak = importlib.import_module("soak")
    assert soak.SECONDS == 600
    assert args.stretch * job.seconds >= soak.CAPTURING + soak.SECONDS + 20
    assert args.seconds >= facts.seconds + args.stretch * job.seconds


def test_a_job_is_not_started_without_enough_time(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later, shorter one is."""
    (tmp_path / "some_jobs.py").write_text(JOBS_FOR_TESTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    jobs = [
        script.Job("long", "engine", "some_jobs", "good", 90, ("1",), needs=60),
        script.Job("short", "engine", "some_jobs", "good", 90, ("1",)),
    ]
    script.main(["--out", str(tmp_path), "--seconds", "40"], jobs)
    records = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert [r["why"] for r in records if r["job"] == "long"] == ["no time left"]
    assert any(r["job"] == "short" and r["kind"] == "fact" for r in records)


def test_every_job_names_an_existing_function(script: ModuleType) -> None:
    for job in script.JOBS:
        source = (FOLDER / f"{job.module}.py").read_text("utf-8")
        assert f"\ndef {job.function}(notes: Notes" in source


@pytest.mark.full
def test_tests_of_kernels_need_no_packages_of_the_server() -> None:
    """The machine of the GPU may lack them."""
    pytest.importorskip("triton")
    packages = ("httptools", "msgspec", "starlette", "uvicorn")
    arguments = ["-q", "-p", "no:cacheprovider", "tests/kernels/triton/test_launch.py"]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({packages}))"
    code = f"{blocked}; import pytest; sys.exit(pytest.main({arguments}))"
    command = [sys.executable, "-c", code]
    root = FOLDER.parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.full
def test_a_failing_job_does_not_stop_others(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "some_jobs.py").write_text(JOBS_FOR_TESTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(script, "GRACE", 0.2)
    monkeypatch.setattr(report(), "LISTED", 9)
    jobs = [
        script.Job("broken", "engine", "some_jobs", "broken", 30),
        script.Job("lost", "engine", "some_jobs", "lost", 30, together="all"),
        script.Job("endless", "engine", "some_jobs", "endless", 1, together="all"),
        script.Job("deadly", "engine", "some_jobs", "deadly", 30, together="all"),
        script.Job("no such", "engine", "no_such_module", "run", 30, together="all"),
        script.Job("good", "facts", "some_jobs", "good", 30, ("4e12",)),
    ]
    assert script.main(["--out", str(tmp_path / "out")], jobs) == 0
    printed = capsys.readouterr().out
    for expected in (
        "FAILED broken: broken: ValueError: this one is broken",
        "FAILED broken: logged: half of it: IndexError",
        "FAILED lost: lost: RuntimeError: ended with 139 a word before the end",
        "FAILED deadly: deadly: RuntimeError: ended with 139 in or behind 'deadly part'",
        "FAILED endless: endless: RuntimeError: stopped",
        "FAILED no such: no such: ModuleNotFoundError",
        "FAILED good: part: ZeroDivisionError",
        "LEFT OUT (1), no time left: a long part",
        "correct: add 1/1",
        "copy 4.00 TB/s",
    ):
        assert expected in printed
    records = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    names = [record["name"] for record in records]
    assert {"kept", "right"} <= set(names)
    # It restarted after the part that killed it, and repeated nothing.
    assert names.count("before") == names.count("behind") == 1
    log = (tmp_path / "out" / "log.txt").read_text("utf-8")
    assert "a word before the end" in log
    # Errors in full, with the command to reproduce them.
    assert 'notes.attempt("part", lambda: 1 / 0)' in log
    assert "job.py good some_jobs good /dev/stdout 30 4e12 --part part\n" in log


def test_a_single_part(script: ModuleType, tmp_path: Path) -> None:
    notes = importlib.import_module("notes")
    done: list[str] = []
    chosen = notes.Notes(tmp_path / "notes", "job", 9.0, only="b")
    for name in "abc":
        chosen.attempt(name, lambda name=name: done.append(name))
    assert done == ["b"]


def test_jobs_without_time_are_named(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["--seconds", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"LEFT OUT ({len(script.JOBS)}), no time left: ceilings" in printed
    assert printed.count("not measured") == len(report().BARS)


def rate(name: str, seconds: float, ceiling: str, job: str = "x", **more: object) -> dict:
    done = {"moved": 0.0, "operations": 0.0, **more}
    line = {"kind": "rate", "name": name, "job": job, "seconds": seconds, "ceiling": ceiling}
    return {**line, **done}


def fact(name: str, value: object, **more: object) -> dict:
    return {"kind": "fact", "name": name, "job": "x", "value": value, **more}


def test_shares_and_bars(script: ModuleType) -> None:
    model = {"shape": "8b", "format": "bf16", "section": "engine"}
    records = [
        fact("read", 4e12),
        fact("bf16", 800e12),
        rate("decode 1 x 1k", 0.005, "read", moved=18e9, **model),
        rate("decode 64 x 1k", 0.01, "read", moved=18e9, captured=False, **model),
        rate("prefill 8k", 0.5, "bf16", operations=100e12, **model),
        rate("prefill 8k, torch's attention", 0.4, "bf16", operations=100e12, **model),
        fact("busy 64", 0.985, **model),
        fact("busy 32", 0.955, **model),
        fact("load", 12000.0, **model),
        fact("transformers load", 3000.0),
    ]
    text = report().render(records, 12.3)
    bars = {line[:46].strip(): line[46:].split() for line in text.splitlines() if "%" in line}
    assert bars["decode 8B bf16, batch 1, 1k: of bandwidth"] == ["85%", "90%", "met"]
    assert bars["prefill 8B bf16, 8k: of the GEMM rate"] == ["65%", "31%", "MISSED"]
    assert bars["decode 8B int4, batch 1, 1k: of bandwidth"] == ["70%", "not", "measured"]
    assert bars["GPU busy at batch 64, 8B bf16"] == ["97.0%", "98.5%", "met"]
    assert bars["GPU busy at batch 32, 8B bf16"] == ["97.0%", "95.5%", "MISSED"]
    assert "3.00 x   4.00 x  met" in text


def test_the_times_of_a_server(script: ModuleType) -> None:
    times = {"ttft p50": 0.05, "ttft p99": 0.08, "token p50": 0.006}
    records = [fact(f"{name} at 5/s", value) for name, value in times.items()]
    text = report().render([*records, fact("tokens at 5/s", 640.2)], 1.0)
    assert "5/s: first 50.0 / 80.0 ms, next 6.0 / ? ms, 640 tok/s" in text


def test_the_table_of_all_jobs_is_short(script: ModuleType) -> None:
    """Some readers only see the end of an output."""
    records = [fact("read", 4e12), fact("bf16", 8e14), fact("fp8", 1e15), fact("int8", 1e15)]
    kernels = {"section": "kernels", "moved": 1e9}
    for format in ("bf16", "int4", *(f"fp8, {i}" for i in range(4)), "int8", "int8, tokens too"):
        for tokens in (1, 8, 64, 512, 8192):
            records.append(rate(f"layer {format}, {tokens} tokens", 1e-3, "read", **kernels))
    for job, count in (("attention kernels", 16), ("other kernels", 23)):
        records += [
            rate(f"kernel {i} of a name", 1e-3, "read", job, **kernels) for i in range(count)
        ]
    for shape in ("8b", "1b", "0.5b"):
        for format in ("bf16", "int4", "fp8"):
            about = {"shape": shape, "format": format, "section": "engine", "moved": 1e9}
            records += [rate(f"decode {i} x 1k", 1e-2, "read", **about) for i in range(15)]
    for i in range(99):
        failure = {"kind": "failure", "name": f"part {i}", "job": "x", "error": ["word " * 80] * 8}
        check = {"kind": "check", "name": f"{i}", "passed": False, "detail": "far " * 99}
        records += [failure, {**check, "job": "x", "op": f"op{i % 16}"}]
        records.append({"kind": "missed", "name": f"cell {i}", "job": "x", "why": f"no {i % 2}"})
    lines = report().render(records, 500).splitlines()
    assert len(lines) <= 80 and sum(map(len, lines)) < 10_000
    assert lines[0].startswith("?:") and lines[-1].startswith("500 s")


def test_the_time_in_which_kernels_run(script: ModuleType) -> None:
    spans = [(0.0, 4.0), (1.0, 3.0), (5.0, 9.0), (8.0, 10.0)]
    assert importlib.import_module("models").busy_share(spans) == (0.9, 1.0)
