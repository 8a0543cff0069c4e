"""Check on this GPU that tokens do not depend on how the engine makes them: the matrix of
tests/invariance in fp32, greedy and seeded, against torch's kernels on the CPU.

The reference of a format of the KV cache is this GPU's own answers, one request at a time without
a prefix cache. The CPU's keys differ in their last bits, so that some of them are rounded to
another code of the format, which is no fault of the engine.

Kernels run in replayed steps as soon as their size was seen once, except where a cell is without
graphs. Cells in which one engine fetches blocks from another are left out.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from notes import Notes
from place import DEVICE, REHEARSED, VARIABLE, sized, synchronize

try:
    import pytest
    from helpers import drafted_columns, matrix
    from helpers.interpreted_engine import interpret_engines
    from helpers.thread_stages import ThreadStages

    MISSING = ""
except ModuleNotFoundError as error:  # of the packages of the engine's frontend
    MISSING = str(error.name)

from kvik.config.config import RunnerConfig
from kvik.config.model_source import BUNDLED
from kvik.nn import loader
from kvik.nn.parameters import DeclaredTensor
from kvik.worker.step_inputs import AtOnce

FORMATS = sized(("fp8", "int8", "int4"), ("int8",))  # of the KV cache
SOME = ("batch", "prefix hits, chunks", "preemption, chunks", "siblings", "blocks of 64")
SOME = sized(SOME, SOME[:1])  # the columns of variants, and all columns of a rehearsal
CACHE = sized(64 << 20, 4 << 20)  # bytes of the KV cache: processes share the device
GRAPHS = 2 << 30  # bytes of graphs, which seem to take what other processes allocate meanwhile
NEEDED = 5.0  # seconds of a cell: an engine, and kernels that its step is the first to need
DRAFTS = 4  # per step, of the draft model
PROMPTS, PROMPT, TOKENS = 2, 4, 3  # of a rehearsal, and of each of its prompts and answers


def measure(notes: Notes, model: str, kind: str) -> None:
    """Run the cells of one kind ("columns" or "variants") with a model of the matrix."""
    if MISSING:
        notes.missed(f"{model}, {kind}", f"needs {MISSING}")
        return
    os.environ.pop(VARIABLE, None)  # `LLM` refuses variables that it does not know
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvik.worker.captures.MIN_MISSES", 1)
        patch.setattr("kvik.worker.captures.TIME_SHARE", 1.0)
        patch.setattr(loader, "_draw", partial(_draw_on_cpu, loader._draw))
        if REHEARSED:
            _shorten(patch)
        if find_spec("llguidance") is None:  # structured requests become plain ones
            patch.setattr(matrix, "OBJECT", None)
        cells = Cells(notes, matrix.make_model(model, Path(folder)), model)
        for cell in cells.columns() if kind == "columns" else cells.variants():
            notes.attempt(cell.name, partial(_check, notes, cell), NEEDED)


@dataclass(frozen=True, slots=True)
class Cell:
    """A column with one more option; `run` raises AssertionError if tokens differ."""

    name: str
    run: Callable[[], object]


class Cells:
    """The cells of one model, most important first, with their references."""

    def __init__(self, notes: Notes, model: dict[str, object], name: str) -> None:
        self._notes = notes
        self._model = model
        self._name = name
        self._alone: dict[str, list[list[int]]] = {}  # by format

    def columns(self) -> Iterator[Cell]:
        """Yield every column that a GPU supports."""
        for column in (*matrix.COLUMNS, *matrix.SERVED, matrix.ALL_OF_IT):
            fetched = column.must == "fetched"  # by a second engine
            if not fetched and (not REHEARSED or column.name in SOME):
                yield self._cell("", column, partial(self._plain, column))

    def variants(self) -> Iterator[Cell]:
        """Yield some columns with formats of the KV cache, without graphs, with one step in flight,
        in two stages, and with drafts."""
        some = [column for column in matrix.COLUMNS if column.name in SOME]
        for format in FORMATS:
            for column in some:
                yield self._cell(f"KV in {format}", column, partial(self._rounded, format, column))
        for column in some:
            eager = replace(column, config={**column.config, "graph_memory": 0})
            yield self._cell("no graphs", column, partial(self._plain, eager))
            yield self._cell("one step in flight", column, partial(self._in_turn, column))
            if self._name != "windowed":  # its layers read vectors of tokens
                yield self._cell("stages", column, partial(self._in_stages, eager))
        if self._name == "bundled":
            for column in some:
                yield self._cell("draft model", column, partial(self._by_draft_model, column))
        for drafter in drafted_columns.DRAFTERS:
            for column in some:
                yield self._cell(drafter, column, partial(self._drafted, drafter, column))

    def _cell(self, variant: str, column: matrix.Column, run: Callable[[], object]) -> Cell:
        title = ": ".join(filter(None, (self._name, variant, column.name)))
        return Cell(title, run)

    @cached_property
    def _expected(self) -> list[list[int]]:
        return matrix.reference_tokens(self._model)

    def _outputs(self, column: matrix.Column, **options: object) -> list[matrix.RequestOutput]:
        sampling = matrix.params(column.siblings)
        with _engines():
            return matrix.run_column(
                _here(column), sampling, self._model, dtype="float32", **options
            )

    def _plain(self, column: matrix.Column, **options: object) -> None:
        matrix.check_tokens(self._outputs(column, **options), self._expected)

    def _rounded(self, format: str, column: matrix.Column) -> None:
        if format not in self._alone:
            plain = {"enable_prefix_caching": False, "max_num_seqs": 1, "graph_memory": 0}
            alone = self._outputs(
                matrix.Column("reference", plain, alone=True), kv_cache_dtype=format
            )
            self._alone[format] = [output.outputs[0].token_ids for output in alone]
        matrix.check_tokens(self._outputs(column, kv_cache_dtype=format), self._alone[format])

    def _in_turn(self, column: matrix.Column) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvik.worker.worker.best_copies", lambda device: AtOnce())
            self._plain(column)

    def _in_stages(self, column: matrix.Column) -> None:
        """Check a pipeline whose stages are threads and share the GPU. It has no graphs: while one
        thread captures, others may not use the device."""
        with pytest.MonkeyPatch.context() as patch:
            threads = SimpleNamespace(LocalLauncher=object, StageProcesses=ThreadStages)
            patch.setitem(sys.modules, "kvik.stage_process", threads)
            patch.setattr("kvik.config.parallel._check_torch", lambda *facts: None)
            patch.setattr("kvik.config.resolve.gpus_of", lambda config, first, hardware: [first])
            patch.setattr(RunnerConfig, "of_stage", lambda runner, stage: runner)
            self._plain(column, pipeline_parallel_size=2, threads=2)

    def _drafted(self, drafter: str, column: matrix.Column) -> None:
        expected = self._expected
        prompts = matrix.prompts(2048 if self._name == "bundled" else matrix.WINDOWED["vocab_size"])
        texts = [[*prompt, *right] for prompt, right in zip(prompts, expected, strict=True)]
        with _engines() as patch, _unlogged(drafter in ("broken", "garbage")):
            drafted_columns.check_drafts(
                self._model, expected, texts, _here(column), drafter, patch
            )

    def _by_draft_model(self, column: matrix.Column) -> None:
        draft = str(BUNDLED.parent / "stories-draft")
        options = {"spec_method": "draft_model", "spec_model": draft, "spec_tokens": DRAFTS}
        self._plain(drafted_columns.with_room(column), **drafted_columns.EAGER, **options)


def _check(notes: Notes, cell: Cell) -> None:
    """Note whether the tokens of a cell are right; other errors are failures of their own."""
    why = ""
    try:
        cell.run()
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        why = f"{line} {error}".strip()
        traceback.print_exc()
        synchronize()  # an engine reports a lost device as the error of a request
    notes.check(cell.name, not why, why, op="invariance")


def _here(column: matrix.Column) -> matrix.Column:
    """Return the column on this device, in a small part of its memory."""
    config = {"device": DEVICE.type, "graph_memory": GRAPHS, **column.config}
    if "num_blocks" not in config:
        config["kv_cache_memory"] = CACHE
    if REHEARSED:
        config["kernels"] = "torch"  # the interpreted engine replaces them
    return replace(column, config=config)


@contextmanager
def _engines() -> Iterator[pytest.MonkeyPatch]:
    """Yield a patch within which engines run Triton's kernels in a rehearsal too."""
    with pytest.MonkeyPatch.context() as patch:
        if REHEARSED:
            interpret_engines(patch)
        yield patch


