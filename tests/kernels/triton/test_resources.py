"""What the kernels take of a GPU: compiled for sm_90, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

ROOT = Path(__file__).parents[3]


def python(*arguments: str) -> tuple[int, str]:
    """In a process of its own, as triton is here to interpret; what was compiled once is kept."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build/triton")
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(900)  # minutes where nothing is compiled yet and others compute too
def test_no_kernel_takes_more_than_it_may() -> None:
    status, text = python("-m", "kvik.kernels.triton.resources")
    assert status == 0, text
    assert text.count(" registers ") == len(text.splitlines()) > 50


TIGHT = """
from dataclasses import replace
from kvik.kernels.triton.norm import RESOURCES
from kvik.kernels.triton.resources import taken
wide = RESOURCES[2]  # rows of 16384, in registers
print(taken(replace(wide, max_registers=16)))
print(taken(replace(wide, most_registers=32)))
print(taken(replace(wide, max_shared=8)))
"""


def test_what_a_kernel_takes_too_much_is_named() -> None:
    """Registers, what is spilled where it gets fewer than it needs, and shared memory."""
    status, text = python("-c", TIGHT)
    assert status == 0, text
    registers, spilled, shared = text.splitlines()
    assert "TOO MUCH" in registers and "registers > 16" in registers
    assert "spilled bytes > 0" in spilled
    assert "bytes of shared memory > 8" in shared
