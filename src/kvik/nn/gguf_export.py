"""Converts the weights of a checkpoint to the tensors of a GGUF file."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.gguf.export import block_type, gguf_family, rope_divisors
from kvik.gguf.names import HEAD, ROPE_FACTORS, gguf_name, numberless
from kvik.gguf.reader import OutTensor
from kvik.gguf.types import BLOCK_TYPES
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import IN_RUNS, WHOLE, Checkpoint
from kvik.nn.formats.bits import unpack_nibbles
from kvik.nn.formats.fp4 import BLOCKS, SCALES
from kvik.nn.gguf_blocks import FLOAT_TYPES, mxfp4_rows
from kvik.nn.gguf_checkpoint import changes, file_shapes, shapes
from kvik.nn.loader import torch_threads
from kvik.nn.safetensors import TORCH_DTYPES, TensorEntry
from kvik.spec.architecture import SEPARATE, FilePart
from kvik.spec.stored_weights import TEXT_MODEL, TRUNKS
from kvik.spec.weight_kind import MX_GROUP

SLICE = 1 << 17  # weights per work item of a thread: few enough for its caches


def quantize(type: str, weights: Tensor) -> Tensor:
    """Quantise weights [rows, inputs] of whole blocks, any float dtype -> [rows, bytes] uint8.

    Types: F32, F16, BF16, Q8_0, Q4_0, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K.
    """
    if type in FLOAT_TYPES:
        return _as_bytes(weights.to(FLOAT_TYPES[type]))
    width = BLOCK_TYPES[type].weights
    blocks = weights.reshape(-1, width)  # [blocks, width]
    slices = blocks.split(SLICE // width)
    # A search is hundreds of short operations. Torch's threads spin while they wait for each other:
    # if they shared each operation, a search would take fifty times as long while another process
    # uses one of the cores.
    with torch_threads(1) as threads, ThreadPoolExecutor(threads) as pool:
        mapper = pool.map if len(slices) > 1 else map  # a thread takes longer than a small matrix
        # Rows of one block are still transposed if the checkpoint stores the matrix transposed.
        made = list(mapper(lambda part: _QUANTIZE[type](part.float().contiguous()), slices))
    return torch.cat(made).view(len(weights), -1)


# Byte layouts.


def _as_bytes(weights: Tensor) -> Tensor:
    return weights.contiguous().view(torch.uint8)


def _half(numbers: Tensor) -> Tensor:
    """Return numbers [blocks, 1] as the two bytes of fp16: [blocks, 2] uint8."""
    return _as_bytes(numbers.to(torch.float16))


def _packed(codes: Tensor, width: int, bits: int) -> Tensor:
    """Pack the low `bits` bits of each code; undoes `gguf_blocks._bits`. codes [blocks, n] uint8 ->
    [blocks, n * bits / 8] uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    fields = (codes & (1 << bits) - 1).view(len(codes), -1, 8 // bits, width) << shifts
    return fields.sum(-2, dtype=torch.uint8).flatten(1)


def _packed_k_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack six-bit codes, [blocks, 8] uint8 each, into the twelve bytes of Q4_K and Q5_K blocks."""
    head, tail = scales.split(4, dim=-1)
    head_minima, tail_minima = minima.split(4, dim=-1)
    first = head | tail >> 4 << 6
    second = head_minima | tail_minima >> 4 << 6
    third = tail & 15 | (tail_minima & 15) << 4
    return torch.cat((first, second, third), dim=-1)


# Blocks of 32 weights: bit-identical to the format's reference implementation.


def _to_q8_0(blocks: Tensor) -> Tensor:
    """Map the largest magnitude to 127; halves round away from zero. The weights are divided by the
    scale before it is rounded to fp16."""
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * _inverse(scales)
    magnitudes = scaled.abs().floor()
    magnitudes += (2 * (scaled.abs() - magnitudes)).floor()
    codes = (magnitudes * scaled.sign()).to(torch.int8).view(torch.uint8)
    return torch.cat((_half(scales), codes), dim=-1)


def _around_middle(blocks: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """Map the weight of the largest magnitude to code 0, which means -middle; the sign of the scale
    follows from that. Returns scales [blocks, 1] and codes [blocks, 32] uint8."""
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = largest / -middle
    scaled = blocks * _inverse(scales) + (middle + 0.5)
    return scales, scaled.to(torch.uint8).clamp_(max=2 * middle - 1)


def _to_q4_0(blocks: Tensor) -> Tensor:
    scales, codes = _around_middle(blocks, 8)
    return torch.cat((_half(scales), _packed(codes, 16, 4)), dim=-1)


def _to_q5_0(blocks: Tensor) -> Tensor:
    scales, codes = _around_middle(blocks, 16)
    fifth, low = _packed(codes >> 4, 1, 1), _packed(codes, 16, 4)
    return torch.cat((_half(scales), fifth, low), dim=-1)


def _to_q5_1(blocks: Tensor) -> Tensor:
    """Map the least weight to code 0, the greatest to 31."""
    minimum, maximum = blocks.aminmax(dim=-1, keepdim=True)
    scales = (maximum - minimum) / 31
    codes = ((blocks - minimum) * _inverse(scales) + 0.5).to(torch.uint8)
    fifth, low = _packed(codes >> 4, 1, 1), _packed(codes, 16, 4)
    return torch.cat((_half(scales), _half(minimum), fifth, low), dim=-1)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


# The search for the scale of a group. Groups are columns, [weights of a group, groups], because
# sums over rows are the fastest on a CPU.


def fit_above(groups: Tensor, max_code: int, tenths: range) -> tuple[Tensor, Tensor]:
    """Fit w = code * scale - minimum with codes 0..max_code and a minimum of at least 0.

    For each grid, weights are rounded to codes; scale and minimum then minimise the weighted
    squared error with these codes. The best fit so far is kept, and the next grid starts at its
    minimum. The importance of a weight is its magnitude plus the root mean square of its group.

    Args:
        groups: [width, groups] fp32.
        tenths: for each i, a grid that divides the range from the minimum to the largest weight
            into `max_code` + i / 10 steps.

    Returns:
        scales, minima: [groups] each.
    """
    importance = groups.abs() + groups.square().mean(0).sqrt()
    low = groups.amin(0).clamp_(max=0)
    span = groups.amax(0) - low
    above = (groups - low) * _inverse(span)  # [width, groups], 0..1
    weighted = importance * above
    ceiling = -low * _inverse(span)  # the offset of `above` where the minimum is 0
    w, wy = importance.sum(0), weighted.sum(0)
    scale, offset = torch.full_like(low, 1 / max_code), torch.zeros_like(low)
    best = torch.full_like(low, -torch.inf)
    codes, products = torch.empty_like(groups), torch.empty_like(groups)
    for tenth in tenths:
        torch.sub(above, offset, out=codes).mul_((max_code + tenth / 10) / (1 - offset))
        codes.round_().clamp_(0, max_code)
        wyc = torch.mul(weighted, codes, out=products).sum(0)
        wc = torch.mul(importance, codes, out=products).sum(0)
        wcc = products.mul_(codes).sum(0)
        # Normal equations of above = code * slope + start, with start <= ceiling.
        determinant = w * wcc - wc * wc
        slope = (w * wyc - wc * wy) / determinant
        start = (wy - slope * wc) / w
        start = torch.minimum(start, ceiling)
        slope = torch.where(start < ceiling, slope, (wyc - start * wc) / wcc)
        # How much smaller the squared error is than with all codes 0 and no minimum.
        gain = slope * (2 * wyc - slope * wcc - 2 * start * wc) + start * (2 * wy - start * w)
        better = (gain > best) & (determinant > 1e-5 * w * wcc)  # else all codes are equal
        best = torch.where(better, gain, best)
        scale = torch.where(better, slope, scale)
        offset = torch.where(better, start, offset)
    return (scale * span).clamp_(min=0), (-low - offset * span).clamp_(min=0)


def fit_around(groups: Tensor, middle: int, tenths: range) -> Tensor:
    """Fit w = code * scale with codes -middle..middle - 1; the largest magnitude has code -middle.

    Like `fit_above`; the importance of a weight is its square.

    Args:
        groups: [width, groups] fp32.
        tenths: for each i, a grid that divides the largest magnitude into `middle` + i / 10 steps.

    Returns:
        scales [groups], of either sign.
    """
    largest = groups.gather(0, groups.abs().argmax(0, keepdim=True))  # [1, groups]
    unit = groups * -_inverse(largest)  # [width, groups], -1..1
    importance = unit.square()
    weighted = importance * unit
    scale = best = torch.zeros_like(largest[0])
    codes, products = torch.empty_like(groups), torch.empty_like(groups)
    for tenth in tenths:
        torch.mul(unit, middle + tenth / 10, out=codes).round_().clamp_(-middle, middle - 1)
        wyc = torch.mul(weighted, codes, out=products).sum(0)
        wcc = codes.square_().mul_(importance).sum(0)
        slope = wyc * _inverse(wcc)
        gain = slope * wyc
        scale = torch.where(gain > best, slope, scale)
        best = torch.maximum(gain, best)
    return -scale * largest[0]


# Blocks of 256 weights.


def _k_codes(blocks: Tensor, max_code: int, tenths: range) -> tuple[Tensor, Tensor]:
    """Return the bytes before the codes, and the codes [blocks, 256] uint8, of Q4_K or Q5_K."""
    groups = blocks.view(len(blocks), 8, 32)
    fit = fit_above(blocks.view(-1, 32).t().contiguous(), max_code, tenths)
    scales, minima = (part.view(-1, 8) for part in fit)
    units, small_scales = _six_bits(scales)
    minimum_units, small_minima = _six_bits(minima)
    scales = units * small_scales
    minima = minimum_units * small_minima
    codes = ((groups + minima[..., None]) * _inverse(scales)[..., None]).round_()
    head = (
        _half(units),
        _half(minimum_units),
        _packed_k_scales(small_scales.to(torch.uint8), small_minima.to(torch.uint8)),
    )
    return torch.cat(head, dim=-1), codes.clamp_(0, max_code).to(torch.uint8).flatten(1)


def _six_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise numbers [blocks, 8] of at least 0 to six bits: return units [blocks, 1], exact in
    fp16, and codes 0..63."""
    units = (numbers.amax(-1, keepdim=True) / 63).half().float()
    return units, (numbers * _inverse(units)).round_().clamp_(max=63)


def _to_q4_k(blocks: Tensor) -> Tensor:
    head, codes = _k_codes(blocks, 15, range(-10, 11))
    return torch.cat((head, _packed(codes, 32, 4)), dim=-1)


def _to_q5_k(blocks: Tensor) -> Tensor:
    head, codes = _k_codes(blocks, 31, range(-5, 11))
    return torch.cat((head, _packed(codes >> 4, 32, 1), _packed(codes, 32, 4)), dim=-1)


def _to_q6_k(blocks: Tensor) -> Tensor:
    groups = blocks.view(len(blocks), 16, 16)
    scales = fit_around(blocks.view(-1, 16).t().contiguous(), 32, range(-9, 10)).view(-1, 16)
    largest = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
    units = (largest / -128).half().float()
    small = (scales * _inverse(units)).round_().clamp_(-128, 127)
    codes = (groups * _inverse(units * small)[..., None]).round_().clamp_(-32, 31) + 32
    codes = codes.to(torch.uint8).flatten(1)
    low, high = _packed(codes, 64, 4), _packed(codes >> 4, 32, 2)
    return torch.cat((low, high, _as_bytes(small.to(torch.int8)), _half(units)), dim=-1)


_QUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _to_q8_0,
    "Q4_0": _to_q4_0,
    "Q5_0": _to_q5_0,
    "Q5_1": _to_q5_1,
    "Q4_K": _to_q4_k,
    "Q5_K": _to_q5_k,
    "Q6_K": _to_q6_k,
}


