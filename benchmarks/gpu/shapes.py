"""Models of real shapes, each only a config.json: random weights are generated on the device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from place import sized

from kvik.planner.families import public_configs

# Requests that arrive at once, tokens of each prompt and of each answer: for kvik and its peers.
LOAD = sized((256, 256, 64), (2, 3, 2))
_PUBLIC = {"8b": "llama-3.1-8b", "1b": "llama-3.2-1b", "0.5b": "qwen2.5-0.5b"}
_REAL: Mapping[str, Mapping[str, object]] = {
    name: {"head_dim": 128 if name == "8b" else 64, **config, "max_position_embeddings": 131072}
    for name, public in _PUBLIC.items()
    for config in (public_configs()[public],)
}
_SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 160}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SHAPES = {name: sized(shape, {**shape, **_SMALL}) for name, shape in _REAL.items()}


ONE_LAYER = " of one layer"  # suffix of a shape's name


def write_config(shape: str, folder: Path) -> Path:
    """Write and return a folder that describes a model, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[shape.removesuffix(ONE_LAYER)], "torch_dtype": "bfloat16"}
    if shape.endswith(ONE_LAYER):
        config["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
