"""Stored weights: every tensor by name, read a run of rows at a time; and those of a folder."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from itertools import cycle, groupby
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.files import regular
from kvik.nn.safetensors import TensorEntry, read_header
from kvik.spec.fields import Fields, read_json

# Parts of a file, the next one being read while one is used.


@dataclass(frozen=True, slots=True)
class Spans:
    """Bytes of a file that are read one behind the other.

    Attributes:
        parts: first byte and number of bytes of each.
        stride, count: all parts are read `count` times, each time `stride` bytes further.
    """

    parts: tuple[tuple[int, int], ...]
    stride: int = 0
    count: int = 1

    @property
    def size(self) -> int:
        return self.count * sum(size for _, size in self.parts)


def read_ahead(path: Path, reads: Sequence[Spans]) -> Iterator[Tensor]:
    """Each of `reads` as [bytes] uint8, valid until the next one is asked for.

    The file is read and not mapped: pages that have to be mapped cost more time than the copy, and
    a file that gets shorter ends in an error and not in a signal.

    Raises:
        ModelError: the file cannot be read or has become shorter.
    """
    largest = max((spans.size for spans in reads), default=0)
    buffers = cycle([np.empty(largest, np.uint8), np.empty(largest, np.uint8)])
    try:
        with (
            open(path, "rb", buffering=0, opener=regular) as file,
            ThreadPoolExecutor(1) as reader,
        ):
            begun = deque[Future[np.ndarray]]()
            for spans in reads:
                begun.append(reader.submit(_read, file, spans, next(buffers)))
                if len(begun) == 2:
                    yield torch.from_numpy(begun.popleft().result())
            for last in begun:
                yield torch.from_numpy(last.result())
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from None
    except EOFError:
        raise ModelError(path.name, "has become shorter than its header says") from None


def _read(file: FileIO, spans: Spans, buffer: np.ndarray) -> np.ndarray:
    end = 0
    for i in range(spans.count):
        for start, size in spans.parts:
            file.seek(start + i * spans.stride)
            left = buffer[end : end + size].data
            end += size
            while left:
                count = file.readinto(left)
                if not count:
                    raise EOFError
                left = left[count:]
    return buffer[:end]


# How many rows of a tensor are worked on at a time.

ROW_MULTIPLE = 32  # kernels lay rows together in tiles of this size


def run_length(most: int) -> int:
    """Rows of a run, where about `most` of them fit."""
    return max(1, most // ROW_MULTIPLE * ROW_MULTIPLE or most)


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
RUN_BYTES = 2 << 20  # read at once
# The same where rows are columns of the file. They are read in a piece for each row of the file, of
# 1.6 KB where it has 5,120.
TURNED_BYTES = 8 << 20
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is read of a tensor.

    Attributes:
        in_runs: it may come in runs of rows, in any order; else all that is read of it comes at
            once.
        axis, ranges: only these parts of one dimension are read, first and end of each, in order;
            what comes at once has one behind the other. (): it does not come. None: all is read.
    """

    in_runs: bool
    axis: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None

    def length(self, shape: Sequence[int]) -> int:
        """Return how much of the dimension is read, of a tensor of this shape."""
        if self.ranges is None:
            return shape[self.axis]
        return sum(end - first for first, end in self.ranges)

    def of(self, values: Tensor) -> Tensor:
        """Return what would be read of these values, at once."""
        if self.ranges is None:
            return values
        some = [values.narrow(self.axis, first, end - first) for first, end in self.ranges]
        return torch.cat(some, self.axis)


WHOLE, IN_RUNS = Selection(False), Selection(True)


def selected_bytes(entry: TensorEntry, selection: Selection) -> int:
    """Return the bytes of what is read of a tensor."""
    if selection.ranges is None:
        return entry.size
    return entry.size // entry.shape[selection.axis] * selection.length(entry.shape)


