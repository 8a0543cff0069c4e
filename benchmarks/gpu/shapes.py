"""Models of real shapes, each only a config.json: random weights are generated on the device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from place import sized

# Requests that arrive at once, tokens of each prompt and of each answer: for kvik and its peers.
LOAD = sized((256, 256, 64), (2, 3, 2))
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
_REAL: Mapping[str, Mapping[str, object]] = {
    "8b": {  # Llama-3-8B
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "1b": {  # Llama-3.2-1B
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "0.5b": {  # Qwen2.5-0.5B
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
}
_SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 160}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = {
    name: sized(shape, {**shape, **_SMALL, **({"head_dim": 32} if "head_dim" in shape else {})})
    for name, shape in _REAL.items()
}


ONE_LAYER = " of one layer"  # suffix of a shape's name


def write_config(shape: str, folder: Path) -> Path:
    """Write and return a folder that describes a model, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[shape.removesuffix(ONE_LAYER)], "torch_dtype": "bfloat16"}
    if shape.endswith(ONE_LAYER):
        config["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
