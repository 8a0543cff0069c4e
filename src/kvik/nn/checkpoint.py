"""Reads checkpoints: every tensor by name, a run of rows at a time; and folders of safetensors."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.files import SAFETENSORS, SAFETENSORS_INDEX, is_named, regular
from kvik.nn.safetensors import TensorEntry, read_header
from kvik.spec.engine_folder import MANIFEST, WEIGHTS, rebuild
from kvik.spec.fields import Fields, read_json

# Reading parts of a file ahead: one is read while the one before is used.


GPU_READERS = 4  # threads
PINNED_BYTES = 256 << 20  # of their buffers, unless a single read needs more
ALIGNMENT = 64  # bytes, of buffers


@dataclass(frozen=True, slots=True)
class Spans:
    """Byte ranges of a file that are read into one buffer, in order."""

    parts: tuple[tuple[int, int], ...]  # first byte and number of bytes of each
    # stride, count: all parts are read `count` times, each time `stride` bytes further.
    stride: int = 0
    count: int = 1

    @property
    def size(self) -> int:
        return self.count * sum(size for _, size in self.parts)


def read_ahead(path: Path, reads: Sequence[Spans]) -> Iterator[Tensor]:
    """Yield each of `reads` as [bytes] uint8, valid until the next one is requested.

    The file is read, not mapped: mapping pages costs more time than the copy, and a file that gets
    shorter causes an error, not a signal. For a GPU, several threads read into pinned memory: one
    copies less per second than the link to the device.

    Raises:
        ModelError: the file cannot be read or has become shorter.
    """
    sizes = [spans.size for spans in reads]
    largest = -(-max(sizes, default=1) // ALIGNMENT) * ALIGNMENT
    on_gpu = torch.cuda.is_initialized()
    readers = max(1, min(GPU_READERS, PINNED_BYTES // largest - 1)) if on_gpu else 1
    buffers = cycle(torch.empty(1 + readers, largest, dtype=torch.uint8, pin_memory=on_gpu))
    try:
        with open(path, "rb", buffering=0, opener=regular) as file:
            number = file.fileno()
            if sum(sizes) <= RUN_BYTES:  # to start a thread and wait for it would take longer
                for spans in reads:
                    yield _read(number, spans, next(buffers))
                return
            with ThreadPoolExecutor(readers) as pool:
                futures = deque[Future[Tensor]]()
                for spans in reads:
                    futures.append(pool.submit(_read, number, spans, next(buffers)))
                    if len(futures) == 1 + readers:
                        yield futures.popleft().result()
                for last in futures:
                    yield last.result()
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None
    except EOFError:
        raise ModelError(path.name, "has become shorter than its header says") from None


def _read(file: int, spans: Spans, buffer: Tensor) -> Tensor:
    """Read from the file with this descriptor."""
    end = 0
    for i in range(spans.count):
        for start, size in spans.parts:
            at, view = start + i * spans.stride, buffer[end : end + size].numpy().data
            end += size
            while view:
                count = os.preadv(file, [view], at)
                if not count:
                    raise EOFError
                at, view = at + count, view[count:]
    return buffer[:end]


# Number of rows of a tensor that are loaded at a time.

ROW_MULTIPLE = 32  # rows of a tile of the kernels


def run_length(limit: int) -> int:
    """Return the number of rows of a run of about `limit` rows: a multiple of tiles if possible."""
    return max(1, limit // ROW_MULTIPLE * ROW_MULTIPLE or limit)


SINGLE, INDEX = SAFETENSORS, SAFETENSORS_INDEX
RUN_BYTES = 2 << 20  # read at once
# The same if rows are columns of the file. Then each row of the file is read in a separate chunk,
# which has 1.6 KB if the file has 5,120 rows.
TRANSPOSED_BYTES = 8 << 20
WIDE_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a tensor to read."""

    in_runs: bool  # it may be read in runs of rows, in any order; else it is read at once
    # axis, ranges: the ranges of one dimension to read, first and end of each, in order; if read at
    # once, they are concatenated. (): nothing is read. None: everything is read.
    axis: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None

    def length(self) -> int:
        """Return the selected length of the dimension, if not everything is read."""
        return sum(end - first for first, end in self.ranges or ())

    def of(self, values: Tensor) -> Tensor:
        """Return the selected part of these values."""
        if self.ranges is None:
            return values
        ranges = self.ranges or ((0, 0),)
        some = [values.narrow(self.axis, first, end - first) for first, end in ranges]
        return torch.cat(some, self.axis)


