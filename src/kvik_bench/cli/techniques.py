"""`kvik bench techniques [MODEL]`: what each technique brings, turned on one by one."""

from __future__ import annotations

import argparse
from dataclasses import replace

from kvik.cli.flags import Parser, add_engine_flags, engine_options
from kvik.config.speculative import WISHES
from kvik_bench.cli.output import (
    add_model,
    add_output_flags,
    add_run_flags,
    check_output,
    write_out,
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "bench techniques",
        "[MODEL]",
        "Turn the techniques on one by one, and measure the same requests with each: no KV cache, "
        "KV cache, continuous batching, prefix cache, speculation, quantised weights.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--num-requests", type=int, default=16, metavar="N", help="that share a prefix (16)")
    add("--prefix-tokens", type=int, default=96, metavar="N", help="that they share (96)")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="of their own (32)")
    add("--output-tokens", type=int, default=32, metavar="N", help="of each request (32)")
    add(
        "--alone",
        type=int,
        default=2,
        metavar="N",
        help="so many of them where one is served after the other (2)",
    )
    add_run_flags(parser, repeats=3)
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)

    from kvik.config.config import EngineConfig
    from kvik.launch import resolve_config
    from kvik_bench.inprocess.jobs import Requests, fixed, refuse_varied
    from kvik_bench.inprocess.rounds import Rounds, check_repeats
    from kvik_bench.inprocess.techniques import Ladder, LadderLoad
    from kvik_bench.report.facts import run_facts

    check_repeats(arguments.repeats, arguments.warmup)
    options = engine_options(arguments, arguments.model)
    refuse_varied(options, "quantization", "enable_prefix_caching", "policy", *WISHES)
    config = EngineConfig(**options)
    requests = Requests(
        arguments.num_requests,
        fixed(arguments.prompt_tokens, arguments.output_tokens),
        arguments.prefix_tokens,
        seed=str(arguments.seed),
    )
    ladder = Ladder(
        LadderLoad(requests, arguments.alone),
        lambda loading: resolve_config(
            replace(config, quantization=loading.quantization, spec_method=loading.speculation)
        ),
        arguments.warmup,
    )
    write_out(ladder.measure(Rounds(arguments.repeats, 0), run_facts()), arguments)
    return 0
