"""Answers while other processes occupy the cores, and while threads of the team are stopped."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers.optional_native import needs_native

pytestmark = [
    needs_native,
    pytest.mark.full,
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="stops threads as Linux does"),
]

ROUNDS = 12  # at rest; a stopped thread is tested in each of them
CONTENDED = 4  # with busy cores, where each round is slow
# A prompt, decoding in a batch, and sampling; arguments: threads or 0, and rounds.
ANSWERS = f"""
import sys
from kvik import LLM, SamplingParams
prompts = [[5 + (7 * i + j) % 300 for j in range(40 * i + 3)] for i in range(5)]
with LLM(threads=int(sys.argv[1]) or None, max_model_len=512, enable_prefix_caching=False) as llm:
    for turn in range(int(sys.argv[2])):
        seed = turn % {ROUNDS}
        params = SamplingParams(temperature=seed % 2, top_p=0.9, max_tokens=16, seed=seed)
        outputs = llm.generate(prompts, params, progress=False)
        print([list(output.outputs[0].token_ids) for output in outputs], flush=True)
"""


def answers(process: subprocess.Popen[str]) -> list[str]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out.splitlines()


def started(threads: int, rounds: int = ROUNDS) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ANSWERS, str(threads), str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    lines = answers(started(1))
    assert len(lines) == ROUNDS
    return lines


@contextmanager
def busy_process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            yield
        finally:
            other.kill()


@pytest.mark.parametrize("threads", [0, pytest.param(5, marks=pytest.mark.nightly)])
def test_answers_are_the_same_while_others_take_the_cores(
    threads: int, expected: list[str]
) -> None:
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            stack.enter_context(busy_process())
        assert answers(started(threads, CONTENDED)) == expected[:CONTENDED]


class Tracer:
    """Stops single threads of a child process, which only debuggers can do."""

    SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
    ALL_THREADS = 0x40000000  # __WALL

    def __init__(self) -> None:
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._ptrace.restype = ctypes.c_long

    def stop(self, thread: int, seconds: float) -> bool:
        """Stop a thread for some seconds; return False if it has ended."""
        if self._ptrace(self.SEIZE, thread, None, None) < 0:
            error = ctypes.get_errno()
            if error == 1:  # EPERM
                pytest.skip("this system lets no process trace another")
            return False
        self._ptrace(self.INTERRUPT, thread, None, None)
        os.waitpid(thread, self.ALL_THREADS)
        time.sleep(seconds)
        return self._ptrace(self.DETACH, thread, None, None) == 0


def team_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task")
    found = []
    for task in tasks.iterdir() if tasks.exists() else ():
        try:
            if (task / "comm").read_text() == "kvik-team\n":
                found.append(int(task.name))
        except OSError:
            continue
    return found


def test_a_thread_that_stands_still_delays_and_does_no_harm(expected: list[str]) -> None:
    tracer, draw, stops, turns = Tracer(), random.Random(0), 0, 0
    with started(3, 10**9) as process:
        try:
            while stops < 10:
                time.sleep(draw.random() * 0.02)
                if team := team_of(process.pid):
                    stops += tracer.stop(draw.choice(team), 0.2)
                for _ in range(draw.randrange(1, 8)):  # about as many as there were in the meantime
                    assert process.stdout.readline().strip() == expected[turns % ROUNDS]
                    turns += 1
        finally:
            process.kill()


@contextmanager
def cpu_group() -> Iterator[Path | None]:
    """Make a CPU cgroup (version 1 or 2), or yield None if this process may not."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    folder = (first if first.is_dir() else second) / f"kvik-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        folder.rmdir()


def set_quota(folder: Path, cores: float) -> None:
    if (folder / "cpu.cfs_quota_us").exists():
        (folder / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
    else:
        (folder / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")


@pytest.mark.nightly
def test_ten_minutes_of_random_busy_processes_and_quotas(expected: list[str]) -> None:
    draw, until, turns = random.Random(0), time.monotonic() + 600.0, 0
    with ExitStack() as stack:
        group = stack.enter_context(cpu_group())
        process = stack.enter_context(started(0, 10**9))
        stack.callback(process.kill)
        if group is not None:
            (group / "cgroup.procs").write_text(str(process.pid))
        while time.monotonic() < until:
            if group is not None:
                set_quota(group, draw.choice([0.3, 0.5, 1.0, 1.5, 2.0]))
            with ExitStack() as others:
                for _ in range(draw.randrange(4)):
                    others.enter_context(busy_process())
                for _ in range(draw.randrange(1, 8)):
                    assert process.stdout.readline().strip() == expected[turns % ROUNDS]
                    turns += 1
    assert turns > 100