WHOLE, IN_RUNS = Selection(False), Selection(True)


def selected_bytes(entry: TensorEntry, selection: Selection) -> int:
    """Return the bytes of the selected part of a tensor."""
    if selection.ranges is None:
        return entry.size
    return entry.size // entry.shape[selection.axis] * selection.length()


@dataclass(frozen=True, slots=True)
class TensorRun:
    """A tensor, or the part of it that is read at once."""

    name: str  # of the tensor
    first: int  # first row of the run, if the tensor is read in runs; else 0
    values: Tensor  # valid until the next run is requested

    def check_finite(self) -> None:
        """Raise ModelError if floats, other than those of 8 bits, are NaN or infinite."""
        values = self.values
        # A sum is a single pass, and finite only if all values are.
        if (
            values.dtype in WIDE_FLOATS
            and not bool(values.sum().isfinite())
            and not bool(values.isfinite().all())
        ):
            raise ModelError("model", f"tensor {shown(self.name)} holds NaN or infinity")


class Checkpoint(Protocol):
    """Weights under the names that models declare. Opening a checkpoint reads and validates only
    descriptions of tensors."""

    @property
    def facts(self) -> str:
        """The file that declares the sizes of the model, for errors."""
        ...

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors, by name."""
        ...

    def runs(self, selections: Mapping[str, Selection]) -> Iterator[TensorRun]:
        """Yield the named tensors in runs, in an order that is fast to read. Reads nothing else.

        Raises:
            ModelError: a file cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class FolderCheckpoint:
    """The validated headers of a model's safetensors files; data is read only by `runs`."""

    files: tuple[tuple[Path, tuple[TensorEntry, ...]], ...]
    facts: str = "config.json"

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return {entry.name: entry for _, entries in self.files for entry in entries}

    def runs(self, selections: Mapping[str, Selection]) -> Iterator[TensorRun]:
        """See `Checkpoint`: file by file and layer by layer."""
        for path, entries in self.files:
            chunks = [
                chunk
                for entry in _by_layer([entry for entry in entries if entry.name in selections])
                for chunk in _chunks(entry, selections[entry.name])
            ]
            # Gate and up of an expert may be columns of one matrix, which is read once.
            reads = [(spans, list(group)) for spans, group in groupby(chunks, lambda p: p.spans)]
            buffers = read_ahead(path, [spans for spans, _ in reads])
            for (_, group), data in zip(reads, buffers, strict=True):
                for chunk in group:
                    yield TensorRun(chunk.entry.name, chunk.first, chunk.entry.values(data))


def open_checkpoint(folder: str | Path, modules: Sequence[str] = ()) -> FolderCheckpoint:
    """Find and validate the weights in a folder: one file, or several with an index.

    Args:
        modules: subfolders with separate weights, whose names get the subfolder's name as prefix.

    Raises:
        ModelError: there is nothing that can be loaded, or a header or index is malformed.
    """
    folder = Path(folder)
    if modules:
        files = list(open_checkpoint(folder).files)
        for module in modules:
            module_files = open_checkpoint(folder / module).files
            for path, entries in module_files:
                named = (replace(entry, name=f"{module}.{entry.name}") for entry in entries)
                files.append((path, tuple(named)))
        return FolderCheckpoint(tuple(files))
    if is_named(folder / SINGLE):
        entries = read_header(folder / SINGLE)
        return FolderCheckpoint(((folder / SINGLE, unstacked(entries, shapes_of(entries))),))
    if is_named(folder / INDEX):
        return _open_sharded(folder)
    if (folder / WEIGHTS).exists():
        reason = f"is missing: the folder has the weights of an engine. {rebuild(folder)}"
        raise ModelError(MANIFEST, reason)
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if name.endswith(PICKLED):
            raise ModelError(
                "model",
                f"{shown(name)} is a pickle, which runs code when it is opened; "
                "convert it to safetensors",
            )
    raise ModelError("model", f"must hold {SINGLE} or {INDEX}; {str(folder)!r} has neither")


