"""Writes LoRA adapters as PEFT does, and the models with an adapter merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.files import ADAPTER_FILES
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import SINGLE

Pairs = dict[str, tuple[Tensor, Tensor]]  # layer -> A [rank, inputs] and B [outputs, rank]
ALPHA = 6.0


def linear_layers(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the layers that requests may change, by name."""
    return {
        name: (linear.inputs, outputs)
        for linear in spec.declaration.linears
        if linear.adaptable
        for name, outputs in zip(linear.names, linear.outputs, strict=True)
    }


def draw_pairs(
    layers: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0, size: float = 0.3
) -> Pairs:
    """Draw an adapter.

    Args:
        layers: inputs and outputs of each.
        size: of what it adds to a weight.
    """
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(rank, inputs, generator=draw),
            torch.randn(outputs, rank, generator=draw) * size / (inputs * rank) ** 0.5,
        )
        for name, (inputs, outputs) in layers.items()
    }


def write_adapter(folder: Path, pairs: Pairs, **config: Any) -> Path:
    """Write an adapter whose product is scaled by ALPHA / rank."""
    folder.mkdir(parents=True)
    tensors = {
        f"base_model.model.{layer}.lora_{part}.weight": values.contiguous()
        for layer, pair in pairs.items()
        for part, values in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / ADAPTER_FILES[1])
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": ALPHA, "bias": "none", **config}
    (folder / ADAPTER_FILES[0]).write_text(json.dumps(described))
    return folder


def write_merged(model: Path, folder: Path, pairs: Pairs, *, transposed: bool = False) -> Path:
    """Write a model with an adapter merged into its weights.

    Args:
        transposed: it stores [inputs, outputs].
    """
    shutil.copytree(model, folder)
    weights = load_file(model / SINGLE)
    for layer, (a, b) in pairs.items():
        added = ALPHA / len(a) * b @ a
        weights[f"{layer}.weight"] += added.t() if transposed else added
    save_file(weights, folder / SINGLE)
    return folder
