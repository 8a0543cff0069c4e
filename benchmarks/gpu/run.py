"""Check kvik on a GPU, time it against the GPU's limits in one call, and print a short table.

    python benchmarks/gpu/run.py [--only SECTION ...] [--seconds 540] [--stretch 1] [--out FOLDER]
                                 [--rehearse]

Sections: facts (the machine and its ceilings), correctness, kernels, engine (decode and prefill of
whole models with random weights), peers (transformers), start (until the first answer), memory (a
soak), invariance (tokens do not depend on how they are made), server (latency under load). Each
consists of a few jobs, each with its own process and time budget: first the jobs for the bars,
which fit into one call, then the others as far as time allows (jobs.py explains the estimate). A
job that fails or is stopped is listed, and the others continue. A job that loses the device
restarts after the part that lost it. Jobs without enough time are listed too: call again with
--only. Ceilings are measured in every call, because the results are shares of them. FOLDER gets
results.json, and log.txt with every error in full and the command that runs only the failed part.
--rehearse: every job on the CPU, in Triton's interpreter, at meaningless tiny sizes.

Needs torch for CUDA, triton (with a C compiler), numpy and tokenizers, and kvik from this checkout
without its native kernels. The peers need transformers, the kernels' own tests pytest, the matrix
pytest and msgspec (llguidance for structured texts), the server its packages and aiohttp; without
them they are left out. Only the bundled model is read: other weights are generated on the device.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from job import LOST
from jobs import GRACE, JOBS, LEAST, SECTIONS, TOTAL, Job, groups
from notes import Notes, Record, begun, read_notes
from report import render

HERE = Path(__file__).resolve().parent
SOURCES, TESTS = (HERE.parents[1] / name for name in ("src", "tests"))
REHEARSAL = {"KVIK_GPU_REHEARSAL": "1", "TRITON_INTERPRET": "1"}  # see place.py
LAST_LINES = 4  # last output lines of a lost job that are noted


def main(argv: Sequence[str] | None = None, jobs: Sequence[Job] = JOBS) -> int:
    args = parse(argv)
    started = time.monotonic()
    stretched = [replace(job, seconds=args.stretch * job.seconds) for job in jobs]
    chosen = select(stretched, args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder, (args.out / "log.txt").open("w") as log:
        for group in groups(chosen):
            used = time.monotonic() - started
            print(f"{used:5.0f} s  {', '.join(job.name for job in group)}", flush=True)
            variables = REHEARSAL if args.rehearse else {}
            records += run_group(group, Path(folder), args.seconds - used, log, variables)
            (args.out / "results.json").write_text(json.dumps(records, indent=1), "utf-8")
    print(render(records, time.monotonic() - started))
    if args.rehearse:
        print("a rehearsal: none of these figures means anything")
    return 0


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="sections; default: all")
    parser.add_argument("--seconds", type=float, default=TOTAL, help="for everything")
    parser.add_argument("--stretch", type=float, default=1, help="factor of the budgets of jobs")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for results")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    return parser.parse_args(argv)


def select(jobs: Sequence[Job], only: Sequence[str] | None) -> list[Job]:
    return [job for job in jobs if only is None or job.always or job.section in only]


def run_group(
    jobs: Sequence[Job], folder: Path, left: float, log: TextIO, variables: Mapping[str, str]
) -> list[Record]:
    """Run jobs at the same time, within what is left of the whole time.

    Args:
        variables: environment variables of the jobs.
    """
    files = [folder / f"{job.name.replace(' ', '-').replace(',', '')}.jsonl" for job in jobs]
    if left < min(job.needs for job in jobs) + GRACE:
        for job, file in zip(jobs, files, strict=True):
            Notes(file, job.name, 0).missed(job.name, "no time left")
    else:
        children = [_start(*pair, left, variables) for pair in zip(jobs, files, strict=True)]
        for job, file, child in zip(jobs, files, children, strict=True):
            _finish(job, file, child, log, variables)
    sections = {job.name: job.section for job in jobs}
    records = [r for file in files for r in read_notes(file) if r["kind"] != "begun"]
    return [{**record, "section": sections[str(record["job"])]} for record in records]


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    output: Path
    ends: float


def _start(job: Job, file: Path, left: float, variables: Mapping[str, str]) -> _Child:
    seconds = min(job.seconds, left - GRACE)
    output = file.with_suffix(".txt")
    paths = [str(HERE), str(SOURCES), os.environ.get("PYTHONPATH", ""), str(TESTS)]
    search = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    threads = {"OMP_NUM_THREADS": "1"} if job.together else {}  # there is a process for each core
    environment = {**os.environ, **search, **threads, **variables}
    command = [sys.executable, str(HERE / "job.py"), job.name, job.module, job.function]
    command += [str(file), str(seconds), *job.arguments]
    with output.open("ab") as stream:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its child processes can be stopped too
        )
    return _Child(process, output, time.monotonic() + seconds + GRACE)


def _finish(job: Job, file: Path, child: _Child, log: TextIO, variables: Mapping[str, str]) -> None:
    """Wait for a job, or stop it, and note an end that it could not note itself. A job that lost
    the device or its process is restarted, as long as each try gets further."""
    known = 0
    while True:
        code = _wait(child)
        if code is None:
            _note_end(job, file, child, "stopped: it took longer than its budget")
        elif code not in (0, 1, LOST):
            _note_end(job, file, child, f"ended with {code}")
        parts, left = len(begun(file)), child.ends - GRACE - time.monotonic()
        if code in (None, 0, 1) or parts == known or left < LEAST:
            break
        known = parts
        child = _start(job, file, left + GRACE, variables)
    log.write(f"== {job.name}\n{child.output.read_text('utf-8', errors='replace')}\n")
    log.flush()


def _wait(child: _Child) -> int | None:
    """Return its exit status; None: it was stopped."""
    try:
        return child.process.wait(max(0.0, child.ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
        return None


def _note_end(job: Job, file: Path, child: _Child, why: str) -> None:
    """Note in which part a job ended, as far as is known, and its last output."""
    text = child.output.read_text("utf-8", errors="replace")
    last = " / ".join(text.strip().splitlines()[-LAST_LINES:])
    parts = begun(file)
    where = f" in or behind {parts[-1]!r}:" if parts else ""
    error = RuntimeError(f"{why}{where} {last[-400:]}")
    with contextlib.redirect_stdout(io.StringIO()):  # the job has printed its errors itself
        Notes(file, job.name, 0).failed(job.name, error)


if __name__ == "__main__":
    sys.exit(main())
