"""The weights of a GGUF file under the names and in the order of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm, prod

from torch import Tensor

from kvik.config.errors import ModelError
from kvik.config.fields import shown
from kvik.config.model_spec import ModelSpec
from kvik.gguf.facts import architecture
from kvik.gguf.names import ROPE_FACTORS, has_rotary_rows, hf_name
from kvik.gguf.reader import GgufFile, GgufTensor
from kvik.nn.checkpoint import RUN_BYTES, Run
from kvik.nn.gguf_blocks import dequantize, unpermute_rotary
from kvik.nn.reading import read_ahead
from kvik.nn.runs import ROW_MULTIPLE, run_length
from kvik.nn.safetensors import TensorEntry

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Piece:
    """A `Run` to be read: `rows` rows of a tensor from `first` on."""

    tensor: GgufTensor
    first: int
    rows: int

    @property
    def span(self) -> tuple[int, int]:
        row_bytes = self.tensor.type.row_bytes(self.tensor.shape[-1])
        return self.tensor.start + self.first * row_bytes, self.rows * row_bytes


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """What `Checkpoint` is of safetensors files; every tensor is fp32 here.

    Attributes:
        tensors: by their names in checkpoints, in the order of the file.
        head_dim: of the tensors whose rows are to be put in order; None: no tensor's are.
    """

    file: GgufFile
    tensors: Mapping[str, GgufTensor]
    head_dim: int | None

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return {
            name: TensorEntry(
                name, "F32", tensor.shape, tensor.start, prod(tensor.shape) * FP32_BYTES
            )
            for name, tensor in self.tensors.items()
        }

    def runs(self, in_runs: Mapping[str, bool]) -> Iterator[Run]:
        """The named tensors in the order of the file, in pieces.

        Args:
            in_runs: whether a tensor may come in runs of rows; else it comes whole.

        Raises:
            ModelError: the file cannot be read.
        """
        pieces = [
            (name, piece)
            for name, tensor in self.tensors.items()
            if name in in_runs
            for piece in self._pieces(tensor, in_runs[name])
        ]
        data = read_ahead(self.file.path, [piece.span for _, piece in pieces])
        for (name, piece), read in zip(pieces, data, strict=True):
            yield Run(name, piece.first, self._values(piece, read))

    def _pieces(self, tensor: GgufTensor, in_runs: bool) -> Iterator[_Piece]:
        rows, width = prod(tensor.shape[:-1]), tensor.shape[-1]
        step = rows
        if in_runs and len(tensor.shape) == 2:
            step = run_length(RUN_BYTES // (width * FP32_BYTES))
            if (size := self._head(tensor)) is not None:
                whole = lcm(size, ROW_MULTIPLE)
                step = max(1, step // whole) * whole
        for first in range(0, rows, step):
            yield _Piece(tensor, first, min(step, rows - first))

    def _values(self, piece: _Piece, read: Tensor) -> Tensor:
        """read [bytes] -> the values of a piece."""
        values = dequantize(piece.tensor.type.name, read.view(piece.rows, -1))
        shape = piece.tensor.shape
        values = values.view(piece.rows, shape[-1]) if len(shape) == 2 else values.view(shape)
        size = self._head(piece.tensor)
        return values if size is None else unpermute_rotary(values, size)

    def _head(self, tensor: GgufTensor) -> int | None:
        return self.head_dim if has_rotary_rows(tensor.name) else None


def open_gguf(file: GgufFile, spec: ModelSpec) -> GgufCheckpoint:
    """The weights of a file whose facts are `spec`.

    A tensor without a name in checkpoints keeps its own, for the loader to complain of.

    Raises:
        ModelError: queries or keys are no whole heads.
    """
    head_dim = spec.head_dim if architecture(file) == "llama" else None
    tensors = {
        hf_name(tensor.name) or tensor.name: tensor
        for tensor in file.tensors
        if tensor.name != ROPE_FACTORS
    }
    for tensor in tensors.values():
        if head_dim is not None and has_rotary_rows(tensor.name) and tensor.shape[0] % head_dim:
            raise ModelError(
                file.path.name,
                f"tensor {shown(tensor.name)} must have whole heads, of {head_dim} rows each",
            )
    return GgufCheckpoint(file, tensors, head_dim)
