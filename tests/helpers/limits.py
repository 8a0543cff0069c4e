"""Limits of a full run: CPU budgets, and a reason for each skipped test.

Registered by `conftest.py` in the full and nightly tiers. Workers of xdist measure; the process
that collects their reports checks the limits and fails the session.

- A case without the mark `full` takes at most `CASE_SECONDS` of CPU time, including processes that
  it starts, so that the fast tier stays fast.
- A folder's cases take at most `SPARE` times the CPU seconds that `tests/limits.toml` states.
- A test is skipped only for a reason that `tests/limits.toml` lists.

Seconds are those of the machine on which the budgets were measured: each worker sometimes times a
fixed piece of work, and divides by how much slower it runs than there.
"""

from __future__ import annotations

import resource
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch

CASE_SECONDS = 20.0  # with all examples; the fast tier draws a fifth of them
SPARE = 2.0  # a shared machine is slower in other ways than those that `probe` measures
TABLE = Path(__file__).parents[1] / "limits.toml"
_CPU = "cpu_seconds"
PROBE_SECONDS = 0.0019  # of `probe` on a Xeon with AMX, two cores
CASES_A_PROBE = 25


def cpu_seconds() -> float:
    """Return the CPU time of this process and its ended children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def probe() -> float:
    """Return the CPU time of work that is typical of tests: bytecode and small torch operations."""
    began, total = time.process_time(), 0
    for i in range(20_000):
        total += i % 7
    x = torch.ones(16, 16)
    for _ in range(400):
        x = (x @ x).clamp(0, 1)
    return time.process_time() - began


class Limits:
    """The plugin: measures in workers, sums and checks in the reporting process."""

    def __init__(self, *, whole_run: bool) -> None:
        """`whole_run`: all tests run, so that the budgets of folders apply."""
        table = tomllib.loads(TABLE.read_text())
        self._folder_budget: dict[str, float] = table["folders"] if whole_run else {}
        self._skip_reasons: list[str] = table["skips"]
        self._began, self._cases, self._slowness = 0.0, 0, 1.0
        self._folder_seconds: Counter[str] = Counter()
        self._real_seconds: Counter[str] = Counter()
        self.faults: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._cases % CASES_A_PROBE == 0:
            self._slowness = max(1.0, min(probe() for _ in range(3)) / PROBE_SECONDS)
        self._cases += 1
        self._began = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "teardown":
            spent = (cpu_seconds() - self._began) / self._slowness
            report.user_properties.append((_CPU, spent))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._real_seconds[folder(report.nodeid)] += report.duration
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not any(allowed in reason for allowed in self._skip_reasons):
                self.faults.append(f"{report.nodeid}: skipped for a reason not listed: {reason}")
        seconds = dict(report.user_properties).get(_CPU)
        if report.when != "teardown" or seconds is None:
            return
        self._folder_seconds[folder(report.nodeid)] += seconds
        if seconds > CASE_SECONDS and not {"full", "nightly"} & set(report.keywords):
            self.faults.append(
                f"{report.nodeid}: {seconds:.1f} s of CPU; mark it `full` above {CASE_SECONDS:g} s"
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._folder_seconds:
            folders = self._folder_seconds.most_common()
            spent = ", ".join(f"{at} {s:.0f} ({self._real_seconds[at]:.0f})" for at, s in folders)
            terminalreporter.write_line(f"CPU (real) seconds by folder: {spent}")
        for fault in self.faults:
            terminalreporter.write_line(f"LIMIT {fault}", red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for at, seconds in self._folder_seconds.items():
            budget = self._folder_budget.get(at)
            if budget is not None and seconds > SPARE * budget:
                self.faults.append(
                    f"{at}: {seconds:.0f} s of CPU, over {SPARE:g} times the usual {budget:.0f}"
                )
        if self.faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def folder(nodeid: str) -> str:
    """Return the folder below `tests` of a case, or "tests" for files directly in it."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "tests"
