"""`kvik bench batching [MODEL]`: compares static, dynamic and continuous batching under one load in
real time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvik.cli.flags import engine_options
from kvik.config.config import EngineConfig
from kvik.core.policy import batch_wait
from kvik.engine.loop import Engine
from kvik.errors import ParamError
from kvik.launch import reschedule, resolve_config
from kvik_bench.cli.output import add_lengths, add_number, engine_parser, reported
from kvik_bench.inprocess.ceilings import Ceilings
from kvik_bench.inprocess.inproc import BenchRequest, LoadRun, loaded, run_jobs
from kvik_bench.inprocess.jobs import Requests, refuse_varied
from kvik_bench.inprocess.measures import E2ES, STEPS, TPOT, TTFTS, WALL, EngineMeasure
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.load.metrics import OUTPUT, REQUESTS, RunMeasure, e2es, ttfts
from kvik_bench.load.workload import DrawnLengths, poisson
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

MAX_RATE = 1e6  # requests a second


@dataclass(frozen=True, slots=True)
class Batching:
    """A kind of batching, implemented by a policy of the engine."""

    name: str
    policy: str
    what: str


STATIC = Batching("static", "static", "a batch starts when the one before has ended and it is full")
DYNAMIC = Batching("dynamic", "dynamic", "likewise, but waits only a moment until it is full")
CONTINUOUS = Batching("continuous", "fcfs", "a request starts in the step in which a place is free")
BATCHINGS = (STATIC, DYNAMIC, CONTINUOUS)
MEASURES: tuple[EngineMeasure, ...] = (REQUESTS, OUTPUT, WALL, *TTFTS, TPOT, *E2ES, STEPS)
COMPARED: tuple[tuple[str, RunMeasure], ...] = (
    ("output", OUTPUT),
    ("TTFT p50", TTFTS[0]),
    ("E2E p50", E2ES[0]),
    ("E2E p99", E2ES[2]),
)
CHARTS = (
    Chart("bars", "Output", "output"),
    Chart("ecdf", "Time to first token", "TTFT, ms"),
    Chart("ecdf", "Whole answers", "E2E, ms"),
    Chart("points", "Time to first token as the run went on", "TTFT, ms", "due, s"),
)


def check_rate(rate: float | None) -> None:
    """Raise ParamError if the rate is out of range."""
    if rate is not None and not 0 < rate <= MAX_RATE:
        raise ParamError("rate", f"must be above 0 and at most {MAX_RATE:,.0f}, not {rate}")


def measure_batching(engine: Engine, load: Requests, rate: float | None, rounds: Rounds) -> Result:
    """Measure all kinds of batching under the same load in each round.

    Args:
        rate: mean requests per second; None: the capacity of continuous batching, which is measured
            first.
    """
    vocab_size, ceilings = engine.resolved.model.vocab_size, Ceilings.of(engine.resolved)
    source = "given"
    if rate is None:
        engine, rate = _capacity(engine, load)
        source = "what continuous batching served when all requests were there at once"

    def measure(number: int, batching: Batching) -> LoadRun:
        nonlocal engine
        engine = _with_policy(engine, batching)
        jobs = load.jobs(number, vocab_size)
        return run_jobs(engine, _timed(jobs, rate, f"{load.seed}/{number}/arrivals"))

    runs = rounds.runs(BATCHINGS, measure, lambda batching: batching.name)
    remarks = [ceilings.remark(b.name.capitalize(), kind_runs) for b, kind_runs in runs.items()]
    scheduler = engine.resolved.scheduler
    return Result(
        "batching",
        {
            **{k: v for k, v in engine_facts(engine.resolved).items() if k != "policy"},
            "requests": str(load.count),
            "arrivals": f"Poisson, {rate:,.3g} a second ({source})",
            "batch size": f"{scheduler.max_num_seqs} requests at a time at most, for all",
            "max wait": ", ".join(
                f"{batching.name} {batch_wait(replace(scheduler, policy=batching.policy)):g} s"
                for batching in (STATIC, DYNAMIC)
            ),
            **{f"{batching.name} batching": batching.what for batching in BATCHINGS},
            "peak memory": f"{show_figure(peak_memory())} MiB",
        },
        tuple(_row(batching, runs, load, ceilings) for batching in BATCHINGS),
        (*rounds.remarks, *ceilings.notes, *remarks),
        CHARTS,
    )


def _capacity(engine: Engine, load: Requests) -> tuple[Engine, float]:
    """Return the capacity in requests per second, the better of two runs: the first warms up."""
    load = replace(load, seed=f"{load.seed}/capacity")
    rates = []
    for number in range(2):
        engine = _with_policy(engine, CONTINUOUS)
        run = run_jobs(engine, load.jobs(number, engine.resolved.model.vocab_size))
        rates.append(load.count / run.seconds)
    return engine, max(rates)


def _with_policy(engine: Engine, batching: Batching) -> Engine:
    resolved = engine.resolved
    return reschedule(engine, replace(resolved.scheduler, policy=batching.policy), resolved.cache)


def _timed(jobs: Sequence[BenchRequest], rate: float, seed: str) -> list[BenchRequest]:
    """Return the requests with arrival times; the first is due at once."""
    times = [0.0, *islice(poisson(rate, seed), len(jobs) - 1)]
    return [replace(job, due=due) for job, due in zip(jobs, times, strict=True)]


def _row(
    batching: Batching,
    runs: Mapping[Batching, Sequence[LoadRun]],
    load: Requests,
    ceilings: Ceilings,
) -> Row:
    kind_runs = runs[batching]
    note = f"over {STATIC.name} batching, round by round"
    compared: tuple[Figure, ...] = ()
    if batching is not STATIC:
        compared = tuple(
            ratios(f"{name} / {STATIC.name}", measure, kind_runs, runs[STATIC], note)
            for name, measure in COMPARED
        )
    predicted: tuple[Figure, ...] = ()
    if batching is CONTINUOUS:  # the only kind in the planner's model of a load
        places = ceilings.model.resolved.scheduler.max_num_seqs
        predicted = ceilings.steady(min(load.count, places), load.traffic())
    records = [record for run in kind_runs for record in run.records]
    due = [record.due - run.started for run in kind_runs for record in run.records]
    return Row(
        batching.name,
        (*figures(MEASURES, kind_runs), *compared, *predicted, *ceilings.achieved(kind_runs)),
        series={
            "TTFT, ms": tuple(1e3 * float(time) for time in ttfts(records)),
            "E2E, ms": tuple(1e3 * float(time) for time in e2es(records)),
            "due, s": tuple(due),
        },
    )


PROMPT_TOKENS, OUTPUT_TOKENS = "16..128", "8..128"


def build_parser() -> argparse.ArgumentParser:
    parser = engine_parser(
        "bench batching",
        "Serve the same requests, which arrive at random times, with static, dynamic and "
        "continuous batching. --batch-size limits the requests at a time for all three.",
        repeats=3,
    )
    add_number(parser, "--num-requests", 48, "requests of each round")
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="mean requests a second (default: as many as continuous batching can serve)",
    )
    add_lengths(parser, PROMPT_TOKENS, OUTPUT_TOKENS)
    return parser


@reported
def run(arguments: argparse.Namespace) -> Result:
    rounds = Rounds(arguments.repeats, arguments.warmup)
    check_rate(arguments.rate)
    seed = str(arguments.seed)
    lengths = DrawnLengths.of_texts(
        arguments.prompt_tokens or PROMPT_TOKENS, arguments.output_tokens or OUTPUT_TOKENS, seed
    )
    load = Requests(arguments.num_requests, lengths, seed=seed)
    options = engine_options(arguments, arguments.model)
    refuse_varied(options, "policy", "max_num_seqs")
    config = EngineConfig(**options)
    resolved = resolve_config(replace(config, max_num_seqs=config.batch_size))
    load.check(resolved)
    with loaded(resolved) as engine:
        return measure_batching(engine, load, arguments.rate, rounds)