@contextmanager
def _unlogged(quiet: bool) -> Iterator[None]:
    """Drop the log of drafters that fail on purpose, which would be noted as failures."""
    logging.disable(logging.CRITICAL if quiet else logging.NOTSET)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _draw_on_cpu(
    draw: Callable[..., None],
    tensor: DeclaredTensor,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """Draw a random matrix with the CPU's generator, so that all devices get the same weights."""

    def fill(first: int, values: torch.Tensor) -> None:
        tensor.fill(first, values.to(device))

    cpu = torch.Generator().manual_seed(generator.initial_seed())
    draw(replace(tensor, fill=fill), torch.device("cpu"), cpu)


def _shorten(patch: pytest.MonkeyPatch) -> None:
    """Make the matrix short enough for Triton's interpreter."""
    prompts, params = matrix.prompts, matrix.params
    patch.setattr(matrix, "prompts", lambda vocab: [p[:PROMPT] for p in prompts(vocab)[-PROMPTS:]])
    for module in (matrix, drafted_columns):  # without the last one, a beam search
        patch.setattr(module, "params", lambda siblings=1: params(siblings)[-PROMPTS - 1 : -1])
    patch.setattr(matrix, "NUM_TOKENS", TOKENS)
    patch.setattr(drafted_columns, "DRAFTERS", {"tree": drafted_columns.DRAFTERS["tree"]})
