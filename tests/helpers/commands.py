"""The command line in this process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from kvik.cli.main import main


class Printed(NamedTuple):
    """What a command wrote to its standard output and error."""

    out: str
    err: str


class Command:
    """Runs `kvik`, and returns what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> Printed:
        self._capsys.readouterr()
        try:
            ended = main([*words])
        except SystemExit as stop:  # after --help
            ended = int(str(stop.code))
        printed = Printed(*self._capsys.readouterr())
        assert ended == code, printed.err
        return printed

    def json(self, *words: str) -> Any:
        """Return the JSON that it prints with --json."""
        return json.loads(self(*words, "--json").out)

    def refusal(self, *words: str) -> str:
        """Return the one line that it prints, and nothing else, without what precedes all."""
        printed = self(*words, code=2)
        assert printed.out == "" and printed.err.count("\n") == 1
        assert printed.err.startswith("kvik: error: ")
        return printed.err.removeprefix("kvik: error: ").rstrip("\n")
