"""`kvik bench batching [MODEL]`: static, dynamic and continuous batching under one load."""

from __future__ import annotations

import argparse
from dataclasses import replace

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
        "bench batching",
        "[MODEL]",
        "Serve the same requests, which come at random times, with static, dynamic and continuous "
        "batching in turn. --batch-size limits the requests at a time for all three.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--num-requests", type=int, default=48, metavar="N", help="of each round (48)")
    add(
        "--rate",
        type=float,
        metavar="R",
        help="requests a second, in the mean (as many as continuous batching can just serve)",
    )
    add(
        "--prompt-tokens",
        default="16..128",
        metavar="LENGTH",
        help="512, 100..200, normal:512:64 or lognormal:512:0.8 (16..128)",
    )
    add("--output-tokens", default="8..128", metavar="LENGTH", help="likewise (8..128)")
    add_run_flags(parser, repeats=3)
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)

    from kvik.config.config import EngineConfig
    from kvik.launch import resolve_config
    from kvik_bench.inprocess.batching import check_rate, measure_batching
    from kvik_bench.inprocess.ceilings import Ceilings
    from kvik_bench.inprocess.inproc import loaded
    from kvik_bench.inprocess.jobs import Requests, refuse_varied
    from kvik_bench.inprocess.rounds import Rounds
    from kvik_bench.load.lengths import DrawnLengths, parse_length
    from kvik_bench.report.facts import run_facts

    rounds = Rounds(arguments.repeats, arguments.warmup)
    check_rate(arguments.rate)
    prompt = parse_length("prompt_tokens", arguments.prompt_tokens)
    output = parse_length("output_tokens", arguments.output_tokens)
    seed = str(arguments.seed)
    load = Requests(arguments.num_requests, DrawnLengths(prompt, output, seed), seed=seed)
    options = engine_options(arguments, arguments.model)
    refuse_varied(options, "policy", "max_num_seqs")
    config = EngineConfig(**options)
    resolved = resolve_config(replace(config, max_num_seqs=config.batch_size))
    load.check(resolved)
    with loaded(resolved) as engine:
        result = measure_batching(
            engine, load, arguments.rate, rounds, run_facts(), Ceilings.of(resolved)
        )
    write_out(result, arguments)
    return 0