def _open_sharded(folder: Path) -> FolderCheckpoint:
    index = Fields(read_json(folder / INDEX), INDEX)
    owners = index.mapping("weight_map")
    if not owners:
        raise index.error("weight_map", "must map tensor names to files")
    for file in owners.values():
        good = isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file
        if not good:
            raise index.error("weight_map", f"must name files of its folder, not {shown(file)}")
    files: list[tuple[Path, tuple[TensorEntry, ...]]] = []
    present: dict[str, tuple[int, ...]] = {}
    for file in sorted({str(file) for file in owners.values()}):
        entries = read_header(folder / file)
        for entry in entries:
            owner = owners.get(entry.name)
            if owner != file:
                where = f"puts it in {shown(owner)}" if owner else "does not list it"
                raise ModelError(file, f"tensor {shown(entry.name)}: {INDEX} {where}")
        present |= shapes_of(entries)
        files.append((folder / file, entries))
    for name, file in owners.items():
        if name not in present:
            raise index.error("weight_map", f"puts tensor {shown(name)} in {file}, which lacks it")
    return FolderCheckpoint(tuple((path, unstacked(entries, present)) for path, entries in files))


# Tensors that stack all experts of a layer: those of newer versions of transformers, and of Granite
# and Step, with scales of blocks of FP8, in every version.
STACKED = re.compile(r"(.+\.experts)\.([a-z_]+_proj)(?:_(bias|blocks|scales))?")
LINEARS = re.compile(
    r"(.+\.(?:(?:input|output)_linear|moe\.(?:gate|up|down)_proj))\.(weight(?:_scale_inv)?)"
)
# The same in two dimensions, in DBRX; the router says how many experts there are.
ROWS = re.compile(r"(.+)\.experts\.mlp\.(w1|v1|w2)")
GATE_UP = "gate_up_proj"  # gate and up of each expert


def shapes_of(entries: Sequence[TensorEntry]) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.shape for entry in entries}


