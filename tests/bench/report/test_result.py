"""A result keeps every value, and survives a round trip through its file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.bench_results import read_result, sample_result

from kvik_bench.report.result import peak_bytes, run_facts


def test_json_round_trip() -> None:
    result = sample_result()
    assert read_result(result.to_json()) == result


def test_medians_are_in_the_file() -> None:
    figure = json.loads(sample_result().to_json())["rows"][1]["figures"][1]
    assert figure["name"] == "TTFT p50"
    assert figure["values"] == pytest.approx([81, 89.1, 72.9])
    assert (figure["median"], figure["low"], figure["high"]) == pytest.approx((81, 72.9, 89.1))


def test_names_come_once_in_order() -> None:
    assert list(sample_result().names()) == ["batch", "TTFT p50", "output"]


# Facts stored with every figure.


MEASURE = "from kvik_bench.report.result import peak_bytes; print(peak_bytes())"


def test_the_peak_excludes_the_memory_of_the_parent() -> None:
    mib = 1 << 20
    ballast = b"x" * (400 * mib)
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(ballast) + 1 <= peak_bytes()
    assert 1 * mib < int(done.stdout) < 300 * mib


def test_a_result_records_the_facts_of_its_run() -> None:
    facts = run_facts()
    assert {"date", "command", "kvik", "python", "torch", "machine"} <= facts.keys()
    assert all(facts.values())
