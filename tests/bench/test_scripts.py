"""The scripts of `benchmarks/` run: each measures something small with the bundled model."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.optional_native import needs_native

FOLDER = Path(__file__).parents[2] / "benchmarks"
STEPS = "step_overhead.py --contexts 64 --steps 90 --num-seqs 4"
ONCE = "--batches 1 --rounds 1"

pytestmark = [needs_native, pytest.mark.full, pytest.mark.usefixtures("forked")]


@pytest.mark.parametrize(
    "command",
    [
        "async_engine.py --streams 2 --tokens 8 --rounds 1",
        "cpu/roofline.py --quick --threads 1 --kernel 512x2048",
        "cpu/sampling.py --vocab 1000 --threads 1",
        "drafters.py --contexts 100 --rows 2",
        "shared_prefix.py --prefix 64 --requests 2 --rounds 1",
        f"speculation_lookup.py {ONCE} --methods ngram --kinds edit",
        "speculation_workloads.py --workloads 'short answers' --rounds 1 --methods ngram",
        STEPS,
        f"{STEPS} --drafts 2",
        f"{STEPS} --drafts 2 --method draft_model",
    ],
)
def test_a_benchmark_runs(command: str, tmp_path: Path) -> None:
    script, *words = shlex.split(command)
    run = subprocess.run(
        [sys.executable, str(FOLDER / script), *words],
        check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