LARGEST_SCALE = torch.finfo(torch.float16).max
# Largest magnitude that a type can store, limited by its numbers or its scales.
LARGEST = {
    **{type: torch.finfo(dtype).max for type, dtype in FLOAT_TYPES.items()},
    "Q8_0": 127 * LARGEST_SCALE,
    "Q4_0": 8 * LARGEST_SCALE,
    "Q5_0": 16 * LARGEST_SCALE,
    "Q5_1": LARGEST_SCALE,  # the least weight is stored as it is
    "Q4_K": 32 * LARGEST_SCALE,  # half the largest minimum, which a fit may exceed by a step
    "Q5_K": 32 * LARGEST_SCALE,
    "Q6_K": 31 * 127 * LARGEST_SCALE,
}


def gguf_tensors(checkpoint: Checkpoint, spec: ModelSpec, type: str) -> list[OutTensor]:
    """Return the tensors of a file of a type of `FILE_TYPES`.

    Their values are read when they are written, a run of rows at a time. Vectors stay F32, matrices
    get their `block_type`; all experts of a layer become one tensor. A head that repeats the
    embedding is left out.

    Raises:
        ModelError: the checkpoint is quantised, or holds a tensor that GGUF has no name for.
    """
    groups: dict[str, list[_Source]] = {}
    for source in _sources(checkpoint, spec):
        groups.setdefault(source.name, []).append(source)
    tensors = []
    for name, sources in groups.items():
        shape = sources[0].shape
        blocks = "F32" if len(shape) == 1 else block_type(type, name, shape[-1], spec)
        tensors.append(_tensor(checkpoint, sources, sources[0].blocks or blocks))
    divisors = rope_divisors(spec)
    if divisors is not None:
        data = struct.pack(f"<{len(divisors)}f", *divisors)
        shape = (len(divisors),)
        tensors.append(OutTensor(ROPE_FACTORS, BLOCK_TYPES["F32"], shape, lambda: iter([data])))
    return tensors


