"""`kvik bench latency [MODEL]`: times one batch at a time, prompts and tokens separately."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvik.cli.flags import engine_options
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.engine.loop import Engine
from kvik.launch import resolve_config
from kvik_bench.cli.output import add_number, add_numbers, engine_parser, reported
from kvik_bench.inprocess.ceilings import Ceilings
from kvik_bench.inprocess.inproc import LoadRun, loaded, run_jobs
from kvik_bench.inprocess.jobs import Requests, check_batches, fixed
from kvik_bench.inprocess.measures import DECODE, E2E, ITLS, PREEMPTIONS, PREFILL, TPOT, TTFT
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.load.metrics import OUTPUT, token_times
from kvik_bench.report.result import (
    Chart,
    Figure,
    Result,
    Row,
    engine_facts,
    figures,
    peak_memory,
    ratios,
)
from kvik_bench.report.table import show_figure

CHARTS = (
    Chart("curve", "Output by batch size", "output", "batch"),
    Chart("bars", "Time to first token", "TTFT"),
    Chart("bars", "Time per output token", "TPOT"),
    Chart("ecdf", "Time between tokens", "ITL, ms"),
)


@dataclass(frozen=True, slots=True)
class LatencyLoad:
    batches: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    seed: int = 0

    def check(self, resolved: ResolvedConfig) -> None:
        """Check the numbers; raises ParamError, which names the field."""
        check_batches(self.batches, resolved)
        self.requests(1).check(resolved)

    def requests(self, batch: int) -> Requests:
        lengths = fixed(self.prompt_tokens, self.output_tokens)
        return Requests(batch, lengths, seed=f"{self.seed}/{batch}")


def measure_latency(engine: Engine, load: LatencyLoad, rounds: Rounds) -> Result:
    vocab_size, ceilings = engine.resolved.model.vocab_size, Ceilings.of(engine.resolved)

    def measure(number: int, batch: int) -> LoadRun:
        return run_jobs(engine, load.requests(batch).jobs(number, vocab_size))

    runs = rounds.runs(load.batches, measure, "batch {}".format)
    remarks = [*rounds.remarks, *ceilings.notes]
    for batch, batch_runs in runs.items():
        remarks.append(ceilings.remark(f"batch {batch}", batch_runs))
        if any(PREEMPTIONS.of(run) for run in batch_runs):
            remarks.append(f"batch {batch}: requests were preempted, the KV cache is too small")
    return Result(
        "latency",
        {
            **engine_facts(engine.resolved),
            "prompt tokens": str(load.prompt_tokens),
            "output tokens": str(load.output_tokens),
            "peak memory": f"{show_figure(peak_memory())} MiB",
        },
        tuple(_row(load, batch, runs, ceilings) for batch in runs),
        tuple(remarks),
        CHARTS,
    )


def _row(
    load: LatencyLoad, batch: int, runs: Mapping[int, Sequence[LoadRun]], ceilings: Ceilings
) -> Row:
    batch_runs, first = runs[batch], runs[load.batches[0]]
    note = f"output of a row over that of batch {load.batches[0]}, round by round"
    measured = (
        Figure("batch", "", (batch,), definition="requests sent at the same time"),
        *figures((TTFT, TPOT, *ITLS, E2E, PREFILL, DECODE, OUTPUT), batch_runs),
        ratios("speed-up", OUTPUT, batch_runs, first, note),
    )
    predicted = ceilings.prefill(load.prompt_tokens, batch)
    if load.output_tokens > 1:
        predicted += ceilings.decode(batch, load.prompt_tokens + load.output_tokens // 2)
    gaps = [float(gap) * 1e3 for run in batch_runs for gap in token_times(run.records)]
    series = {"ITL, ms": tuple(gaps)} if gaps else {}
    achieved = ceilings.achieved(batch_runs)
    return Row(f"batch {batch}", measured + predicted + achieved, {}, series)


def build_parser() -> argparse.ArgumentParser:
    parser = engine_parser(
        "bench latency",
        "Time one batch at a time: the first token, the tokens after it, and the whole answer.",
        repeats=3,
    )
    add_numbers(
        parser, "--batch", (1, 8, 32), "requests sent at the same time, one size after another"
    )
    add_number(parser, "--prompt-tokens", 128, "tokens of each prompt")
    add_number(parser, "--output-tokens", 64, "tokens of each answer")
    return parser


@reported
def run(arguments: argparse.Namespace) -> Result:
    rounds = Rounds(arguments.repeats, arguments.warmup)
    load = LatencyLoad(
        arguments.batch, arguments.prompt_tokens, arguments.output_tokens, arguments.seed
    )
    resolved = resolve_config(EngineConfig(**engine_options(arguments, arguments.model)))
    load.check(resolved)
    with loaded(resolved) as engine:
        return measure_latency(engine, load, rounds)
