"""Configs of quantised checkpoints by public tools, and layers that these tools packed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from helpers.configs import PUBLIC
from safetensors.torch import load_file
from torch import Tensor

from kvik.models.model_spec import ModelSpec
from kvik.spec.fields import Fields
from kvik.spec.stored_weights import StoredQuantization, read_stored_quantization

LAYERS = tuple(
    name
    for linear in ModelSpec.from_config(PUBLIC["llama-2-7b"]).declaration.linears
    for name in linear.names
)
GOLDEN = Path(__file__).parents[1] / "nn/formats/golden/golden.safetensors"


def golden(case: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a tool's input and the tensors that it made; see golden/make.py."""
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, tensor in load_file(GOLDEN).items():
        owner, _, rest = name.partition("/")
        if owner == case:
            found[rest.startswith("stored.")][rest.removeprefix("stored.")] = tensor
    return found


def read(config: dict[str, Any], layers: Iterable[str] = LAYERS) -> StoredQuantization:
    """Parse the config of a model with these linear layers."""
    return read_stored_quantization(Fields({"quantization_config": config}), layers)


def awq_config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    } | changes


def gptq_config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "damp_percent": 0.01,
        "desc_act": False,
        "sym": True,
        "static_groups": False,
    } | changes


def auto_round_config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "autoround_version": "0.16.1",
        "bits": 4,
        "data_type": "int",
        "group_size": 32,
        "iters": 200,
        "sym": True,
        "block_name_to_quantize": "model.layers",
    } | changes


def bnb_config(bits: int = 4, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": bits == 4,
        "_load_in_8bit": bits == 8,
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
    } | changes


def compressed_config(
    format: str = "pack-quantized",
    *,
    ignore: tuple[str, ...] = ("lm_head",),
    activations: bool = False,
    **weights: Any,
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                    "group_size": 32, "dynamic": False} | weights,
        "input_activations": {"num_bits": 8, "type": weights.get("type", "int"), "dynamic": True}
        if activations else None,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


NVFP4 = {"type": "float", "strategy": "tensor_group", "group_size": 16}


def modelopt_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16} | changes


def fp8_config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    } | changes


def meaning(layer: dict[str, Tensor], bits: int) -> Tensor:
    """Compute w[o, i] = (q - zero) * scale element by element; fp32 [outputs, inputs]."""
    q, scales = layer["q"], layer["scales"].float()
    outputs, inputs = q.shape
    w = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            natural = i // (inputs // scales.shape[1])
            group = int(layer["groups"][i]) if "groups" in layer else natural
            zero = int(layer["zeros"][o, group]) if "zeros" in layer else 2 ** (bits - 1)
            w[o, i] = (int(q[o, i]) - zero) * scales[o, group]
    return w
