"""What a user is told about a build that cannot do all it should."""

from __future__ import annotations

import pytest

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik was installed without native kernels")

from kvik import LLM
from kvik.kernels.cpu import native


@pytest.fixture
def poor_build(monkeypatch) -> None:
    monkeypatch.setattr(native._native, "has_openmp", lambda: False)
    monkeypatch.setattr(native._native, "rejected_instruction_sets", lambda: ["amx"])


def test_a_poor_build_is_told(poor_build):
    wrong, slow = native.notices(threads=2)
    assert "amx compute wrongly" in wrong
    assert "without OpenMP" in slow
    assert native.notices(threads=1) == [wrong]


def test_an_engine_says_it_at_start(poor_build, caplog):
    with LLM(device="cpu", threads=2, max_model_len=64):
        assert "without OpenMP" in caplog.text and "amx" in caplog.text
