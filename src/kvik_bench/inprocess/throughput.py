"""`kvik bench throughput [MODEL]`: serves many requests that all arrive at the start."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvik.cli.flags import engine_options
from kvik.config.config import EngineConfig
from kvik.engine.loop import Engine
from kvik.errors import ConfigError
from kvik.launch import resolve_config
from kvik_bench.cli.output import add_lengths, add_number, engine_parser, reported
from kvik_bench.inprocess.ceilings import Ceilings
from kvik_bench.inprocess.inproc import LoadRun, loaded, run_jobs
from kvik_bench.inprocess.jobs import Requests
from kvik_bench.inprocess.measures import (
    E2ES,
    KV_USAGE,
    PREEMPTIONS,
    PREFIX_HITS,
    STEPS,
    TTFTS,
    WALL,
    EngineMeasure,
)
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.load.metrics import INPUT, OUTPUT, REQUESTS, TOTAL, e2es, ttfts
from kvik_bench.load.workload import DrawnLengths, Lengths, TraceLengths, read_trace
from kvik_bench.report.result import Chart, Result, Row, engine_facts, figures, peak_memory

MEASURES: tuple[EngineMeasure, ...] = (
    *(REQUESTS, INPUT, OUTPUT, TOTAL, WALL, *TTFTS, *E2ES),
    *(STEPS, KV_USAGE, PREEMPTIONS, PREFIX_HITS),
)
CHARTS = (
    Chart("ecdf", "Time to first token", "TTFT, ms"),
    Chart("ecdf", "Whole answers", "E2E, ms"),
)


def measure_throughput(engine: Engine, load: Requests, rounds: Rounds) -> Result:
    vocab_size, ceilings = engine.resolved.model.vocab_size, Ceilings.of(engine.resolved)
    label = "offline"

    def measure(number: int, _: str) -> LoadRun:
        return run_jobs(engine, load.jobs(number, vocab_size))

    runs = rounds.runs((label,), measure)[label]
    concurrency = min(load.count, engine.resolved.scheduler.max_num_seqs)
    records = [record for run in runs for record in run.records]
    row = Row(
        label,
        (
            *figures(MEASURES, runs),
            peak_memory(),
            *ceilings.steady(concurrency, load.traffic()),
            *ceilings.achieved(runs),
        ),
        series={
            "TTFT, ms": tuple(1e3 * float(time) for time in ttfts(records)),
            "E2E, ms": tuple(1e3 * float(time) for time in e2es(records)),
        },
    )
    return Result(
        "throughput",
        {**engine_facts(engine.resolved), "requests": str(load.count)},
        (row,),
        (*rounds.remarks, *ceilings.notes, ceilings.remark("The load", runs)),
        CHARTS,
    )


COUNT, PROMPT_TOKENS, OUTPUT_TOKENS = 128, "128", "64"


def build_parser() -> argparse.ArgumentParser:
    parser = engine_parser(
        "bench throughput",
        "Serve many requests that all arrive at the start, as fast as the engine can.",
        repeats=3,
    )
    add = parser.add_argument
    add(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"number of requests (default: {COUNT}, or all of a trace)",
    )
    add_lengths(parser, PROMPT_TOKENS, OUTPUT_TOKENS)
    add(
        "--prefix-tokens", type=int, default=0, metavar="N", help="shared tokens before each prompt"
    )
    add_number(parser, "--prefixes", 1, "number of different prefixes")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths from a csv file with TIMESTAMP, ContextTokens, GeneratedTokens; its times "
        "are ignored",
    )
    return parser


@reported
def run(arguments: argparse.Namespace) -> Result:
    rounds = Rounds(arguments.repeats, arguments.warmup)
    load = _load(arguments)
    resolved = resolve_config(EngineConfig(**engine_options(arguments, arguments.model)))
    load.check(resolved)
    with loaded(resolved) as engine:
        return measure_throughput(engine, load, rounds)


def _load(arguments: argparse.Namespace) -> Requests:
    lengths: Lengths
    count, field = arguments.num_requests, "prompt_tokens"
    if arguments.trace is None:
        lengths = DrawnLengths.of_texts(
            arguments.prompt_tokens or PROMPT_TOKENS,
            arguments.output_tokens or OUTPUT_TOKENS,
            str(arguments.seed),
        )
        count = COUNT if count is None else count
    else:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(arguments, name) is not None:
                raise ConfigError(name, "cannot be combined with --trace")
        rows = read_trace(arguments.trace)
        lengths, field = TraceLengths(rows), "trace"
        count = len(rows) if count is None else count
    return Requests(
        count, lengths, arguments.prefix_tokens, arguments.prefixes, str(arguments.seed), field
    )
