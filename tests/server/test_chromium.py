"""The browser of the tests cleans up if it cannot be opened."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from helpers.chromium import Browser

BEHAVIOURS = {
    "nothing": "sys.exit(1)",
    "an address without a listener": (
        "print('DevTools listening on ws://127.0.0.1:9/x', file=sys.stderr, flush=True); "
        "time.sleep(60)"
    ),
}


@pytest.mark.skipif(sys.platform == "win32", reason="a script with a first line")
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_browser_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    program, pid = tmp_path / "chromium", tmp_path / "pid"
    note = f"import os, sys, time; open({str(pid)!r}, 'w').write(str(os.getpid()))"
    lines = f"{note}; {BEHAVIOURS[behaviour]}"
    program.write_text(f"#!{sys.executable}\n{lines}\n")
    program.chmod(0o755)
    (tmp_path / "profiles").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "profiles"))
    with pytest.raises((RuntimeError, OSError)):
        Browser(str(program))
    assert not list((tmp_path / "profiles").iterdir())
    assert not Path(f"/proc/{pid.read_text()}").exists()
