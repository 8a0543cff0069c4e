"""The weights of a checkpoint as the tensors of a GGUF file."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.gguf.export import block_type, gguf_family, rope_divisors
from kvik.gguf.names import HEAD, ROPE_FACTORS, gguf_name, numberless
from kvik.gguf.types import BLOCK_TYPES
from kvik.gguf.writer import OutTensor
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import IN_RUNS, WHOLE, Checkpoint
from kvik.nn.formats.bits import unpack_nibbles
from kvik.nn.formats.mxfp4 import BLOCKS, SCALES
from kvik.nn.gguf_blocks import FLOAT_TYPES, mxfp4_rows
from kvik.nn.gguf_layout import changes, shapes
from kvik.nn.gguf_quantize import quantize
from kvik.nn.safetensors import TORCH_DTYPES, TensorEntry
from kvik.spec.declare import FilePart
from kvik.spec.weight_kind import MX_GROUP

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
    found: dict[str, list[_Source]] = {}
    for source in _sources(checkpoint, spec):
        found.setdefault(source.name, []).append(source)
    tensors = []
    for name, sources in found.items():
        shape = sources[0].shape
        blocks = "F32" if len(shape) == 1 else block_type(type, name, shape[-1], spec)
        tensors.append(_tensor(checkpoint, sources, sources[0].blocks or blocks))
    divisors = rope_divisors(spec)
    if divisors is not None:
        data = struct.pack(f"<{len(divisors)}f", *divisors)
        shape = (len(divisors),)
        tensors.append(OutTensor(ROPE_FACTORS, BLOCK_TYPES["F32"], shape, lambda: iter([data])))
    return tensors


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of a file, or an expert's part of one.

    Attributes:
        name: of the tensor in the file.
        entries: what it is made of.
        shape: its own.
        make: makes it of their values; None: it is the same, in runs of rows.
        blocks: the type of its bytes where `make` gives these; "": it gives numbers.
        expert: whose part it is; -1: it is a whole tensor.
    """

    name: str
    entries: tuple[TensorEntry, ...]
    shape: tuple[int, ...]
    make: Callable[..., Tensor] | None = None
    blocks: str = ""
    expert: int = -1


UNREAD = "rotary_emb.inv_freq"  # of old checkpoints
# How checkpoints of models that read images name the text model.
_BESIDE_IMAGES = ("model.language_model.", "language_model.model.")


