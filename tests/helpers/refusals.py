"""Commands that refuse what a user asks."""

from __future__ import annotations

import pytest

from kvik.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that a command prints, and nothing else, without what precedes all."""
    assert main([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("kvik: error: ")
    return captured.err.removeprefix("kvik: error: ").rstrip("\n")
