"""Writes LoRA adapters as PEFT does, and the models with an adapter merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvik.files import ADAPTER_FILES
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import SINGLE

Pairs = dict[str, tuple[Tensor, Tensor]]  # layer -> A [rank, inputs] and B [outputs, rank]
ALPHA = 6.0


def linear_layers(spec: ModelSpec, *, experts: bool = False) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the layers that requests may change, by name; or of experts."""
    return {
        name: (linear.inputs, outputs)
        for linear in spec.declaration.linears
        if (linear.router is not None if experts else linear.adaptable)
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


# What PEFT adapts as parameters: all experts of a layer as stacks, and routers -> alpha.
ALPHAS = {"gate_up_proj": 6.0, "up_proj": 6.0, "down_proj": 2.0, "weight": 3.0}


def adapt_stacks(
    model: Path,
    folder: Path,
    name: str,
    *,
    older: bool = False,
    parameters: Collection[str] = ALPHAS,
    rank: int = 4,
    size: float = 1 / 8,
) -> tuple[Path, Path]:
    """Write an adapter of the experts of a model and of its routers, and the merged model; return
    both folders.

    Args:
        older: A multiplies the first dimension of an expert's parameter, as in PEFT before 0.19.
        parameters: those to adapt.
        size: of random numbers.
    """
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    draw, matrices = torch.Generator().manual_seed(len(name)), dict[str, Tensor]()
    for full, values in merged.named_parameters():
        module, _, parameter = full.rpartition(".")
        if not module.endswith((".experts", ".gate", ".router")) or parameter not in parameters:
            continue
        each = values.data if values.dim() == 3 else values.data[None]
        inputs_first = older or getattr(merged.get_submodule(module), "is_transposed", False)
        swapped = inputs_first and values.dim() == 3
        outputs, inputs = each[0].t().shape if swapped else each[0].shape
        a = torch.randn(len(each), rank, inputs, generator=draw) * size
        b = torch.randn(len(each), outputs, rank, generator=draw) * size
        for expert in range(len(each)):
            added = ALPHAS[parameter] / rank * b[expert] @ a[expert]
            each[expert] += added.t() if swapped else added
        inner = parameter in ("gate_up_proj", "up_proj") and "down_proj" in parameters
        layer = f"{module}.base_layer" if inner else module
        for part, stored in (("A", a.flatten(0, 1)), ("B", b.permute(1, 2, 0).flatten(1))):
            matrices[f"base_model.model.{layer}.lora_{part}.weight"] = stored.contiguous()
    (folder / name).mkdir()
    save_file(matrices, folder / name / ADAPTER_FILES[1])
    scopes = {"weight": ("gate", "router")}
    described = {
        "peft_type": "LORA",
        "peft_version": "0.18.0" if older else "0.21.2",
        "target_parameters": [
            f"{scope}.{each}" for each in parameters for scope in scopes.get(each, ("experts",))
        ],
        "alpha_pattern": {each: alpha for each, alpha in ALPHAS.items() if alpha != ALPHA},
        "lora_alpha": ALPHA,
    }
    (folder / name / ADAPTER_FILES[0]).write_text(json.dumps(described))
    merged.save_pretrained(folder / f"{name}-merged")
    return folder / name, folder / f"{name}-merged"
