"""`kvik bench throughput [MODEL]`: many requests at once, and how fast they are done."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvik.cli.flags import Parser, add_engine_flags, engine_options
from kvik.errors import ConfigError
from kvik_bench.cli.output import (
    add_model,
    add_output_flags,
    add_run_flags,
    check_output,
    write_out,
)

if TYPE_CHECKING:
    from kvik_bench.inprocess.jobs import Requests

COUNT, PROMPT_TOKENS, OUTPUT_TOKENS = 128, "128", "64"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "bench throughput",
        "[MODEL]",
        "Serve many requests that are all there at the start, as fast as the engine can.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--num-requests", type=int, metavar="N", help=f"({COUNT}, or all of a trace)")
    add(
        "--prompt-tokens",
        metavar="LENGTH",
        help=f"512, 100..200, normal:512:64 or lognormal:512:0.8 ({PROMPT_TOKENS})",
    )
    add("--output-tokens", metavar="LENGTH", help=f"likewise ({OUTPUT_TOKENS})")
    add("--prefix-tokens", type=int, default=0, metavar="N", help="more, shared by many prompts")
    add("--prefixes", type=int, default=1, metavar="N", help="different ones (1)")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths from a csv file with TIMESTAMP, ContextTokens, GeneratedTokens; its times "
        "do not count",
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
    from kvik_bench.inprocess.rounds import Rounds
    from kvik_bench.inprocess.throughput import measure_throughput
    from kvik_bench.report.facts import run_facts

    rounds = Rounds(arguments.repeats, arguments.warmup)
    load = _load(arguments)
    resolved = resolve_config(EngineConfig(**engine_options(arguments, arguments.model)))
    load.check(resolved)
    with loaded(resolved) as engine:
        result = measure_throughput(engine, load, rounds, run_facts(), Ceilings.of(resolved))
    write_out(result, arguments)
    return 0


def _load(arguments: argparse.Namespace) -> Requests:
    from kvik_bench.inprocess.jobs import Requests
    from kvik_bench.load.arrivals import read_trace
    from kvik_bench.load.lengths import DrawnLengths, Lengths, TraceLengths, parse_length

    lengths: Lengths
    count, field = arguments.num_requests, "prompt_tokens"
    if arguments.trace is None:
        prompt = parse_length("prompt_tokens", arguments.prompt_tokens or PROMPT_TOKENS)
        output = parse_length("output_tokens", arguments.output_tokens or OUTPUT_TOKENS)
        lengths = DrawnLengths(prompt, output, str(arguments.seed))
        count = COUNT if count is None else count
    else:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(arguments, name) is not None:
                raise ConfigError(name, "cannot be together with --trace")
        rows = read_trace(arguments.trace)
        lengths, field = TraceLengths(rows), "trace"
        count = len(rows) if count is None else count
    return Requests(
        count,
        lengths,
        arguments.prefix_tokens,
        arguments.prefixes,
        str(arguments.seed),
        field,
    )
