"""Text for calibration: enough of it, evenly taken, and one clear error where that cannot be."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.held_out import TEXT

from kvik.config.model_source import BUNDLED
from kvik.errors import ConfigError
from kvik.quantize import calibrate as module
from kvik.quantize.calibrate import calibration_windows
from kvik.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)


def test_builtin(tokenizer: Tokenizer) -> None:
    windows = calibration_windows("builtin", tokenizer, samples=128, tokens=256)
    assert windows.shape == (128, 256)
    assert windows.dtype == torch.int64
    assert len(windows.unique(dim=0)) == 128


def test_builtin_is_none_of_the_text_that_quality_is_measured_on() -> None:
    text = module.TEXT.read_text(encoding="utf-8")
    lines = [line for line in TEXT.splitlines() if len(line) > 40]
    assert len(lines) > 50
    assert not [line for line in lines if line in text]
    assert text.isascii()


def test_a_file_is_taken_evenly(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    found = len(ids) // 16
    windows = calibration_windows(tmp_path / "text", tokenizer, samples=found + 5, tokens=16)
    assert windows.flatten().tolist() == ids[: 16 * found]
    half = calibration_windows(str(tmp_path / "text"), tokenizer, samples=found // 2, tokens=16)
    assert len(half) == found // 2
    assert half[0].tolist() == windows[0].tolist()
    places = [int((windows == window).all(1).nonzero()[0]) for window in half]
    assert max(places) >= found - 4
    assert max(b - a for a, b in pairwise(places)) <= 3


def test_a_long_file_is_not_read_to_its_end(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 1000)
    (tmp_path / "text").write_bytes(TEXT.encode() * 3 + b"\xff")
    windows = calibration_windows(tmp_path / "text", tokenizer, samples=2, tokens=16)
    assert windows.shape == (2, 16)
    with pytest.raises(ConfigError, match="it is no UTF-8 text"):
        calibration_windows(tmp_path / "text", tokenizer, samples=2000, tokens=16)


def test_parts_are_cut_between_lines(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    whole = calibration_windows(tmp_path / "text", tokenizer, samples=999, tokens=16)
    monkeypatch.setattr(module, "PART", 700)
    parts = calibration_windows(tmp_path / "text", tokenizer, samples=999, tokens=16)
    same = (tokenizer.decode(w.flatten().tolist()) for w in (whole, parts))
    assert len({text[:5000] for text in same}) == 1


@pytest.mark.parametrize("space", [" ", ""])
def test_a_line_without_an_end(
    space: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not read to its end either, and words stay whole."""
    monkeypatch.setattr(module, "PART", 1000)
    line = f"tree{space}" * 9000
    (tmp_path / "line").write_bytes(line.encode() + b"\xff")
    windows = calibration_windows(tmp_path / "line", tokenizer, samples=4, tokens=16)
    assert windows.shape == (4, 16)
    if space:
        ids = tokenizer.encode(line, add_special_tokens=False)
        assert windows[0].tolist() == ids[:16] and len(windows[1:].unique()) == 1


def test_texts_that_will_not_do(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "short").write_text("Once upon a time.")
    with pytest.raises(ConfigError, match=r"has \d+ tokens, one window needs 512"):
        calibration_windows(tmp_path / "short", tokenizer, samples=8, tokens=512)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="has 0 tokens"):
        calibration_windows(tmp_path / "empty", tokenizer, samples=8, tokens=512)
    with pytest.raises(ConfigError, match=r"cannot read .*none' \(No such file"):
        calibration_windows(tmp_path / "none", tokenizer, samples=8, tokens=512)
    with pytest.raises(ConfigError, match=r"cannot read .*Is a directory"):
        calibration_windows(tmp_path, tokenizer, samples=8, tokens=512)
    with pytest.raises(ConfigError, match="samples: must be at least 1"):
        calibration_windows("builtin", tokenizer, samples=0, tokens=512)
    with pytest.raises(ConfigError, match="samples: must be at most 32768 of 512 tokens"):
        calibration_windows("builtin", tokenizer, samples=10**20, tokens=512)
    with pytest.raises(ConfigError, match="calib_tokens: must be at least 2"):
        calibration_windows("builtin", tokenizer, samples=1, tokens=1)
