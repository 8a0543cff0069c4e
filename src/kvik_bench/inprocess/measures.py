"""The measures of a run in this process, each with its definition."""

from __future__ import annotations

from kvik_bench.inprocess.inproc import LoadRun
from kvik_bench.load.metrics import (
    DEFINITIONS,
    RunMeasure,
    e2es,
    milliseconds,
    of_completed,
    percentiles,
    prompt_tokens,
    token_times,
    tpots,
    ttfts,
    wall_time,
)
from kvik_bench.report.result import Measure

EngineMeasure = Measure[LoadRun]


def _first_tokens_done(run: LoadRun) -> float:
    """Return the time of the last request's first token."""
    return max(record.times[0] for record in run.records)


def _prefill_rate(run: LoadRun) -> float:
    return prompt_tokens(run) / (_first_tokens_done(run) - run.started)


def decode_seconds(run: LoadRun) -> float:
    """Return the seconds since every request had its first token."""
    return run.ended - _first_tokens_done(run)


def _decode_rate(run: LoadRun) -> float | None:
    since = _first_tokens_done(run)
    tokens = sum(
        count
        for record in run.records
        for time, count in zip(record.times, record.tokens, strict=True)
        if time > since
    )
    return tokens / decode_seconds(run) if tokens else None


def _prefix_hits(run: LoadRun) -> float | None:
    queries = run.after.prefix_queries - run.before.prefix_queries
    return 100 * (run.after.prefix_hits - run.before.prefix_hits) / queries if queries else None


TTFT = milliseconds("TTFT", of_completed(ttfts), f"{DEFINITIONS['ttft']}; mean over the requests")
TPOT = milliseconds("TPOT", of_completed(tpots), f"{DEFINITIONS['tpot']}; mean over the requests")
E2E = milliseconds("E2E", of_completed(e2es), f"{DEFINITIONS['e2e']}; mean over the requests")
TTFTS = percentiles("TTFT", ttfts, DEFINITIONS["ttft"])
ITLS = percentiles("ITL", token_times, DEFINITIONS["itl_token"])
E2ES = percentiles("E2E", e2es, DEFINITIONS["e2e"])

WALL: RunMeasure = Measure("wall time", "s", "less", "from the start to the last token", wall_time)
PREFILL: EngineMeasure = Measure(
    "prefill",
    "tokens/s",
    "more",
    "prompt tokens / time until every request had its first output token",
    _prefill_rate,
)
DECODE: EngineMeasure = Measure(
    "decode",
    "tokens/s",
    "more",
    "output tokens that came after every request had its first / the time they took",
    _decode_rate,
)
KV_USAGE: EngineMeasure = Measure(
    "KV usage",
    "%",
    "less",
    "highest share of the KV cache's blocks that requests held, seen after steps, 5 ms apart",
    lambda run: 100 * run.kv_usage,
)
PREEMPTIONS: EngineMeasure = Measure(
    "preemptions",
    "",
    "less",
    "times a request gave up its blocks, to be computed again",
    lambda run: run.after.preemptions - run.before.preemptions,
)
PREFIX_HITS: EngineMeasure = Measure(
    "prefix hits", "%", "more", "share of the prompt tokens that the prefix cache had", _prefix_hits
)
STEPS: EngineMeasure = Measure(
    "steps", "", "less", "steps of the engine", lambda run: run.after.steps - run.before.steps
)
