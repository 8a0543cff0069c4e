"""The browser of the tests leaves nothing behind where it cannot be opened."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from helpers.chromium import Browser

SAYS = {
    "nothing": "sys.exit(1)",
    "an address where nobody is": (
        "print('DevTools listening on ws://127.0.0.1:9/x', file=sys.stderr, flush=True); "
        "time.sleep(60)"
    ),
}


@pytest.mark.skipif(sys.platform == "win32", reason="a script with a first line")
@pytest.mark.parametrize("says", SAYS)
def test_one_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    program, pid = tmp_path / "chromium", tmp_path / "pid"
    lines = f"import os, sys, time; open({str(pid)!r}, 'w').write(str(os.getpid())); {SAYS[says]}"
    program.write_text(f"#!{sys.executable}\n{lines}\n")
    program.chmod(0o755)
    (tmp_path / "profiles").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "profiles"))
    with pytest.raises((RuntimeError, OSError)):
        Browser(str(program))
    assert not list((tmp_path / "profiles").iterdir())
    assert not Path(f"/proc/{pid.read_text()}").exists()
