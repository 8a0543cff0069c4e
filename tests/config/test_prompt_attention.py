"""What was measured of a GPU's attention, in its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvik.config.prompt_attention import load, save

FOUND = ((64, 4096), (128, 1024))


def test_each_gpu_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "kvik" / "prompt-attention.json"
    assert load("A", path) == ()
    save("A", ((128, 2048),), path)
    save("B", (), path)
    save("A", FOUND, path)
    assert load("A", path) == FOUND
    assert load("B", path) == ()


def test_what_other_versions_did_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt-attention.json"
    save("A", FOUND, path)
    versions = {"torch": "1.0", "triton": "3.6.0", "kvik": "0"}
    monkeypatch.setattr("kvik.config.prompt_attention.metadata.version", versions.__getitem__)
    assert load("A", path) == ()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "null", '{"A": 3}', '{"A": {}}', "[" * 100_000),
        *("torch_from", "not a number", "infinite", "dims"),
    ],
    ids=lambda text: text[:20],
)
def test_a_broken_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompt-attention.json"
    save("A", FOUND, path)
    broken = {"torch_from": 3, "not a number": {"64": "many"}, "dims": {"sixty": 64}}
    broken["infinite"] = {"64": float("inf")}
    if text in broken:
        every = json.loads(path.read_bytes())
        every["A"]["torch_from"] = broken[text]
        text = json.dumps(every)
    path.write_text(text)
    assert load("A", path) == ()
    save("A", FOUND, path)  # and is replaced
    assert load("A", path) == FOUND
