"""`kvik models` lists every architecture with its files."""

from __future__ import annotations

import json

import pytest

from kvik.cli.main import main
from kvik.models.registry import ARCHITECTURES


def test_every_architecture_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert len(text.partition("\n\n")[0].splitlines()) == 1 + len(ARCHITECTURES)
    assert all(one.name in text and one.models in text for one in ARCHITECTURES.values())
    assert main(["models", "--json"]) == 0
    rows = {row["architecture"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == ARCHITECTURES.keys()
    assert rows["LlamaForCausalLM"]["files"] == ["safetensors", "gguf"]
    assert rows["MistralForCausalLM"]["files"] == ["safetensors", "gguf"]
    assert rows["OPTForCausalLM"]["files"] == ["safetensors"]
