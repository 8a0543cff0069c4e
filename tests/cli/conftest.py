"""The bundled model, loaded once for all tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.commands import Command

import kvik.llm
from kvik.llm import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_num_seqs=8, max_model_len=128) as loaded:
        yield loaded


@pytest.fixture
def loads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Give commands the loaded model, and list the options they requested."""
    asked: list[dict[str, Any]] = []

    class Shared:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def __enter__(self) -> LLM:
            return llm

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(kvik.llm, "LLM", Shared)
    return asked


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
