"""Runs an adapter once, in a separate process with a time limit; failures are results too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

import msgspec

from kvik.interrupts import deferred_interrupt
from kvik_bench.peers.engine_entries import FOLDER, EngineEntry
from kvik_bench.peers.engines.protocol import Answer, Job

RUNNER = FOLDER / "run.py"
GRACE = 5.0  # seconds from the end of the time limit until all is killed
TAIL = 4096  # last bytes of an engine's output that are searched for a reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer; `answer.failed` is the reason if there is none."""

    answer: Answer
    # Peak memory of the largest process of the run; on Linux at least the memory of this process
    # when it started the other.
    peak_bytes: int


def run_adapter(entry: EngineEntry, job: Job, timeout: float) -> Outcome:
    """Run one adapter; it and all its children are killed after `timeout` seconds."""
    with tempfile.TemporaryDirectory(prefix="kvik-compare-") as name:
        folder = Path(name)
        job_file, answer_file = folder / "job.json", folder / "answer.json"
        log_file = folder / "output.txt"
        job_file.write_text(json.dumps(asdict(job)), "utf-8")
        # Some engines only read this variable, so it is set for all.
        variables = {"OMP_NUM_THREADS": str(job.threads), **entry.env}
        command = ["env", *(f"{key}={value}" for key, value in variables.items())]
        command += [entry.python, str(RUNNER), str(entry.script), str(job_file), str(answer_file)]
        with log_file.open("wb") as log:
            code, peak, timed_out = _run(command, log.fileno(), timeout)
        if timed_out:
            answer = Answer(failed=f"took longer than {timeout:g} s")
        elif answer_file.exists():
            answer = _read(answer_file, job)
        else:
            answer = Answer(failed=_why(code, log_file))
    if answer.failed:
        answer = Answer(failed=f"{answer.failed} (peak memory {peak >> 20:,} MiB)")
    return Outcome(answer, peak)


def _run(command: Sequence[str], log: int, timeout: float) -> tuple[int, int, bool]:
    """Return exit code (negative: a signal), peak bytes, and whether it was timed out."""
    process: subprocess.Popen[bytes] | None = None
    timeout_event = threading.Event()

    def end() -> None:
        timeout_event.set()
        if process is not None:
            # Popen.terminate could reap the process, whose peak memory wait4 would then miss.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    def kill() -> None:
        if process is not None:
            _kill_group(process.pid)

    limits = threading.Timer(timeout, end), threading.Timer(timeout + GRACE, kill)
    try:
        with deferred_interrupt():  # else an interrupt could leave an unknown process behind
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        for limit in limits:
            limit.start()
        # Unlike Popen.wait, this reports peak memory, of the largest process in the tree.
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:  # Ctrl-C, most likely
        if process is not None:
            _kill_group(process.pid)
            process.wait()
        raise
    finally:
        for limit in limits:
            limit.cancel()
    _kill_group(process.pid)  # its remaining children
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return process.returncode, usage.ru_maxrss * unit, timeout_event.is_set()


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(group, signal.SIGKILL)


def _read(file: Path, job: Job) -> Answer:
    try:
        answer = msgspec.json.decode(file.read_bytes(), type=Answer)
    except msgspec.MsgspecError as error:
        return Answer(failed=f"its answer cannot be read ({error})")
    if answer.failed:
        return answer
    for work in job.workloads:
        rates = answer.rates.get(work.name, [])
        if len(rates) != len(work.batches) or not all(isfinite(r) and r > 0 for r in rates):
            return Answer(failed=f"its answer has rates {rates} for {work.name}")
        rows = answer.tokens.get(work.name)
        if rows is not None and [len(row) for row in rows] != [work.output] * work.batch:
            return Answer(failed=f"its answer lacks tokens of {work.name}")
    return answer


def _why(code: int, log: Path) -> str:
    """Return the reason of a process that ended without an answer."""
    if code < 0:
        cause = ": out of memory?" if code == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-code).name}{cause}"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode("utf-8", "replace").split("\n")
    words = [" ".join(line.split()) for line in lines if line.strip()]
    return f"ended without an answer (exit code {code}{': ' + words[-1] if words else ''})"
