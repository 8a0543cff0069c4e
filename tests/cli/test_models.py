"""`kvik models` lists every architecture with its files."""

from __future__ import annotations

from helpers.commands import Command

from kvik.models.registry import ARCHITECTURES, DECLARED, WITH_ENCODERS


def test_every_architecture_is_listed(command: Command) -> None:
    text = command("models").out
    assert len(text.partition("\n\n")[0].splitlines()) == 1 + len(DECLARED) + len(WITH_ENCODERS)
    assert all(one.name in text and one.models in text for one in DECLARED.values())
    rows = {row["architecture"]: row for row in command.json("models")}
    assert rows.keys() == ARCHITECTURES.keys() | WITH_ENCODERS.keys()
    assert rows["LlamaForCausalLM"]["files"] == ["safetensors", "gguf"]
    assert rows["MistralForCausalLM"]["files"] == ["safetensors", "gguf"]
    assert rows["OPTForCausalLM"]["files"] == ["safetensors"]
