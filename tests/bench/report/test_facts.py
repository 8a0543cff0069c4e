"""What stands beside every figure."""

from __future__ import annotations

import subprocess
import sys

from kvik_bench.report.facts import peak_bytes, run_facts

MEASURE = "from kvik_bench.report.facts import peak_bytes; print(peak_bytes())"


def test_the_peak_does_not_begin_with_the_memory_of_the_parent() -> None:
    mib = 1 << 20
    ballast = b"x" * (400 * mib)
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(ballast) + 1 <= peak_bytes()
    assert 1 * mib < int(done.stdout) < 300 * mib


def test_a_run_can_be_told_from_another() -> None:
    facts = run_facts()
    assert {"date", "command", "kvik", "python", "torch", "machine"} <= facts.keys()
    assert all(facts.values())