def gguf_numbers(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, list[float]]:
    """Return the metadata of a file that are tensors of blocks in a checkpoint."""
    keys, block = gguf_family(spec).gguf_numbers, spec.declaration.block
    layers = range(spec.num_layers)
    places = {block.format(i) + name: (key, i) for key, name in keys.items() for i in layers}
    values = {key: [0.0] * spec.num_layers for key in keys}
    for run in checkpoint.runs(dict.fromkeys(places.keys() & checkpoint.entries.keys(), WHOLE)):
        key, layer = places[run.name]
        values[key][layer] = float(run.values)
    return values


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of a file, or an expert's part of one."""

    name: str  # of the tensor in the file
    entries: tuple[TensorEntry, ...]  # the tensors of the checkpoint that it is made of
    shape: tuple[int, ...]  # of the result
    # Computes it from their values; None: the values are copied, in runs of rows.
    make: Callable[..., Tensor] | None = None
    blocks: str = ""  # the block type if `make` returns bytes; "": it returns numbers
    expert: int = -1  # number of the expert; -1: it is a whole tensor


UNREAD = "rotary_emb.inv_freq"  # of old checkpoints


def text_name(name: str) -> str:
    """Return the name that a tensor has in a checkpoint of the text model alone."""
    for trunk in TRUNKS:
        if name.startswith(f"{trunk}."):
            return f"model{name.removeprefix(trunk)}"
    return name.removeprefix(f"{TEXT_MODEL}.")


