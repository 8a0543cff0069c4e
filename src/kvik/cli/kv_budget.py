"""`kvik kv-budget [MODEL] --save FILE`: measure how many tokens each layer keeps."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from kvik.cli.eval import add_data_flag, texts_of
from kvik.cli.flags import (
    Parser,
    add_engine_flags,
    add_force_flag,
    add_model,
    add_option_flags,
    engine_options,
    given_options,
)
from kvik.cli.terminal import say, say_answer, share_bar
from kvik.config.config import EngineConfig
from kvik.config.kv_budget import (
    ENTROPY,
    USUAL_CONTEXT,
    BudgetOptions,
    KVBudgets,
    allot,
    check_model,
    fingerprint_of,
    save_budgets,
    scores_of,
)
from kvik.errors import ConfigError
from kvik.files import can_write
from kvik.options import normalised

READING = ("lora", "dtype", "quantization", "threads", "memory_utilization")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "kv-budget",
        "[MODEL] --save FILE",
        "Distribute the bytes of the KV cache over the layers by need: measure how widely the "
        "attention of each layer is spread, and save how many tokens of a request it keeps. "
        "Engines started with --kv-budget FILE then keep no more, which changes answers.",
    )
    add_model(parser)
    add_data_flag(parser)
    parser.add_argument(
        "--save", type=Path, required=True, metavar="FILE", help="file for the budgets, as JSON"
    )
    add_force_flag(parser)
    add_option_flags(parser, "budgets", BudgetOptions)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    add_engine_flags(parser, READING)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from kvik.launch import resolve_config

    config = EngineConfig(**engine_options(arguments, arguments.model) | {"kv_budget": None})
    options = BudgetOptions(**given_options(BudgetOptions, arguments))
    normalised(options, ConfigError)
    if arguments.save.exists() and not arguments.force:
        raise ConfigError("save", f"{str(arguments.save)!r} exists; --force replaces it")
    if not can_write(arguments.save):  # known before a text is read
        raise ConfigError("save", f"{str(arguments.save)!r} must be a file in a folder to write to")
    spec = resolve_config(config).model
    check_model(spec, "model")
    context = options.context or min(spec.max_context, USUAL_CONTEXT)
    if context > spec.max_context:
        raise ConfigError(
            "context", f"must be at most the model's {spec.max_context} tokens, not {context}"
        )
    entropies: tuple[float, ...] = ()
    data, tokens = "", 0
    if options.by == ENTROPY:
        entropies, data, tokens = _measured(arguments, config)
    full = spec.full_layers
    scores = scores_of(options.by, entropies, len(full))
    sizes = [kv.bytes_per_token for i, kv in enumerate(spec.kv_specs(1)) if kv and i in full]
    allotted = dict(zip(full, allot(scores, sizes, options.bytes, context), strict=True))
    rounded = dict(zip(full, (round(score, 6) for score in scores), strict=True))
    budgets = KVBudgets(
        architecture=spec.architecture,
        fingerprint=fingerprint_of(spec),
        by=options.by,
        bytes=options.bytes,
        context=context,
        data=data,
        tokens=tokens,
        scores=tuple(map(rounded.get, range(spec.num_layers))),
        budgets=tuple(map(allotted.get, range(spec.num_layers))),
    )
    try:
        save_budgets(budgets, arguments.save)
    except OSError as error:
        reason = f"{str(arguments.save)!r} cannot be written ({error.strerror})"
        raise ConfigError("save", reason) from None
    say_answer(asdict(budgets), _as_text(budgets, sizes), as_json=arguments.json)
    say(f"\nsaved in {arguments.save}", error=True)
    return 0


def _measured(
    arguments: argparse.Namespace, config: EngineConfig
) -> tuple[tuple[float, ...], str, int]:
    """Return the scores of `full_layers`, the name of the text, and the number of tokens read."""
    from kvik.evaluate.entropy import TOKENS, measure_entropy

    with share_bar() as progress:
        scores, tokens = measure_entropy(config, texts_of(arguments), TOKENS, progress)
    return scores, "" if arguments.data is None else arguments.data.name, tokens


def _as_text(budgets: KVBudgets, sizes: list[int]) -> str:
    layers = enumerate(zip(budgets.scores, budgets.budgets, strict=True))
    rows = [(i, score, tokens) for i, (score, tokens) in layers if tokens is not None]
    total = sum(tokens * size for (_, _, tokens), size in zip(rows, sizes, strict=True))
    share = total / (budgets.context * sum(sizes))
    read = f", measured on {budgets.tokens:,} tokens" if budgets.tokens else ""
    lines = [
        f"{budgets.by}{read}: {share:.1%} of the bytes of {budgets.context:,} tokens"
        + ("" if len(rows) == len(budgets.budgets) else " in the layers that see all keys"),
        "",
        "layer   score   tokens",
    ]
    lines += [f"{i:5}   {score:5.3f}   {tokens:6,}" for i, score, tokens in rows]
    return "\n".join(lines)