def text_name(name: str) -> str:
    """Return the name in a checkpoint of the text model alone."""
    for prefix in _BESIDE_IMAGES:
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def _sources(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[_Source]:
    """Yield what the tensors of a checkpoint become.

    Raises:
        ModelError: see `gguf_tensors`.
    """
    family, declared = gguf_family(spec), spec.declaration
    names, entries = family.gguf_names, checkpoint.entries
    made = {text_name(name): change for name, change in changes(spec, family).items()}
    whole = {text_name(name): shape for name, shape in shapes(spec).items()}
    parts = {} if family.gguf_parts is None else family.gguf_parts(spec)
    block = text_name(declared.block)
    in_block = re.compile(rf"{re.escape(block.partition('{}')[0])}(\d+)\.(.+)\.(\w+)")
    trunk = f"{block.partition('.')[0]}."
    skipped = (*declared.skipped, *map(text_name, declared.skipped))
    bare = not any(text_name(stored).startswith(trunk) for stored in entries)
    for stored, entry in entries.items():
        hf = trunk + stored if bare and not stored.startswith("lm_head") else text_name(stored)
        if stored.startswith(skipped) or hf.startswith(skipped) or hf.endswith(UNREAD):
            continue
        match = in_block.fullmatch(hf)
        layer = match[2] if match else ""
        number = re.search(r"\.(\d+)(?=\.|$)", layer)
        expert = int(number[1]) if number else -1
        if match and (found := parts.get(numberless(layer))) is not None:
            for part in found:
                own = block.format(match[1]) + part.name.format(expert)
                made_of = _part(part, own, match[3], entries, stored, names)
                if made_of is not None:
                    yield replace(made_of, expert=expert)
            continue
        name = gguf_name(hf, names)
        if name == HEAD and spec.tie_word_embeddings:
            continue
        if name is None or not TORCH_DTYPES[entry.dtype].is_floating_point:
            raise _no_place(stored, entry)
        change, shape = made.get(hf), entry.shape
        if change is not None and shape[0] % change.unit:
            raise ModelError("model", f"tensor {shown(stored)} {change.told}")
        if shape == whole.get(hf):
            shape = tuple(size for size in shape if size > 1)
        make = None if change is None else change.to_file
        yield _Source(name, (entry,), shape, make, expert=expert)


def _no_place(name: str, entry: TensorEntry) -> ModelError:
    return ModelError("model", f"tensor {shown(name)} ({entry.dtype}) has no place in GGUF")


def _part(
    part: FilePart,
    own: str,
    last: str,
    entries: Mapping[str, TensorEntry],
    stored: str,
    names: Mapping[str, str],
) -> _Source | None:
    """Return a part of a layer; None: it comes with the blocks whose scales these are.

    Args:
        own: the name of the layer as which it is read. last: of the tensor of the layer.
        stored: its name in the checkpoint.
    """
    entry = entries[stored]
    name = gguf_name(f"{own}.{'weight' if last in (BLOCKS, SCALES) else last}", names)
    scales = entries.get(f"{stored.removesuffix(BLOCKS)}{SCALES}")
    if last == SCALES:
        return None
    if name is not None and last == BLOCKS and scales is not None:
        size = len(part.rows) or entry.shape[0], entry.shape[1] * MX_GROUP
        return _Source(name, (entry, scales), size, partial(_blocks, part), "MXFP4")
    if name is None or not TORCH_DTYPES[entry.dtype].is_floating_point:
        raise _no_place(stored, entry)
    like = _cut(part, torch.empty(entry.shape, device="meta"))
    shape = (part.heads, len(like) // part.heads, *like.shape[1:]) if part.heads else like.shape
    return _Source(name, (entry,), tuple(shape), partial(_cut, part))


def _cut(part: FilePart, values: Tensor) -> Tensor:
    """See `FilePart`. A bias has rows alone."""
    if values.dim() == 1:
        return values[torch.tensor(part.rows)] if part.rows else values
    values = values.t() if part.transposed else values
    if part.rows:
        values = values[torch.tensor(part.rows)]
    if part.columns:
        values = values[:, torch.tensor(part.columns)]
    if part.turned:
        return values.unflatten(0, (part.heads, -1)).mT.flatten(0, 1)
    return values


def _blocks(part: FilePart, blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [rows, groups, 16] and scales [rows, groups], uint8 -> rows as bytes of MXFP4."""
    if part.rows:
        rows = torch.tensor(part.rows)
        blocks, scales = blocks[rows], scales[rows]
    return mxfp4_rows(unpack_nibbles(blocks.flatten(1)), scales)


def _tensor(checkpoint: Checkpoint, sources: list[_Source], type: str) -> OutTensor:
    """One tensor, or those of all experts or heads of a layer, one behind the other."""
    sources.sort(key=lambda source: source.expert)
    name = sources[0].name

    def data() -> Iterator[memoryview]:
        for source in sources:
            if source.make is None:
                for run in checkpoint.runs({source.entries[0].name: IN_RUNS}):
                    yield _bytes(type, name, run.values)
                continue
            wanted = dict.fromkeys((entry.name for entry in source.entries), WHOLE)
            read = {run.name: run.values.clone() for run in checkpoint.runs(wanted)}
            made = source.make(*(read[entry.name] for entry in source.entries))
            yield _raw(made) if source.blocks else _bytes(type, name, made)

    experts = (len(sources),) if sources[0].expert >= 0 else ()
    return OutTensor(name, BLOCK_TYPES[type], (*experts, *sources[0].shape), data)


def _raw(rows: Tensor) -> memoryview:
    return rows.contiguous().numpy().data.cast("B")


def _bytes(type: str, name: str, values: Tensor) -> memoryview:
    if not torch.isfinite(values).all():
        raise ModelError("model", f"tensor {shown(name)} must hold finite numbers")
    if values.numel() and values.abs().max() > LARGEST[type]:
        told = f"tensor {shown(name)} has numbers above {LARGEST[type]:.6g}, too large for {type}"
        raise ModelError("model", told)
    rows = values.flatten(0, -2) if values.dim() > 1 else values.view(1, -1)
    return _raw(quantize(type, rows))
