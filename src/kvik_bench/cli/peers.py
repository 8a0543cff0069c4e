"""`kvik bench compare [MODEL]`: kvik beside other engines that are installed here."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvik.cli.flags import Parser
from kvik.cli.terminal import say
from kvik.errors import ConfigError
from kvik.interrupts import ended_like_ctrl_c
from kvik_bench.cli.output import add_model, add_output_flags, check_output, write_out

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "bench compare",
        "[MODEL]",
        "Run kvik and other engines on the same model, prompts, threads and precision, one process "
        "at a time, in turns; ratios are taken within rounds.",
    )
    add_model(parser)
    parser.add_argument(
        "--engines",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of the installed ones: transformers, transformers-batching, vllm; or of the file of "
        "--config (default: all). kvik always runs",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML that names engines with their own Pythons, converted models and options",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        default=[],
        metavar="FORMAT",
        help="fp32, bf16, fp16, int8, int4 (default: as the model is stored, or all of the file)",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["prefill", "b1", "b8", "b32"],
        metavar="NAME",
        help="prefill: one prompt; bN: N requests decoded together (prefill b1 b8 b32)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="of each request (512; 128 where decoding)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=64, metavar="N", help="of each request (64)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="for every engine (all cores)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of all engines (3)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="of one process (600)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    add_output_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)
    for name, least in (("threads", 1), ("rounds", 1), ("timeout", 1)):
        value = getattr(arguments, name)
        if value is not None and not value >= least:
            raise ConfigError(name, f"must be at least {least}, not {value}")

    from kvik.config.hardware import detect
    from kvik.config.model_source import find_model
    from kvik.config.model_spec import SHORT_DTYPES, read_model_spec
    from kvik_bench.inprocess.rounds import Watch
    from kvik_bench.peers.adapter_process import run_adapter
    from kvik_bench.peers.compare import Comparison, Found, make_workloads, measure
    from kvik_bench.peers.compare_result import to_result
    from kvik_bench.peers.engine_entries import engines_of_file, installed_engines
    from kvik_bench.report.facts import run_facts

    folder = find_model(arguments.model)
    spec = read_model_spec(folder)
    if arguments.config is None:
        formats = arguments.format or [SHORT_DTYPES[spec.dtype]]
        engines = installed_engines(arguments.engines, formats)
    else:
        engines = engines_of_file(arguments.config, arguments.engines, arguments.format)
    workloads = make_workloads(
        arguments.workloads,
        arguments.prompt_tokens,
        arguments.output_tokens,
        spec.vocab_size,
        arguments.seed,
    )
    longest = max(work.length for work in workloads)
    if longest > spec.max_context:
        raise ConfigError(
            "prompt_tokens",
            f"with the output is {longest} tokens; the model has {spec.max_context}",
        )
    comparison = Comparison(
        name=Path(arguments.model).name or folder.name,
        folder=folder,
        engines=engines,
        workloads=workloads,
        threads=arguments.threads or engines.threads or detect().cores,
        rounds=arguments.rounds,
        timeout=arguments.timeout,
    )
    found, watch = Found(), Watch()
    code = 0
    try:
        with ended_like_ctrl_c():
            measure(comparison, found, run_adapter, _say)
    except KeyboardInterrupt:
        _say("interrupted: these are the figures so far")
        code = INTERRUPTED
    facts = {
        **run_facts(),
        "model": str(folder),
        "threads": str(comparison.threads),
        "rounds": str(comparison.rounds),
    }
    result = to_result(comparison, found, facts)
    write_out(replace(result, remarks=(*watch.remarks(), *result.remarks)), arguments)
    return code or (0 if found.answers else 1)


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone; the files are to be written all the same
        say(line, error=True, flush=True)
