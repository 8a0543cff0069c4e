"""`kvik bench startup [MODEL]`: fresh processes, from their start to the first token."""

from __future__ import annotations

import argparse

from kvik.cli.flags import Parser, add_engine_flags, engine_options
from kvik_bench.cli.output import (
    add_model,
    add_output_flags,
    add_run_flags,
    check_output,
    write_out,
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "bench startup",
        "[MODEL]",
        "Start fresh processes, and time each part of the way to the first token. Files are in the "
        "page cache after the warm-up.",
    )
    add_model(parser)
    parser.add_argument(
        "--prompt-tokens", type=int, default=16, metavar="N", help="of the request (16)"
    )
    add_run_flags(parser, repeats=5)
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)

    from kvik.config.config import EngineConfig
    from kvik.launch import resolve_config
    from kvik_bench.inprocess.jobs import Requests, fixed
    from kvik_bench.inprocess.rounds import Rounds
    from kvik_bench.inprocess.startup import measure_startup
    from kvik_bench.report.facts import run_facts

    rounds = Rounds(arguments.repeats, arguments.warmup)
    options = engine_options(arguments, arguments.model)
    resolved = resolve_config(EngineConfig(**options))
    Requests(1, fixed(arguments.prompt_tokens, 1)).check(resolved)
    result = measure_startup(
        options, resolved, arguments.prompt_tokens, rounds, arguments.seed, run_facts()
    )
    write_out(result, arguments)
    return 0
