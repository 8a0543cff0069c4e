"""Filling a declared model: from a checkpoint, tensor by tensor, or with random numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvik.config.errors import ModelError
from kvik.config.fields import shown
from kvik.nn.builder import Declarations, DeclaredTensor
from kvik.nn.checkpoint import TORCH_DTYPES, Checkpoint
from kvik.nn.safetensors import TensorEntry

PROGRESS_BYTES = 1 << 30  # smaller models load before a bar could be read
RANDOM_STD = 0.02
RANDOM_DRAWS = 1 << 22  # of a matrix
MAX_LISTED = 3  # names repeated in an error


def load_weights(declared: Declarations, checkpoint: Checkpoint) -> None:
    """Copy each tensor of the checkpoint to its place, casting float types.

    Each is copied straight into the (fused) tensor of its layer, and a layer is finished with its
    last tensor. So beside the finished layers only one that is being filled is in memory, if the
    files hold a layer's tensors together, as they usually do.

    Raises:
        ModelError: tensors missing, left over, or of the wrong shape or type, found before the
            first one is copied; or weights that cannot be quantised.
    """
    wanted = {tensor.name: tensor for tensor in declared.tensors}
    _check(wanted, checkpoint.entries, declared.ignored)
    with torch.inference_mode(), _progress(checkpoint.num_bytes) as advance:
        for name, tensor in checkpoint.tensors():
            if name in wanted:
                wanted[name].fill(partial(_copy, tensor))
            advance(tensor.nbytes)


def random_weights(declared: Declarations, seed: int) -> None:
    """Fill a model with numbers that depend only on `seed`, for benchmarks without a checkpoint."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.inference_mode():
        for tensor in declared.tensors:
            if tensor.kind == "matrix":
                tensor.fill(partial(_draw, generators, seed))
            else:
                tensor.fill(partial(_set, 1.0 if tensor.kind == "gain" else 0.0))


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _set(value: float, target: Tensor) -> None:
    target.fill_(value)


def _draw(generators: dict[torch.device, torch.Generator], seed: int, matrix: Tensor) -> None:
    """Random rows; a large matrix repeats its first ones, as drawing takes longer than copying."""
    device = matrix.device
    if device not in generators:
        generators[device] = torch.Generator(device).manual_seed(seed)
    generator = generators[device]
    rows = max(1, RANDOM_DRAWS // matrix.shape[1])
    matrix[:rows].normal_(std=RANDOM_STD, generator=generator)
    for start in range(rows, len(matrix), rows):
        piece = matrix[start : start + rows]
        piece.copy_(matrix[: len(piece)])


def _check(
    wanted: dict[str, DeclaredTensor], entries: Mapping[str, TensorEntry], ignored: set[str]
) -> None:
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise ModelError("model", f"its weights lack {_listed(missing)}")
    extra = [name for name in entries if name not in wanted and name not in ignored]
    if extra:
        raise ModelError("model", f"its weights hold {_listed(extra)}, unknown to the architecture")
    for name, tensor in wanted.items():
        entry = entries[name]
        if entry.shape != tensor.shape:
            raise ModelError(
                "model",
                f"tensor {shown(name)} must have shape {list(tensor.shape)} by config.json, "
                f"not {list(entry.shape)}",
            )
        dtype = TORCH_DTYPES[entry.dtype]
        castable = tensor.dtype.is_floating_point and dtype.is_floating_point and dtype.itemsize > 1
        if dtype != tensor.dtype and not castable:
            raise ModelError(
                "model", f"tensor {shown(name)} must be F32, BF16, F16 or F64, not {entry.dtype}"
            )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - MAX_LISTED
    text = ", ".join(shown(name) for name in names[:MAX_LISTED])
    return f"{text} and {more} more" if more > 0 else text


@contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal for large models; `advance(bytes)` moves it."""
    if num_bytes < PROGRESS_BYTES or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("loading weights", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_bytes)
        yield lambda size: bar.advance(task, size)
