"""`kvik spec-report [MODEL]`: what guessing ahead gains here, measured and predicted."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvik.cli.eval import text_name, texts_of
from kvik.cli.flags import Parser, add_engine_flags, engine_options
from kvik.config.config import EngineConfig
from kvik.config.speculative import WISHES
from kvik.errors import ConfigError
from kvik_bench.cli.output import (
    add_model,
    add_output_flags,
    add_run_flags,
    check_output,
    integers,
    write_out,
)

if TYPE_CHECKING:
    from kvik.config.config import ResolvedConfig
    from kvik_bench.inprocess.speculation import Prompts

DEFAULT_METHOD = "ngram"  # which any model has


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "spec-report",
        "[MODEL]",
        "Serve the same requests without speculation and with it, in turn: how often drafts are "
        f"right, what they cost, and the speed-up. --spec-method says how ({DEFAULT_METHOD}). "
        "Requests are greedy.",
    )
    add_model(parser)
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help='what prompts are pieces of: plain text, or .jsonl with a field "text" in each line '
        "(default: a story that ships with kvik)",
    )
    add("--batch", type=integers, default=(1, 8), metavar="A,B", help="requests together (1,8)")
    add("--prompt-tokens", type=int, default=64, metavar="N", help="of each, at most (64)")
    add("--output-tokens", type=int, default=128, metavar="N", help="of each (128)")
    add_run_flags(parser, repeats=5)
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)

    from kvik.launch import resolve_config
    from kvik_bench.inprocess.jobs import refuse_varied
    from kvik_bench.inprocess.rounds import Rounds
    from kvik_bench.inprocess.speculation import SpeculationLoad, measure_speculation
    from kvik_bench.report.facts import run_facts

    rounds = Rounds(arguments.repeats, arguments.warmup)
    options = engine_options(arguments, arguments.model)
    # What one run leaves in the cache would serve the next one.
    refuse_varied(options, "enable_prefix_caching")
    config = EngineConfig(**options, enable_prefix_caching=False)
    if all(getattr(config, name) is None for name in WISHES):
        config = replace(config, spec_method=DEFAULT_METHOD)
    guessing = resolve_config(config)
    if guessing.speculation is None:
        raise ConfigError("spec_method", "must name a method: off has nothing to report")
    plain = resolve_config(
        replace(
            config, speculative_config=None, spec_method=None, spec_model=None, spec_tokens=None
        )
    )
    prompts, source = _prompts(arguments, plain)
    load = SpeculationLoad(
        prompts,
        arguments.batch,
        arguments.prompt_tokens,
        arguments.output_tokens,
    )
    facts = {**run_facts(), "prompts from": source}
    write_out(measure_speculation(plain, guessing, load, rounds, facts), arguments)
    return 0


def _prompts(arguments: argparse.Namespace, resolved: ResolvedConfig) -> tuple[Prompts, str]:
    """And where they come from."""
    from kvik.launch import load_tokenizer
    from kvik_bench.inprocess.pieces import Pieces, RandomPieces

    seed, sizes = str(arguments.seed), (arguments.prompt_tokens, arguments.output_tokens)
    texts, tokenizer = texts_of(arguments), load_tokenizer(resolved)
    if tokenizer is not None:
        return Pieces.of(tokenizer, texts, *sizes, seed), text_name(arguments)
    if arguments.data is not None:
        raise ConfigError("data", "cannot be read: the model has no tokenizer")
    random = RandomPieces(resolved.model.vocab_size, *sizes, seed)
    return random, "random tokens: the model has no tokenizer"
