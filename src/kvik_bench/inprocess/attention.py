"""`kvik bench attention [MODEL]`: times a prompt's attention in one layer, with all scores in
memory and in tiles, like FlashAttention (Dao et al. 2022, arXiv 2205.14135)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.attention.base import Attend, AttentionBackend, AttentionSpec
from kvik.attention.reference import ReferenceAttention
from kvik.cli.flags import engine_options
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.units import MIB, show_bytes
from kvik.errors import ParamError
from kvik.launch import resolve_config
from kvik.worker.platforms import Platform, inference_on, platform
from kvik_bench.cli.output import add_numbers, engine_parser, reported
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.machine.stage import device_seconds, one_prompt
from kvik_bench.report.result import (
    Chart,
    Figure,
    Measure,
    Result,
    Row,
    engine_facts,
    figures,
    peak_bytes,
    restart_peak,
)

MAX_TOKENS = 1 << 16
SCORE_BYTES = 4  # the reference computes in fp32
MATRICES = 3  # of the reference at a time: scores, masked scores, their softmax
CHARTS = (
    Chart("curve", "Prompt attention in tiles", "tiles", "prompt"),
    Chart("curve", "Prompt attention with its matrix", "matrix", "prompt"),
)

Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Seconds, and additional bytes if the system says, of the attention of one prompt."""

    matrix: float
    tiles: float
    matrix_memory: int | None
    tiles_memory: int | None
    difference: float


MATRIX, TILES = "all scores in memory, in fp32", "the kernel that the engine runs"
GAIN, PEAK = (
    "matrix / tiles, round by round",
    "peak memory of the call, less what was in use before it",
)
TIMES: tuple[Measure[PromptRun], ...] = (
    Measure("matrix", "ms", "less", MATRIX, lambda run: run.matrix * 1e3),
    Measure("tiles", "ms", "less", TILES, lambda run: run.tiles * 1e3),
    Measure("speed-up", "x", "more", GAIN, lambda run: run.matrix / run.tiles),
)
MEMORY: tuple[Measure[PromptRun], ...] = (
    Measure("matrix memory", "MiB", "less", PEAK, lambda run: _mebibytes(run.matrix_memory)),
    Measure("tiles memory", "MiB", "less", PEAK, lambda run: _mebibytes(run.tiles_memory)),
)
DIFFERENCE = "the largest between the two results, which are rounded differently"


@dataclass(frozen=True, slots=True)
class AttentionBench:
    """One layer's attention with the heads of a model, over random prompts."""

    resolved: ResolvedConfig
    platform: Platform  # provides the backend that computes in tiles
    lengths: Sequence[int]

    @staticmethod
    def of(resolved: ResolvedConfig, lengths: Sequence[int]) -> AttentionBench:
        """Make the benchmark of an engine; raises ParamError, which names the field."""
        heads, limit = resolved.model.num_heads, resolved.memory.limit
        for length in lengths:
            if not 1 <= length <= MAX_TOKENS:
                raise ParamError("lengths", f"must be in [1, {MAX_TOKENS}], not {length}")
            needed = MATRICES * matrix_bytes(heads, length)
            if needed > limit:
                raise ParamError(
                    "lengths",
                    f"{length} tokens need {show_bytes(needed)} for the matrices of "
                    f"{heads} heads, and {show_bytes(limit)} may be used",
                )
        made = platform(resolved)
        if isinstance(made.parts.backend, ReferenceAttention):
            raise ParamError("attention_backend", "must differ from the reference")
        return AttentionBench(resolved, made, lengths)

    def measure(self, rounds: Rounds) -> Result:
        torch.manual_seed(0)
        with inference_on(self.platform.parts.device)():
            runs = rounds.runs(self.lengths, self._round, "{} tokens".format)
        model = self.resolved.model
        return Result(
            "attention",
            {
                **engine_facts(self.resolved),
                "heads": f"{model.num_heads} of queries, {model.num_kv_heads} of keys and values, "
                f"each of {model.head_dim}",
                "tiles": f"the {self.resolved.runner.attention_backend} backend of this engine",
            },
            tuple(self._row(length, length_runs) for length, length_runs in runs.items()),
            rounds.remarks,
            CHARTS,
        )

    def _round(self, _: int, length: int) -> PromptRun:
        parts = self.platform.parts
        matrix = self._call(ReferenceAttention(parts.ops), length)
        tiles = self._call(parts.backend, length)
        memory = self._beyond(matrix), self._beyond(tiles)
        seconds = device_seconds(matrix, parts.device), device_seconds(tiles, parts.device)
        difference = float((matrix().float() - tiles().float()).abs().max())
        return PromptRun(*seconds, *memory, difference)

    def _call(self, backend: AttentionBackend, length: int) -> Call:
        """Return the attention of a prompt, with the same random inputs for each backend."""
        parts, model = self.platform.parts, self.resolved.model
        draw = torch.Generator().manual_seed(length)
        layout, kv = one_prompt(
            parts.device, model.head_dim, length, model.num_kv_heads, parts.dtype
        )
        q, k, v = (
            torch.randn(length, heads, model.head_dim, generator=draw).to(parts.device, parts.dtype)
            for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
        )
        metadata, spec = backend.plan(layout, None), AttentionSpec(model.head_dim**-0.5)
        return lambda: backend.run(Attend(q, k, v, kv, metadata, spec))

    def _beyond(self, call: Call) -> int | None:
        """Return the peak of additional bytes during a call; None if the system does not say."""
        self.platform.release_freed()
        device = self.platform.parts.device
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            call()
            return torch.cuda.max_memory_allocated(device) - before
        if not restart_peak():
            return None
        resident = peak_bytes()
        call()
        return peak_bytes() - resident

    def _row(self, length: int, runs: Sequence[PromptRun]) -> Row:
        size = matrix_bytes(self.resolved.model.num_heads, length) / MIB
        difference = max(run.difference for run in runs)
        return Row(
            f"{length} tokens",
            (
                Figure("prompt", "", (length,), definition="tokens"),
                *figures(TIMES, runs),
                Figure("one matrix", "MiB", (size,), "less", "prompt * prompt * heads * 4 bytes"),
                *figures(MEMORY, runs, every=False),
                Figure("difference", "", (difference,), "less", DIFFERENCE),
            ),
        )


def _mebibytes(size: int | None) -> float | None:
    return None if size is None else size / MIB


def matrix_bytes(heads: int, length: int) -> int:
    """Return the bytes of the scores of all heads of a layer."""
    return heads * length * length * SCORE_BYTES


def build_parser() -> argparse.ArgumentParser:
    parser = engine_parser(
        "bench attention",
        "Time a prompt's attention in one layer, with the matrix of all scores in memory and in "
        "tiles, and measure the memory of both.",
        repeats=3,
    )
    add_numbers(
        parser, "--lengths", (128, 512, 2048), "tokens of the prompt, one length after another"
    )
    return parser


@reported
def run(arguments: argparse.Namespace) -> Result:
    rounds = Rounds(arguments.repeats, arguments.warmup)
    resolved = resolve_config(EngineConfig(**engine_options(arguments, arguments.model)))
    return AttentionBench.of(resolved, arguments.lengths).measure(rounds)
