"""`kvik bench attention [MODEL]`: times a prompt's attention in one layer, with all scores in
memory and in tiles, like FlashAttention (Dao et al. 2022, arXiv 2205.14135)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
from kvik_bench.cli.output import add_numbers, check_output, engine_parser, write_out
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.machine.stage import device_seconds, one_prompt
from kvik_bench.report.result import (
    Chart,
    Figure,
    Result,
    Row,
    engine_facts,
    peak_bytes,
    restart_peak,
    run_facts,
)

MAX_TOKENS = 1 << 16
SCORE_BYTES = 4  # the reference computes in fp32
MATRICES = 3  # of the reference at a time: scores, masked scores, their softmax
CHARTS = (
    Chart("curve", "Prompt attention in tiles", "tiles", "prompt"),
    Chart("curve", "Prompt attention with its matrix", "matrix", "prompt"),
)

Call = Callable[[], Tensor]


@dataclass(slots=True)
class PromptRuns:
    """Milliseconds and additional MiB of the attention of one prompt, in each round."""

    matrix: list[float] = field(default_factory=list)
    tiles: list[float] = field(default_factory=list)
    matrix_memory: list[float] = field(default_factory=list)
    tiles_memory: list[float] = field(default_factory=list)
    difference: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionBench:
    """One layer's attention with the heads of a model, over random prompts.

    Attributes:
        platform: provides the backend that computes in tiles.
    """

    resolved: ResolvedConfig
    platform: Platform
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

    def measure(self, rounds: Rounds, facts: Mapping[str, str]) -> Result:
        runs_by_length = {length: PromptRuns() for length in self.lengths}
        device = self.platform.parts.device
        torch.manual_seed(0)
        with rounds, inference_on(device)():
            for number, length in rounds.over(
                list(runs_by_length), lambda length: f"{length} tokens"
            ):
                runs = PromptRuns() if number < 0 else runs_by_length[length]
                self._round(length, runs)
        model = self.resolved.model
        return Result(
            "attention",
            {
                **facts,
                **engine_facts(self.resolved),
                "heads": f"{model.num_heads} of queries, {model.num_kv_heads} of keys and values, "
                f"each of {model.head_dim}",
                "tiles": f"the {self.resolved.runner.attention_backend} backend of this engine",
            },
            tuple(self._row(length, runs) for length, runs in runs_by_length.items()),
            rounds.remarks,
            CHARTS,
        )

    def _round(self, length: int, runs: PromptRuns) -> None:
        parts = self.platform.parts
        reference = self._call(ReferenceAttention(parts.ops), length)
        tiled = self._call(parts.backend, length)
        for call, memory in ((reference, runs.matrix_memory), (tiled, runs.tiles_memory)):
            beyond = self._beyond(call)
            if beyond is not None:
                memory.append(beyond / MIB)
        runs.matrix.append(device_seconds(reference, parts.device) * 1e3)
        runs.tiles.append(device_seconds(tiled, parts.device) * 1e3)
        difference = (reference().float() - tiled().float()).abs().max()
        runs.difference = max(runs.difference, float(difference))

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

    def _row(self, length: int, runs: PromptRuns) -> Row:
        matrix_size = matrix_bytes(self.resolved.model.num_heads, length) / MIB
        gains = tuple(a / b for a, b in zip(runs.matrix, runs.tiles, strict=True))
        peak = "peak memory of the call, less what was in use before it"
        memory = [
            Figure(name, "MiB", tuple(values), "less", peak)
            for name, values in (
                ("matrix memory", runs.matrix_memory),
                ("tiles memory", runs.tiles_memory),
            )
            if values
        ]
        return Row(
            f"{length} tokens",
            (
                Figure("prompt", "", (length,), definition="tokens"),
                Figure("matrix", "ms", tuple(runs.matrix), "less", "all scores in memory, in fp32"),
                Figure("tiles", "ms", tuple(runs.tiles), "less", "the kernel that the engine runs"),
                Figure("speed-up", "x", gains, "more", "matrix / tiles, round by round"),
                Figure(
                    "one matrix", "MiB", (matrix_size,), "less", "prompt * prompt * heads * 4 bytes"
                ),
                *memory,
                Figure(
                    "difference",
                    "",
                    (runs.difference,),
                    "less",
                    "the largest between the two results, which are rounded differently",
                ),
            ),
        )


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


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)
    rounds = Rounds(arguments.repeats, arguments.warmup)
    resolved = resolve_config(EngineConfig(**engine_options(arguments, arguments.model)))
    write_out(
        AttentionBench.of(resolved, arguments.lengths).measure(rounds, run_facts()), arguments
    )
    return 0
