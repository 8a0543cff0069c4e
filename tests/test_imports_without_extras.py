"""An engine needs no package of the server, of recordings or of GPUs: a machine may lack them."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABSENT = ("msgspec", "starlette", "httptools", "uvicorn", "safetensors", "transformers", "triton")
CODE = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # importing it raises
import kvik.llm, kvik.launch, kvik.worker.worker
"""


@pytest.mark.full
def test_an_engine_is_imported_without_them() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