@dataclass(frozen=True, slots=True)
class TensorRun:
    """A tensor, or what is read of it at once.

    Attributes:
        name: of the tensor.
        first: row of the tensor, where it comes in runs of rows; else 0.
        values: valid until the next run is asked for.
    """

    name: str
    first: int
    values: Tensor


class Checkpoint(Protocol):
    """Weights under the names that models declare; opening them read and checked no more than what
    they are."""

    @property
    def facts(self) -> str:
        """The file that says of what sizes the model is, for errors."""
        ...

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors, by name."""
        ...

    def runs(self, wanted: Mapping[str, Selection]) -> Iterator[TensorRun]:
        """The named tensors in an order that is good to read, in pieces. Nothing else is read.

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

    def runs(self, wanted: Mapping[str, Selection]) -> Iterator[TensorRun]:
        """See `Checkpoint`: file by file and layer by layer."""
        for path, entries in self.files:
            pieces = [
                piece
                for entry in _by_layer([entry for entry in entries if entry.name in wanted])
                for piece in _pieces(entry, wanted[entry.name])
            ]
            # Gate and up of an expert may be columns of one matrix, which is read once.
            reads = [(spans, list(same)) for spans, same in groupby(pieces, lambda p: p.spans)]
            found = read_ahead(path, [spans for spans, _ in reads])
            for (_, same), data in zip(reads, found, strict=True):
                for piece in same:
                    yield TensorRun(piece.entry.name, piece.first, piece.entry.values(data))


def open_checkpoint(folder: str | Path, modules: Sequence[str] = ()) -> FolderCheckpoint:
    """Find and validate the weights in a folder: one file, or several with an index.

    Args:
        modules: folders inside it with a file of their own, whose tensors get the folder's name
            before theirs.

    Raises:
        ModelError: nothing that can be loaded, or a malformed header or index.
    """
    folder = Path(folder)
    if modules:
        files = list(open_checkpoint(folder).files)
        for module in modules:
            found = open_checkpoint(folder / module).files
            for path, entries in found:
                named = (replace(entry, name=f"{module}.{entry.name}") for entry in entries)
                files.append((path, tuple(named)))
        return FolderCheckpoint(tuple(files))
    if (folder / SINGLE).exists():
        entries = read_header(folder / SINGLE)
        return FolderCheckpoint(((folder / SINGLE, unstacked(entries, shapes_of(entries))),))
    if (folder / INDEX).exists():
        return _open_sharded(folder)
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


# Tensors of all experts of a layer in one, as newer versions of transformers write them, and as
# Granite always had them.
STACKED = re.compile(r"(.+\.experts)\.([a-z_]+_proj)(?:_(bias|blocks|scales))?")
LINEARS = re.compile(r"(.+\.(?:input|output)_linear)\.weight")
GATE_UP = "gate_up_proj"  # gate and up of an expert, its rows in the middle


def shapes_of(entries: Sequence[TensorEntry]) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.shape for entry in entries}


