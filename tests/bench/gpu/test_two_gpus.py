"""The script for machines with two GPUs, without any: over gloo, with torch's kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.optional_native import needs_native

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "two_gpus.py"


@needs_native
@pytest.mark.nightly
def test_two_processes_of_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--rounds", "1"]
    command += ["--only", "exchange", "parity", "loss", "--json", str(tmp_path / "found")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_bytes())
    assert found["wrong"] == [] and set(found["parity"]) == {"stages", "exact", "fast"}
    assert len(found["exchange"]) == 6 and found["loss"]["seconds"] < 30
