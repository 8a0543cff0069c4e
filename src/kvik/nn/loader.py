"""Fills a declared model from a checkpoint, one range of rows at a time, or with random numbers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from zlib import crc32

import torch

from kvik.errors import NOTES_LOG, START_LOG, ModelError, shown
from kvik.models.model_spec import ModelSpec
from kvik.nn.builder import Builder
from kvik.nn.checkpoint import Checkpoint, Selection, selected_bytes
from kvik.nn.layers import PooledHead
from kvik.nn.parameters import Declarations, DeclaredTensor
from kvik.nn.safetensors import FLOATS, TORCH_DTYPES
from kvik.spec.adapters import Adapter
from kvik.spec.network import Network

log = logging.getLogger(START_LOG)

PROGRESS_BYTES = 1 << 30  # smaller models load too fast for a progress bar
RANDOM_STD = 0.02
RANDOM_DRAWS = 1 << 19  # random numbers per matrix
INTEGERS = ("I64", "I32")  # dtypes that are interchangeable, like `FLOATS`
COMPARED_ROWS = 64  # of a head that is not read
MAX_LISTED = 3  # names repeated in an error


def load_model(
    spec: ModelSpec, builder: Builder, adapters: Sequence[Adapter] = (), *, seed: int = 0
) -> tuple[Network, PooledHead | None]:
    """Make the model that `spec` describes, with the weights of the builder's checkpoint, and its
    layers over pooled vectors, if any.

    Without a checkpoint, weights that the builder's storage does not hold are random, from `seed`.

    Args:
        adapters: of the builder's first slots.

    Raises:
        ModelError: the checkpoint does not fit the spec, or cannot be quantised; or an adapter does
            not fit.
    """
    parameters = builder.parameters
    checkpoint, slots = parameters.checkpoint, parameters.adapters
    names = parameters.storage.names if checkpoint is None else checkpoint.entries
    _check_predictor(spec, names)
    model = spec.family.network(spec, builder)
    layered = spec.pooling is not None and spec.pooling.layers
    pooled = builder.pooled(spec.pooling) if layered and spec.pooling is not None else None
    if slots is not None:
        slots.elsewhere = builder.declared.elsewhere
        for slot, adapter in enumerate(adapters):
            slots.load(slot, adapter)
    if checkpoint is None:
        random_weights(builder.declared, seed)
    else:
        load_weights(builder.declared, checkpoint)
    return model, pooled


def _check_predictor(spec: ModelSpec, names: Collection[str]) -> None:
    """Raise ModelError if the head that drafts is to be used, and the weights of these names have
    none; without names they are random."""
    scope = spec.predictor_scope
    if scope and names and not any(name.startswith(scope) for name in names):
        reason = f"the weights have no head of this kind ({scope}*)"
        if spec.built is not None:
            reason += ": build the engine folder with --spec-method mtp"
        raise ModelError("spec_method", f"must be another one than mtp: {reason}")


def load_weights(declared: Declarations, checkpoint: Checkpoint) -> None:
    """Pass each tensor of the checkpoint to its layer, a range of rows at a time if possible.

    This takes little memory in addition to the loaded weights: a few ranges, and the tensors of
    layers that need several tensors at once and still wait for the last one.

    Raises:
        ModelError: tensors are missing, unknown, or of the wrong shape or type, which is checked
            before any is read; or weights cannot be quantised, or are NaN or infinite.
    """
    check_weights(declared, checkpoint)
    _compare_head(declared, checkpoint)
    tensors = {tensor.name: tensor for tensor in declared.tensors}
    entries = checkpoint.entries
    selected = {name: tensor.selection for name, tensor in tensors.items()}
    total = sum(selected_bytes(entries[name], some) for name, some in selected.items())
    with torch.inference_mode(), _half_the_threads(), _progress(total) as advance:
        for run in checkpoint.runs(selected):
            tensor = tensors[run.name]
            if not tensor.because:  # else a quantised format checks its numbers, or floats are bits
                run.check_finite()
            tensor.fill(run.first, run.values.to(declared.device))
            advance(run.values.nbytes)


def _compare_head(declared: Declarations, checkpoint: Checkpoint) -> None:
    """Warn of a head in the checkpoint that is not read and differs from the embedding."""
    names = declared.embedding, declared.unread_head
    entries = [checkpoint.entries[name] for name in names if name in checkpoint.entries]
    if len(entries) < 2 or entries[0].shape != entries[1].shape:
        return
    step = max(1, entries[0].shape[0] // COMPARED_ROWS)
    some = Selection(False, 0, tuple((row, row + 1) for row in range(0, entries[0].shape[0], step)))
    runs = checkpoint.runs(dict.fromkeys(names, some))
    embedding, head = (run.values.to(torch.float64, copy=True) for run in runs)
    if not torch.equal(embedding, head):
        log.warning(
            "%s is not read, because tie_word_embeddings is true, but differs from %s: set it to "
            "false for the answers of transformers 5",
            *reversed(names),
        )


def random_weights(declared: Declarations, seed: int) -> None:
    """Fill a model with numbers that depend only on `seed` and on the name of each tensor, for
    benchmarks without a checkpoint."""
    generator = torch.Generator(declared.device)
    with torch.inference_mode(), _half_the_threads():
        for tensor in declared.tensors:
            if tensor.kind == "matrix":
                generator.manual_seed(seed + crc32(tensor.name.encode()))
                _draw(tensor, declared.device, generator)
            elif tensor.kind == "ids":
                tensor.fill(0, torch.arange(tensor.shape[1]).repeat(tensor.shape[0], 1))
            else:
                value = 1.0 if tensor.kind == "gain" else 0.0
                tensor.fill(0, torch.full(tensor.shape, value, device=declared.device))


def _draw(tensor: DeclaredTensor, device: torch.device, generator: torch.Generator) -> None:
    """Fill a matrix with random rows; a large one repeats them: copying is faster than drawing."""
    rows, width = tensor.shape
    step = max(1, min(rows, RANDOM_DRAWS // width))
    drawn = torch.empty(step, width, dtype=tensor.dtype, device=device)
    drawn.normal_(std=RANDOM_STD, generator=generator)
    if not tensor.selection.in_runs:
        tensor.fill(0, tensor.selection.of(drawn.repeat(-(-rows // step), 1)[:rows]))
        return
    for first in range(0, rows, step):
        tensor.fill(first, drawn[: rows - first])


def check_weights(declared: Declarations, checkpoint: Checkpoint) -> None:
    """Check names, shapes and types of a checkpoint's tensors, without reading values.

    Raises:
        ModelError: tensors are missing, unknown, or of the wrong shape or type.
    """
    tensors, entries = {tensor.name: tensor for tensor in declared.tensors}, checkpoint.entries
    missing = [name for name in tensors if name not in entries]
    if missing:
        raise ModelError("model", f"its weights lack {_listed(missing)}")
    surplus = [name for name in entries if name not in tensors and name not in declared.ignored]
    surplus = [name for name in surplus if not name.startswith(tuple(declared.elsewhere))]
    skipped = tuple(sorted(declared.skipped))
    extra = [name for name in surplus if not name.startswith(skipped)]
    if len(extra) < len(surplus):
        scopes = [scope for scope in skipped if any(name.startswith(scope) for name in surplus)]
        parts = _listed(scope.removesuffix(".") for scope in scopes)
        count = len(surplus) - len(extra)
        note = "%d tensors are not read, as they are not of the text model: %s"
        logging.getLogger(NOTES_LOG).info(note, count, parts)
    if extra:
        raise ModelError("model", f"its weights hold {_listed(extra)}, unknown to the architecture")
    for name, tensor in tensors.items():
        entry = entries[name]
        if entry.shape != tensor.shape:
            because = f" ({tensor.because})" if tensor.because else ""
            raise ModelError(
                "model",
                f"tensor {shown(name)} must have shape {list(tensor.shape)} by "
                f"{checkpoint.facts}{because}, not {list(entry.shape)}",
            )
        allowed = _allowed(tensor.dtype)
        if entry.dtype not in allowed:
            listed = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
            raise ModelError("model", f"tensor {shown(name)} must be {listed}, not {entry.dtype}")


def _allowed(dtype: torch.dtype) -> Sequence[str]:
    """Return the dtypes that a file may hold for a declared `dtype`."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return FLOATS
    if dtype == torch.float8_e8m0fnu:
        return ("F8_E8M0", *FLOATS)
    if dtype == torch.int64:
        return INTEGERS
    return [name for name, other in TORCH_DTYPES.items() if other == dtype]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - MAX_LISTED
    text = ", ".join(shown(name) for name in names[:MAX_LISTED])
    return f"{text} and {more} more" if more > 0 else text


def _half_the_threads() -> AbstractContextManager[int]:
    """Halve torch's threads: the other cores are for the reading and packing threads. Operations on
    a range are short, and torch's threads spin while they wait, so they would cost more than they
    help as soon as one of them does not get a core."""
    return torch_threads(max(1, torch.get_num_threads() // 2))


@contextmanager
def torch_threads(count: int) -> Iterator[int]:
    """Limit torch to `count` threads; yields the number that it had."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal for large models; `advance(bytes)` moves it."""
    if num_bytes < PROGRESS_BYTES or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("loading weights", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_bytes)
        yield lambda size: bar.advance(task, size)
