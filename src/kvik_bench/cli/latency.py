"""`kvik bench latency [MODEL]`: one batch at a time, prompts and tokens timed apart."""

from __future__ import annotations

import argparse

from kvik.cli.flags import Parser, add_engine_flags, engine_options
from kvik_bench.cli.output import (
    add_model,
    add_output_flags,
    add_run_flags,
    check_output,
    integers,
    write_out,
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "bench latency",
        "[MODEL]",
        "Time one batch at a time: the first token, each token after it, and the whole answer.",
    )
    add_model(parser)
    parser.add_argument(
        "--batch",
        type=integers,
        default=(1, 8, 32),
        metavar="N,N",
        help="requests sent at the same time, one size after another (1,8,32)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, metavar="N", help="of each request (128)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=64, metavar="N", help="of each request (64)"
    )
    add_run_flags(parser, repeats=3)
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)

    from kvik.config.config import EngineConfig
    from kvik.launch import resolve_config
    from kvik_bench.inprocess.ceilings import Ceilings
    from kvik_bench.inprocess.inproc import loaded
    from kvik_bench.inprocess.latency import LatencyLoad, measure_latency
    from kvik_bench.inprocess.rounds import Rounds
    from kvik_bench.report.facts import run_facts

    rounds = Rounds(arguments.repeats, arguments.warmup)
    load = LatencyLoad(
        arguments.batch, arguments.prompt_tokens, arguments.output_tokens, arguments.seed
    )
    resolved = resolve_config(EngineConfig(**engine_options(arguments, arguments.model)))
    load.check(resolved)
    with loaded(resolved) as engine:
        result = measure_latency(engine, load, rounds, run_facts(), Ceilings.of(resolved))
    write_out(result, arguments)
    return 0
