"""Tiny GGUF models made with the public package, each with a twin of the same weights as floats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import torch
from helpers.gguf_files import some_rows, weights_of
from safetensors.torch import load_file, save_file

from kvik.nn.checkpoint import SINGLE

ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def neighbours(heads: int, size: int) -> list[int]:
    """Return the row order of a llama file, where rows that are rotated together are adjacent."""
    return [
        head * size + half * (size // 2) + pair
        for head in range(heads)
        for pair in range(size // 2)
        for half in range(2)
    ]


def save_gguf(
    source: Path,
    path: Path,
    twin: Path,
    type_of: Callable[[str], str],
    values: Mapping[str, int | float] = MappingProxyType({}),
    tensors_of_part: int = 0,
) -> None:
    """Save a checkpoint of transformers as a GGUF file.

    Args:
        twin: a folder for the same weights, dequantised.
        type_of: returns the type of a matrix, by its name in the file.
        values: metadata to add or change.
        tensors_of_part: most tensors of each part of a split file; 0: it is not split.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_of_part)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in values.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(key, value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    plain = {}
    for seed, (name, tensor) in enumerate(load_file(source / SINGLE).items()):
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        matrix = tensor.float().numpy()
        order = np.arange(len(matrix))
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            order = np.array(neighbours(heads if "q_proj" in name else kv_heads, head_dim))
        stored = matrix[order]
        if matrix.ndim == 1:
            writer.add_tensor(own, stored)
            plain[name] = tensor
            continue
        type = type_of(own)
        # Scaled down: in layers as wide as the largest blocks, attention would be nearly one-hot.
        rows = some_rows(type, 0.3 * stored, seed)
        kind = gguf.GGMLQuantizationType[type]
        writer.add_tensor(own, rows, raw_shape=rows.shape, raw_dtype=kind)
        plain[name] = torch.from_numpy(weights_of(type, rows)[order.argsort()].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    twin.mkdir(exist_ok=True)
    (twin / "config.json").write_text(json.dumps(config))
    save_file(plain, twin / SINGLE)
