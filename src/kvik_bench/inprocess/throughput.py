"""Many requests that are all there at the start: how fast they are done."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.engine.client import Engine
from kvik_bench.inprocess.ceilings import Ceilings
from kvik_bench.inprocess.inproc import Run, run_jobs
from kvik_bench.inprocess.jobs import Requests
from kvik_bench.inprocess.measures import (
    E2ES,
    INPUT,
    KV_USAGE,
    OUTPUT,
    PREEMPTIONS,
    PREFIX_HITS,
    REQUESTS,
    STEPS,
    TOTAL,
    TTFTS,
    WALL,
    figures,
)
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.load.metrics import e2es, ttfts
from kvik_bench.report.facts import engine_facts, peak_memory
from kvik_bench.report.result import Chart, Result, Row

MEASURES = (
    *(REQUESTS, INPUT, OUTPUT, TOTAL, WALL, *TTFTS, *E2ES),
    *(STEPS, KV_USAGE, PREEMPTIONS, PREFIX_HITS),
)
CHARTS = (
    Chart("ecdf", "Time to first token", "TTFT, ms"),
    Chart("ecdf", "Whole answers", "E2E, ms"),
)


def measure_throughput(
    engine: Engine, load: Requests, rounds: Rounds, facts: Mapping[str, str], ceilings: Ceilings
) -> Result:
    vocab_size = engine.resolved.model.vocab_size
    label = "offline"
    runs: list[Run] = []
    with rounds:
        for number, _ in rounds.over((label,)):
            run = run_jobs(engine, load.jobs(number, vocab_size))
            if number >= 0:
                runs.append(run)
    together = min(load.count, engine.resolved.scheduler.max_num_seqs)
    records = [record for run in runs for record in run.records]
    row = Row(
        label,
        (
            *figures(MEASURES, runs),
            peak_memory(),
            *ceilings.steady(together, load.traffic()),
            *ceilings.achieved(runs),
        ),
        series={
            "TTFT, ms": tuple(1e3 * float(time) for time in ttfts(records)),
            "E2E, ms": tuple(1e3 * float(time) for time in e2es(records)),
        },
    )
    return Result(
        "throughput",
        {**facts, **engine_facts(engine.resolved), "requests": str(load.count)},
        (row,),
        (*rounds.remarks, *ceilings.notes, ceilings.remark("The load", runs)),
        CHARTS,
    )
