"""The weights of a GGUF file under the names and in the order of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm, prod
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.files import is_gguf
from kvik.gguf.facts import family_of, gguf_model_spec, named_tensors
from kvik.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from kvik.gguf.reader import GgufFile, GgufTensor, read_gguf
from kvik.nn.checkpoint import (
    ROW_MULTIPLE,
    RUN_BYTES,
    Checkpoint,
    Selection,
    Spans,
    TensorRun,
    open_checkpoint,
    read_ahead,
    run_length,
)
from kvik.nn.gguf_layout import Change, changes, shapes
from kvik.nn.safetensors import TORCH_DTYPES, TensorEntry

BYTES = "U8"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A `TensorRun` to be read: `rows` rows of a tensor from `first` on.

    Attributes:
        order: [rows] int64, the rows of the file that they are; None: as many from `first` on,
            which are still to be changed.
    """

    tensor: GgufTensor
    first: int
    rows: int
    order: Tensor | None = None

    @property
    def spans(self) -> Spans:
        size, start = _row_bytes(self.tensor), self.tensor.start
        if self.order is None:
            return Spans(((start + self.first * size, self.rows * size),))
        found = self.order.sort().values
        breaks = (found.diff() != 1).nonzero().flatten().add_(1).tolist()
        runs = pairwise([0, *breaks, len(found)])
        return Spans(tuple((start + int(found[a]) * size, (b - a) * size) for a, b in runs))


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """See `Checkpoint`. Floats are what they are; blocks are bytes [rows, bytes of a row], for a
    weight format to take apart.

    Attributes:
        tensors: by their names in checkpoints, in the order of the file.
        changes: what makes tensors of the file those of checkpoints, by their names in these.
    """

    file: GgufFile
    tensors: Mapping[str, GgufTensor]
    changes: Mapping[str, Change]

    @property
    def facts(self) -> str:
        return f"the metadata of {self.file.path.name}"

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return {
            name: TensorEntry(name, _dtype(tensor), _shape(tensor), tensor.start, tensor.size)
            for name, tensor in self.tensors.items()
        }

    def runs(self, wanted: Mapping[str, Selection]) -> Iterator[TensorRun]:
        """See `Checkpoint`: in the order of the file. What does not come in runs of rows is read
        whole."""
        pieces = [
            (name, piece)
            for name, tensor in self.tensors.items()
            if name in wanted and wanted[name].ranges != ()
            for piece in self._pieces(name, tensor, wanted[name])
        ]
        data = read_ahead(self.file.path, [piece.spans for _, piece in pieces])
        for (name, piece), read in zip(pieces, data, strict=True):
            values = self._values(name, piece, read)
            if not wanted[name].in_runs:
                values = wanted[name].of(values)
            yield TensorRun(name, piece.first, values)

    def _pieces(self, name: str, tensor: GgufTensor, selection: Selection) -> Iterator[_Piece]:
        rows, change = prod(tensor.shape[:-1]), self.changes.get(name)
        if not selection.in_runs or len(tensor.shape) != 2:
            yield _Piece(tensor, 0, rows)
            return
        step = run_length(RUN_BYTES // _row_bytes(tensor))
        ranges, order = selection.ranges, None
        if change is not None and ranges is None:
            whole = lcm(change.unit, ROW_MULTIPLE)
            step = max(1, step // whole) * whole
        elif change is not None:  # of matrices it moves rows and no more
            order = change.from_file(torch.arange(rows)[:, None]).flatten()
        for begin, end in ((0, rows),) if ranges is None else ranges:
            for first in range(begin, end, step):
                last = min(first + step, end)
                yield _Piece(
                    tensor, first, last - first, None if order is None else order[first:last]
                )

    def _values(self, name: str, piece: _Piece, read: Tensor) -> Tensor:
        """read [bytes] -> the values of a piece."""
        _, *rest = _shape(piece.tensor)
        values = read.view(TORCH_DTYPES[_dtype(piece.tensor)])
        values = values.view(piece.rows, *rest) if rest else values
        if piece.order is not None:
            return values[piece.order.argsort().argsort()]
        change = self.changes.get(name)
        return values if change is None else change.from_file(values)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Return the weights of a file.

    A tensor without a name in checkpoints keeps its own, for the loader to complain of.

    Raises:
        ModelError: it is no GGUF file, of an unknown architecture, queries or keys are no whole
            heads, or experts are missing.
    """
    file = read_gguf(path)
    spec = gguf_model_spec(file)
    made, whole = changes(spec, family_of(file.metadata)), shapes(spec)
    tensors = {
        name: replace(tensor, shape=_stored_shape(tensor.shape, whole.get(name)))
        for name, tensor in named_tensors(file)
        if tensor.name not in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
    }
    for name, tensor in tensors.items():
        if name in made and tensor.shape[0] % made[name].unit:
            raise ModelError(path.name, f"tensor {shown(tensor.name)} {made[name].told}")
    return GgufCheckpoint(file, tensors, made)


def _stored_shape(shape: tuple[int, ...], whole: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape in a checkpoint: with dimensions of one, as in `whole`, and with the
    matrices of all heads as one."""
    if whole is not None and [n for n in shape if n > 1] == [n for n in whole if n > 1]:
        return whole
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape


def _dtype(tensor: GgufTensor) -> str:
    return tensor.type.name if tensor.type.name in TORCH_DTYPES else BYTES


def _shape(tensor: GgufTensor) -> tuple[int, ...]:
    """Of its values: the last dimension of blocks counts their bytes."""
    if _dtype(tensor) != BYTES:
        return tensor.shape
    return *tensor.shape[:-1], _row_bytes(tensor)


def _row_bytes(tensor: GgufTensor) -> int:
    return tensor.type.row_bytes(tensor.shape[-1])


def open_weights(path: Path, modules: Sequence[str] = ()) -> Checkpoint:
    """Open a folder with safetensors files, or a GGUF file; only descriptions are read.

    Args:
        modules: as of `open_checkpoint`.

    Raises:
        ModelError: there is nothing that can be loaded, or a description is malformed.
    """
    return open_gguf(path) if is_gguf(path) else open_checkpoint(path, modules)