def unstacked(
    entries: Sequence[TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[TensorEntry, ...]:
    """Return the tensors with those of each expert by themselves, which are parts of the file too.

    `experts.down_proj` becomes `experts.0.down_proj.weight` and so on. Gate and up are cut apart,
    where an expert has those of one behind those of the other: not in gpt-oss, which mixes them.
    Where experts have [inputs, outputs] (Llama 4), their rows are columns.

    Args:
        shapes: of all tensors of the checkpoint.
    """
    found: list[TensorEntry] = []
    for entry in entries:
        count = entry.shape[0] if entry.shape else 0
        match, linear = STACKED.fullmatch(entry.name), LINEARS.fullmatch(entry.name)
        if linear is not None and len(entry.shape) == 3:
            found += _parts(entry, 1, [f"{linear[1]}.{expert}.weight" for expert in range(count)])
        elif match is not None and len(entry.shape) > 1:
            scope, layer, part = match[1], match[2], match[3] or "weight"
            layers = [layer]
            mixed = f"{scope}.{GATE_UP}_bias" in shapes
            turned = not mixed and _turned(scope, shapes)
            if layer == GATE_UP and not mixed and entry.shape[2 if turned else 1] % 2 == 0:
                layers = ["gate_proj", "up_proj"]
            own = [f"{scope}.{e}.{layer}.{part}" for e in range(count) for layer in layers]
            found += (_columns if turned else _parts)(entry, len(layers), own)
        else:
            found.append(entry)
    return tuple(found)


def _parts(entry: TensorEntry, each: int, names: Sequence[str]) -> Iterator[TensorEntry]:
    """Yield the tensors of all experts, `each` of them for each expert, one behind the other."""
    _, rows, *rest = entry.shape
    for i, name in enumerate(names):
        size = entry.size // len(names)
        yield TensorEntry(name, entry.dtype, (rows // each, *rest), entry.start + i * size, size)


def _turned(scope: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether experts have [inputs, outputs]: down has then half as many inputs as gate and
    up have columns, and as many outputs as these have rows."""
    gate_up, down = shapes.get(f"{scope}.{GATE_UP}", ()), shapes.get(f"{scope}.down_proj", ())
    if len(gate_up) != 3 or len(down) != 3:
        return False
    return gate_up[1:] == (down[2], 2 * down[1])


def _columns(entry: TensorEntry, each: int, names: Sequence[str]) -> Iterator[TensorEntry]:
    """As `_parts`, of experts that have [inputs, outputs]."""
    count, inputs, width = entry.shape
    rows, size = width // each, entry.size // count
    for i, name in enumerate(names):
        start = entry.start + i // each * size
        columns = i % each * rows, width
        yield TensorEntry(name, entry.dtype, (rows, inputs), start, size // each, columns)


def _by_layer(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Tensors of a layer together, the largest last, in the order in which the file begins layers.

    Files are often sorted by type. Then what waits for the last tensor of its layer would be half
    of the file.
    """
    begins: dict[str, int] = {}
    for entry in entries:
        begins.setdefault(entry.name.rpartition(".")[0], entry.start)
    return sorted(entries, key=lambda e: (begins[e.name.rpartition(".")[0]], e.size))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A `TensorRun` to be read.

    Attributes:
        entry: of what is read, as if that were a tensor by itself.
    """

    first: int
    entry: TensorEntry
    spans: Spans


def _pieces(entry: TensorEntry, selection: Selection) -> Iterator[_Piece]:
    ranges, turned = selection.ranges, entry.columns is not None
    most = TURNED_BYTES if turned else RUN_BYTES
    if ranges is None and (entry.span[1] <= most or not selection.in_runs):
        yield _Piece(0, entry, Spans((entry.span,)))
    elif selection.in_runs:
        row_bytes = entry.size // entry.shape[0]
        for begin, end in ((0, entry.shape[0]),) if ranges is None else ranges:
            step = end - begin
            if step * row_bytes > most:
                step = run_length(most // row_bytes)
            for first in range(begin, end, step):
                rows = Selection(True, 0, ((first, min(first + step, end)),))
                yield _cut(first, entry, rows)
    elif ranges:
        yield _cut(0, entry, selection)


def _cut(first: int, entry: TensorEntry, selection: Selection) -> _Piece:
    """The parts of a tensor that are selected, at once."""
    axis, ranges, shape = selection.axis, selection.ranges or (), entry.shape
    inner = entry.size // prod(shape[: axis + 1])  # bytes from one place on the axis to the next
    count, stride, start, columns = prod(shape[:axis]), shape[axis] * inner, entry.start, None
    length = selection.length(shape)
    if entry.columns is not None:  # rows are columns of the file
        inner //= shape[1]
        count, stride, columns = shape[1], entry.columns[1] * inner, (0, length)
        start += entry.columns[0] * inner
    parts = tuple((start + low * inner, (high - low) * inner) for low, high in ranges)
    spans = Spans(parts, stride, count)
    own = replace(
        entry,
        shape=(*shape[:axis], length, *shape[axis + 1 :]),
        start=start,
        size=spans.size,
        columns=columns,
    )
    return _Piece(first, own, spans)
