"""The weights of a checkpoint as the tensors of a GGUF file."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.gguf.export import block_type, gguf_family, rope_divisors
from kvik.gguf.facts import HEAD, ROPE_FACTORS, gguf_name
from kvik.gguf.types import BLOCK_TYPES
from kvik.gguf.writer import OutTensor
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import Checkpoint
from kvik.nn.gguf_blocks import FLOAT_TYPES
from kvik.nn.gguf_layout import Change, changes
from kvik.nn.gguf_quantize import quantize
from kvik.nn.safetensors import TORCH_DTYPES, TensorEntry

LARGEST_SCALE = torch.finfo(torch.float16).max
# Largest magnitude that a type holds: of the numbers, or of their scales.
LARGEST = {
    **{type: torch.finfo(dtype).max for type, dtype in FLOAT_TYPES.items()},
    "Q8_0": 127 * LARGEST_SCALE,
    "Q4_0": 8 * LARGEST_SCALE,
    "Q5_0": 16 * LARGEST_SCALE,
    "Q5_1": LARGEST_SCALE,  # the least weight is stored as it is
    "Q4_K": 32 * LARGEST_SCALE,  # half of the largest minimum, which a fit may pass by a step
    "Q5_K": 32 * LARGEST_SCALE,
    "Q6_K": 31 * 127 * LARGEST_SCALE,
}


def gguf_tensors(checkpoint: Checkpoint, spec: ModelSpec, type: str) -> list[OutTensor]:
    """The tensors of a file of a type of `FILE_TYPES`.

    They are read, a run of rows at a time, when they are written. Vectors stay F32, matrices take
    the `block_type` of their place; those of all experts of a layer are one. A head that repeats
    the embedding is left out.

    Raises:
        ModelError: the checkpoint is quantised, or holds a tensor that GGUF has no name for.
    """
    family = gguf_family(spec)
    made = changes(spec, family)
    found: dict[str, list[TensorEntry]] = {}
    for hf, entry in checkpoint.entries.items():
        name = gguf_name(hf, family.gguf_names)
        if hf.endswith("rotary_emb.inv_freq") or (name == HEAD and spec.tie_word_embeddings):
            continue
        if name is None or not TORCH_DTYPES[entry.dtype].is_floating_point:
            raise ModelError("model", f"tensor {shown(hf)} ({entry.dtype}) has no place in GGUF")
        change = made.get(hf)
        if change is not None and entry.shape[0] % change.unit:
            raise ModelError("model", f"tensor {shown(hf)} {change.told}")
        found.setdefault(name, []).append(entry)
    tensors = []
    for name, entries in found.items():
        shape = entries[0].shape
        blocks = "F32" if len(shape) == 1 else block_type(type, name, shape[-1], spec)
        tensors.append(_tensor(checkpoint, name, entries, blocks, made.get(entries[0].name)))
    divisors = rope_divisors(spec)
    if divisors is not None:
        data = struct.pack(f"<{len(divisors)}f", *divisors)
        shape = (len(divisors),)
        tensors.append(OutTensor(ROPE_FACTORS, BLOCK_TYPES["F32"], shape, lambda: iter([data])))
    return tensors


def _tensor(
    checkpoint: Checkpoint,
    name: str,
    entries: list[TensorEntry],
    type: str,
    change: Change | None,
) -> OutTensor:
    """One tensor, or those of all experts of a layer, one behind the other."""
    entries.sort(key=lambda entry: _expert(entry.name))

    def data() -> Iterator[memoryview]:
        for entry in entries:
            for run in checkpoint.runs({entry.name: change is None}):
                rows = run.values if change is None else change.to_file(run.values)
                yield _bytes(type, name, rows)

    experts = (len(entries),) if _expert(entries[0].name) >= 0 else ()
    return OutTensor(name, BLOCK_TYPES[type], (*experts, *entries[0].shape), data)


def _expert(name: str) -> int:
    """Return the number of the expert that has a tensor; -1: it belongs to none."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _bytes(type: str, name: str, values: Tensor) -> memoryview:
    if not torch.isfinite(values).all():
        raise ModelError("model", f"tensor {shown(name)} must hold finite numbers")
    if values.numel() and values.abs().max() > LARGEST[type]:
        told = f"tensor {shown(name)} has numbers above {LARGEST[type]:.6g}, too large for {type}"
        raise ModelError("model", told)
    rows = values if values.dim() == 2 else values.view(1, -1)
    return quantize(type, rows).numpy().data.cast("B")
