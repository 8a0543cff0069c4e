"""Tiny checkpoints in the layouts of quantised ones, each with a twin in floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers.stored_layers import (
    auto_round_config,
    awq_config,
    bnb_config,
    compressed_config,
    fp8_config,
    gptq_config,
    read,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from kvik.kernels.fp8 import fp8_scales, round_fp8, unround_fp8
from kvik.kernels.rounding import round_mxfp4
from kvik.kernels.weights import E2M1, NUMBERS
from kvik.nn.checkpoint import SINGLE
from kvik.nn.formats.base import LinearShape
from kvik.nn.formats.fp4 import Mxfp4Packed, Nvfp4
from kvik.nn.formats.fp8 import Fp8
from kvik.nn.formats.integers import Codes
from kvik.nn.formats.registry import FORMATS
from kvik.spec.stored_weights import StoredScheme

AUTO_ROUND_EXTRA = {
    "model.layers.1.self_attn.k_proj": {"bits": 16, "data_type": "fp"},
    r".*layers\.0\.mlp\.down.*": {"bits": 8, "sym": True},
    "lm_head": {"bits": 4},
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": awq_config(),
    "gptq": gptq_config(),
    "gptq-order": gptq_config(desc_act=True, sym=False),
    "gptq-8": gptq_config(bits=8),
    "gptq-modules": gptq_config(dynamic={r"-:.*\.k_proj": {}, r"+:.*\.1\.mlp": {"bits": 8}}),
    "packed": compressed_config(symmetric=False, ignore=()),
    "int8": compressed_config("int-quantized", num_bits=8, strategy="channel", group_size=None),
    "fp8": compressed_config(
        "float-quantized", num_bits=8, type="float", strategy="channel", group_size=None
    ),
    "fp8-dynamic": fp8_config(weight_block_size=None),
    "fp8-blocks": fp8_config(weight_block_size=[32, 32]),
    "fp8-static": fp8_config(weight_block_size=None, activation_scheme="static"),
    "fp8-e5m2": fp8_config(fmt="e5m2", weight_block_size=[32, 32]),
    "bnb-nf4": bnb_config(),
    "bnb-fp4": bnb_config(
        bnb_4bit_quant_type="fp4",
        bnb_4bit_use_double_quant=False,
        bnb_4bit_quant_storage="bfloat16",
    ),
    "bnb-8": bnb_config(8, llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"]),
    "auto-round": auto_round_config(
        sym=False, packing_format="auto_round", extra_config=AUTO_ROUND_EXTRA
    ),
}
LETTERED = (".w1", ".w2", ".w3", ".wq_a", ".wq_b", ".wkv", ".wo_a", ".wo_b")
BNB_BLOCK = 64  # weights that share a scale
STATIC = torch.tensor([0.01])  # scale of activations, as if from a calibration


def rounded(w: Tensor, scheme: StoredScheme) -> Codes:
    """Round to the nearest code."""
    outputs, inputs = w.shape
    bits = 8 if scheme.layout == "int-quantized" else scheme.bits
    groups = None
    if scheme.ordered:
        permuted = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        groups = torch.empty(inputs, dtype=torch.int64)
        groups[permuted] = torch.arange(inputs) // scheme.group
        w = w[:, groups.argsort(stable=True)]
    grouped = w.float().reshape(outputs, -1, scheme.group or inputs)
    low, high = grouped.amin(-1).clamp(max=-1e-3), grouped.amax(-1).clamp(min=1e-3)
    middle, most = 2 ** (bits - 1), 2**bits - 1
    if scheme.symmetric:
        largest = torch.maximum(high, -low)
        if not scheme.band:
            largest = largest.max().expand_as(largest)
        scales = (largest / (middle - 0.5)).half().float()
        zeros = torch.full_like(scales, middle)
    else:
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(1, most)
    q = (grouped / scales[:, :, None]).round() + zeros[:, :, None]
    q = q.clamp(0, most).to(torch.uint8).view(outputs, inputs)
    if groups is not None:
        q = torch.empty_like(q).index_copy_(1, groups.argsort(stable=True), q)
    kept = None if scheme.symmetric else zeros.to(torch.uint8)
    return Codes(q, scales.half(), kept, bits, groups)


def rounded_nvfp4(w: Tensor, format: Nvfp4) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a layer [outputs, inputs], and its weight in fp32."""
    grouped = w.float().unflatten(1, (-1, 16))
    common = grouped.abs().max() / (448 * 6)
    scales = (grouped.abs().amax(2) / 6 / common).clamp(min=2**-9).to(torch.float8_e4m3fn)
    both = scales.float() * common
    numbers = torch.tensor(E2M1)
    distances = (grouped / both[..., None])[..., None] - numbers
    codes = distances.abs().argmin(3)
    halves = codes.flatten(1).to(torch.uint8)
    modelopt = format.scheme.layout == "nvfp4-modelopt"
    tensors = {
        format.packed: halves[:, ::2] | halves[:, 1::2] << 4,
        "weight_scale": scales,
        format.common: (common if modelopt else 1 / common).reshape(format.common_shape),
    }
    if not modelopt:
        both = scales.float() / tensors[format.common]
    return tensors, (numbers[codes] * both[..., None]).flatten(1)


