"""Quantise a model folder to int8 weights and activations, as vLLM reads it.

    python to_w8a8.py MODEL_FOLDER OUT_FOLDER

One scale per output row of each linear layer; activations are quantised per token as they come.
This is the `int-quantized` layout of compressed-tensors. Needs torch and safetensors.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def quantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace matrices [out, in] of layers by int8 and a scale [out, 1]; the rest stays."""
    made = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name:
            made[name] = tensor
            continue
        weight = tensor.float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        made[name] = (weight / scale).round().to(torch.int8)
        made[f"{name}_scale"] = scale
    return made


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, out = map(Path, sys.argv[1:])
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((out / "config.json").read_text("utf-8"))
    config["quantization_config"] = SCHEME
    (out / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    made = quantise(load_file(source / "model.safetensors"))
    save_file(made, out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