def _sources(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[_Source]:
    """Yield the sources of the file's tensors, from the tensors of a checkpoint.

    Raises:
        ModelError: see `gguf_tensors`.
    """
    family, declared = gguf_family(spec), spec.declaration
    names, entries = family.gguf_names, checkpoint.entries
    made = {text_name(name): change for name, change in changes(spec, family).items()}
    full_shapes = {text_name(name): shape for name, shape in shapes(spec).items()}
    in_file = {text_name(name): shape for name, shape in file_shapes(spec, family).items()}
    of_file = family.gguf_parts
    parts = {} if of_file is None or spec.wiring == SEPARATE else of_file(spec)
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
        if match and f"{layer}.{match[3]}" in family.gguf_numbers.values():
            continue
        number = re.search(r"\.(\d+)(?=\.|$)", layer)
        expert = int(number[1]) if number else -1
        if match and (file_parts := parts.get(numberless(layer))) is not None:
            for part in file_parts:
                layer_name = block.format(match[1]) + part.name.format(expert)
                made_of = _part(part, layer_name, match[3], entries, stored, names)
                if made_of is not None:
                    yield replace(made_of, expert=expert)
            continue
        name = gguf_name(hf, names)
        if name == HEAD and spec.tie_word_embeddings:
            continue
        if name is None or not TORCH_DTYPES[entry.dtype].is_floating_point:
            raise _no_place(stored, entry)
        change, shape = made.get(hf), in_file.get(hf, entry.shape)
        if change is not None and entry.shape[0] % change.unit:
            raise ModelError("model", f"tensor {shown(stored)} {change.reason}")
        if shape == full_shapes.get(hf):
            shape = tuple(size for size in shape if size > 1)
        make = None if change is None else change.to_file
        yield _Source(name, (entry,), shape, make, expert=expert)


def _no_place(name: str, entry: TensorEntry) -> ModelError:
    return ModelError("model", f"tensor {shown(name)} ({entry.dtype}) has no place in GGUF")


def _part(
    part: FilePart,
    layer_name: str,
    last: str,
    entries: Mapping[str, TensorEntry],
    stored: str,
    names: Mapping[str, str],
) -> _Source | None:
    """Return a part of a layer; None for scales, which are returned with their blocks.

    Args:
        layer_name: name of the layer that the part is read as.
        last: last component of the tensor's name.
        stored: the tensor's name in the checkpoint.
    """
    entry = entries[stored]
    name = gguf_name(f"{layer_name}.{'weight' if last in (BLOCKS, SCALES) else last}", names)
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
    """Return the part of a tensor, see `FilePart`. A bias has only rows."""
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
    """Return one tensor, from one source or the sources of all experts of a layer, concatenated."""
    sources.sort(key=lambda source: source.expert)
    name = sources[0].name

    def data() -> Iterator[memoryview]:
        for source in sources:
            if source.make is None:
                for run in checkpoint.runs({source.entries[0].name: IN_RUNS}):
                    yield _bytes(type, name, run.values)
                continue
            selections = dict.fromkeys((entry.name for entry in source.entries), WHOLE)
            read = {run.name: run.values.clone() for run in checkpoint.runs(selections)}
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
        reason = f"tensor {shown(name)} has numbers above {LARGEST[type]:.6g}, too large for {type}"
        raise ModelError("model", reason)
    rows = values.flatten(0, -2) if values.dim() > 1 else values.view(1, -1)
    return _raw(quantize(type, rows))