def unstacked(
    entries: Sequence[TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[TensorEntry, ...]:
    """Replace stacked tensors by a separate tensor for each expert, which is a part of the file
    too.

    `experts.down_proj` becomes `experts.0.down_proj.weight` and so on. Gate and up are separated
    unless they are interleaved, as in gpt-oss. If experts are stored as [inputs, outputs] (Llama 4;
    in DBRX the second matrix), the rows of the new tensors are columns of the file.

    Args:
        shapes: of all tensors of the checkpoint.
    """
    result: list[TensorEntry] = []
    for entry in entries:
        count = entry.shape[0] if entry.shape else 0
        match, linear = STACKED.fullmatch(entry.name), LINEARS.fullmatch(entry.name)
        rows = ROWS.fullmatch(entry.name)
        if rows is not None and len(entry.shape) == 2:
            scope, layer = rows[1], rows[2]
            experts = max(1, (shapes.get(f"{scope}.router.layer.weight") or (1,))[0])
            names = [f"{scope}.experts.{expert}.{layer}.weight" for expert in range(experts)]
            stacked = replace(entry, shape=(experts, count // experts, entry.shape[1]))
            result += (_columns if layer == "w2" else _parts)(stacked, 1, names)
        elif linear is not None and len(entry.shape) == 3:
            names = [f"{linear[1]}.{expert}.{linear[2]}" for expert in range(count)]
            result += _parts(entry, 1, names)
        elif match is not None and len(entry.shape) > 1:
            scope, layer, part = match[1], match[2], match[3] or "weight"
            layers = [layer]
            mixed = f"{scope}.{GATE_UP}_bias" in shapes
            transposed = not mixed and _is_transposed(scope, shapes)
            if layer == GATE_UP and not mixed and entry.shape[2 if transposed else 1] % 2 == 0:
                layers = ["gate_proj", "up_proj"]
            names = [f"{scope}.{e}.{layer}.{part}" for e in range(count) for layer in layers]
            result += (_columns if transposed else _parts)(entry, len(layers), names)
        else:
            result.append(entry)
    return tuple(result)


def _parts(entry: TensorEntry, per_expert: int, names: Sequence[str]) -> Iterator[TensorEntry]:
    """Yield the tensors of all experts, `per_expert` consecutive ones per expert."""
    _, rows, *rest = entry.shape
    for i, name in enumerate(names):
        size = entry.size // len(names)
        yield TensorEntry(
            name, entry.dtype, (rows // per_expert, *rest), entry.start + i * size, size
        )


def _is_transposed(scope: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether experts are stored as [inputs, outputs]: then down has half as many rows as
    gate and up have columns, and as many columns as these have rows."""
    gate_up, down = shapes.get(f"{scope}.{GATE_UP}", ()), shapes.get(f"{scope}.down_proj", ())
    return len(down) == 3 and gate_up[1:] == (down[2], 2 * down[1])


def _columns(entry: TensorEntry, per_expert: int, names: Sequence[str]) -> Iterator[TensorEntry]:
    """Like `_parts`, for experts stored as [inputs, outputs]."""
    count, inputs, width = entry.shape
    rows, size = width // per_expert, entry.size // count
    for i, name in enumerate(names):
        start = entry.start + i // per_expert * size
        columns = i % per_expert * rows, width
        yield TensorEntry(name, entry.dtype, (rows, inputs), start, size // per_expert, columns)


def _by_layer(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Sort tensors by the file order of their layers; within a layer, the largest is last.

    Files are often sorted by dtype. In file order, half of the file would wait in memory for the
    last tensors of the layers.
    """
    begins: dict[str, int] = {}
    for entry in entries:
        begins.setdefault(layer_of(entry.name)[0], entry.start)
    return sorted(entries, key=lambda e: (begins[layer_of(e.name)[0]], e.size))


def layer_of(name: str) -> tuple[str, str]:
    """Return the layer of a tensor, and the tensor's name within it: "weight", or as bitsandbytes
    names the parts of a weight, "weight.absmax"."""
    layer, within, part = name.partition(".weight.")
    if within:
        return layer, f"weight.{part}"
    layer, _, part = name.rpartition(".")
    return layer, part


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A `TensorRun` to be read."""

    first: int
    entry: TensorEntry  # describes the part to read like a separate tensor
    spans: Spans


def _chunks(entry: TensorEntry, selection: Selection) -> Iterator[_Chunk]:
    ranges, transposed = selection.ranges, entry.columns is not None
    limit = TRANSPOSED_BYTES if transposed else RUN_BYTES
    if ranges is None and (entry.span[1] <= limit or not selection.in_runs):
        yield _Chunk(0, entry, Spans((entry.span,)))
    elif selection.in_runs:
        row_bytes = entry.size // entry.shape[0]
        for begin, end in ((0, entry.shape[0]),) if ranges is None else ranges:
            step = end - begin
            if step * row_bytes > limit:
                step = run_length(limit // row_bytes)
            for first in range(begin, end, step):
                rows = Selection(True, 0, ((first, min(first + step, end)),))
                yield _cut(first, entry, rows)
    elif ranges:
        yield _cut(0, entry, selection)


def _cut(first: int, entry: TensorEntry, selection: Selection) -> _Chunk:
    """Return the selected ranges of a tensor as one chunk."""
    axis, ranges, shape = selection.axis, selection.ranges or (), entry.shape
    inner = entry.size // prod(shape[: axis + 1])  # bytes between neighbours on the axis
    count, stride, start, columns = prod(shape[:axis]), shape[axis] * inner, entry.start, None
    length = selection.length()
    if entry.columns is not None:  # rows are columns of the file
        inner //= shape[1]
        count, stride, columns = shape[1], entry.columns[1] * inner, (0, length)
        start += entry.columns[0] * inner
    parts = tuple((start + low * inner, (high - low) * inner) for low, high in ranges)
    spans = Spans(parts, stride, count)
    part = replace(
        entry,
        shape=(*shape[:axis], length, *shape[axis + 1 :]),
        start=start,
        size=spans.size,
        columns=columns,
    )
    return _Chunk(first, part, spans)