def rounded_bnb(
    w: Tensor, config: dict[str, Any], block: int = BNB_BLOCK
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a layer by bitsandbytes, and its weight in fp32."""
    if config["load_in_8bit"]:
        most = w.float().abs().amax(1)
        q = (w.float() * 127 / most[:, None]).round().to(torch.int8)
        order = torch.tensor(0, dtype=torch.uint8)
        tensors = {"weight": q, "SCB": most, "weight_format": order}
        return tensors, q * most[:, None] / 127
    number = config["bnb_4bit_quant_type"]
    numbers = torch.tensor(NUMBERS[{"nf4": "nf4", "fp4": "bnb_fp4"}[number]])
    flat = w.float().flatten()
    blocks = pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = stored = blocks.abs().amax(1)
    facts = {"quant_type": number, "blocksize": block, "dtype": "float32", "shape": [*w.shape]}
    nested = {}
    if config["bnb_4bit_use_double_quant"]:
        table, offset = torch.linspace(-1, 1, 256) ** 3, float(scales.mean())
        bands = (scales - offset).split(256)
        factors = torch.stack([band.abs().amax() for band in bands])
        spread = factors.repeat_interleave(256)[: len(scales)]
        stored = ((scales - offset) / spread)[:, None].sub(table).abs().argmin(1).to(torch.uint8)
        scales = table[stored.int()] * spread + offset
        nested = {"nested_absmax": factors, "nested_quant_map": table}
        facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = ((blocks / scales[:, None])[..., None] - numbers).abs().argmin(2)
    meant = (numbers[codes] * scales[:, None]).flatten()[: len(flat)].view(w.shape)
    halves = codes.flatten()[: len(flat)].to(torch.uint8)
    packed = (halves[::2] << 4 | halves[1::2])[:, None]
    if config["bnb_4bit_quant_storage"] != "uint8":
        packed = packed.flatten().view(getattr(torch, config["bnb_4bit_quant_storage"]))[:, None]
    state = torch.tensor([*json.dumps(facts).encode()], dtype=torch.uint8)
    parts = {"absmax": stored, "quant_map": numbers, **nested}
    parts[f"quant_state.bitsandbytes__{number}"] = state
    return {"weight": packed} | {f"weight.{name}": part for name, part in parts.items()}, meant


def multiplied_out(codes: Codes) -> Tensor:
    """Dequantise to [outputs, inputs] fp32."""
    inputs = codes.q.shape[1]
    groups = codes.groups
    if groups is None:
        groups = torch.arange(inputs) // (inputs // codes.scales.shape[1])
    middle = 2 ** (codes.bits - 1)
    zeros = middle if codes.zeros is None else codes.zeros[:, groups].float()
    return (codes.q.float() - zeros) * codes.scales.float()[:, groups]


def save_quantised(source: Path, folder: Path, twin: Path, config: dict[str, Any]) -> None:
    """Quantise the linear layers of a checkpoint by `config`.

    Args:
        twin: folder for the same weights, dequantised.
    """
    plain, quantised = load_file(source / SINGLE), {}
    stored = read(config, [name.removesuffix(".weight") for name in plain])
    for name, tensor in dict(plain).items():
        layer = name.removesuffix(".weight")
        linear = layer.rstrip(".0123456789").endswith(("_proj", "lm_head", ".gate"))
        linear |= layer.endswith(LETTERED)
        scheme = stored.scheme(layer) if linear else None
        if scheme is None:
            quantised[name] = tensor
            continue
        if config["quant_method"] == "bitsandbytes":
            tensors, plain[name] = rounded_bnb(tensor, config)
            quantised |= {f"{layer}.{part}": tensors[part].contiguous() for part in tensors}
            continue
        shape = LinearShape(tensor.shape[1], tensor.shape[0])
        powers = config.get("scale_fmt") == "ue8m0"
        block_scale = "scale" if powers else "weight_scale_inv"
        names = {block_scale: ()} if config.get("weight_block_size") else {}
        format = FORMATS[scheme.layout](scheme, shape, names)
        if isinstance(format, Fp8):
            scales = fp8_scales(tensor, format.dtype, format.block)
            scales = scales.log2().ceil().exp2() if powers else scales
            values = round_fp8(tensor, scales, format.dtype, format.block)
            tensors = format.save(values, scales, STATIC.clone() if format.static else None)
            plain[name] = unround_fp8(values, scales, format.block)
        elif isinstance(format, Mxfp4Packed):
            weight = round_mxfp4(tensor)
            codes, scales = format.dtypes
            tensors = {
                format.packed: weight.values.view(codes),
                format.scale: weight.scales.view(scales),
            }
            plain[name] = weight.dequantized()
        elif isinstance(format, Nvfp4):
            tensors, plain[name] = rounded_nvfp4(tensor, format)
        else:
            codes = rounded(tensor, scheme)
            tensors = format.save(codes)
            plain[name] = multiplied_out(codes)
        quantised |= {f"{layer}.{part}": tensors[part].contiguous() for part in tensors}
    written = json.loads((source / "config.json").read_text())
    for where, tensors, more in (
        (folder, quantised, {"quantization_config": config}),
        (twin, plain, {}),
    ):
        where.mkdir(exist_ok=True)
        save_file(tensors, where / SINGLE)
        (where / "config.json").write_text(json.dumps(written | more))
