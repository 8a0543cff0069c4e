"""Every example runs unchanged, and stays short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ALL = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
# Servers do not end by themselves: tests/server/test_asgi.py runs one, tests/test_ray.py another.
EXAMPLES = [path for path in ALL if path.stem not in ("async_server", "ray_serve")]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


def test_examples_are_short() -> None:
    assert all(len(path.read_text().splitlines()) < 40 for path in ALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
