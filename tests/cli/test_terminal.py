"""The progress bar, and sanitised output on a terminal."""

from __future__ import annotations

import pytest

from kvik.cli.terminal import share_bar


@pytest.mark.parametrize("redraws", [True, False])
def test_progress_is_shown_on_a_terminal_and_not_in_a_file(
    redraws: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with share_bar(redraws=redraws) as tell:
        tell("layer 1", 0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    with share_bar(redraws=redraws) as tell:
        tell("layer 2", 0.5)
    shown = capsys.readouterr().err
    assert "layer 2" in shown and "50%" in shown
