"""`kvik compare [MODEL...]`: compares models and formats: size, quality and speed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvik.cli.eval import READING, ROUNDING, add_text_flags, text_name, texts_of
from kvik.cli.flags import Parser, add_engine_flags, engine_options
from kvik.config.config import EngineConfig, check_config
from kvik.errors import ConfigError
from kvik_bench.cli.output import add_number, add_output_flags, reported

if TYPE_CHECKING:
    from kvik_bench.inprocess.models import Contender
    from kvik_bench.report.result import Result

BUNDLED = "bundled"  # the name of the model that needs none


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "compare",
        "[MODEL...]",
        "Compare models and formats: memory, perplexity, distance from the first of them, which "
        "is the reference, and speed.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="folders or hub ids (default: '', the bundled model)",
    )
    group = parser.add_argument_group("the first model in other formats")
    group.add_argument(
        "--quantizations",
        type=_names,
        default=(),
        metavar="A,B",
        help="also with weights rounded at load to each of these formats",
    )
    group.add_argument(
        "--kv-cache-dtypes",
        type=_names,
        default=(),
        metavar="A,B",
        help="also with the KV cache in each of these formats",
    )
    add_text_flags(parser)
    group = parser.add_argument_group("speed")
    group.add_argument(
        "--speed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the decoding of one request at a time; each model is loaded again in each "
        "round (default: on)",
    )
    add_number(group, "--prompt-tokens", 32, "tokens of the prompt")
    add_number(group, "--output-tokens", 64, "tokens of the answer")
    add_number(group, "--repeats", 3, "rounds")
    add_output_flags(parser)
    add_engine_flags(parser, [name for name in READING if name not in ("lora", *ROUNDING)])
    return parser


@reported
def run(arguments: argparse.Namespace) -> Result:
    from kvik.evaluate.quality import reading_bar
    from kvik_bench.inprocess.models import Decoding, ModelComparison
    from kvik_bench.inprocess.rounds import check_repeats

    check_repeats(arguments.repeats, 0)
    if arguments.output_tokens < 2:
        raise ConfigError("output_tokens", f"must be at least 2, not {arguments.output_tokens}")
    decoding = Decoding(arguments.prompt_tokens, arguments.output_tokens, arguments.repeats)
    comparison = ModelComparison.of(
        list(_contenders(arguments)),
        texts_of(arguments),
        arguments.reading_window,
        arguments.stride,
        decoding if arguments.speed else None,
    )
    return comparison.measure(reading_bar, {"read": text_name(arguments)})


def _contenders(arguments: argparse.Namespace) -> Iterator[Contender]:
    """Yield the first model, its other formats, and the other models."""
    from kvik_bench.inprocess.models import Contender

    options: dict[str, Any] = engine_options(arguments, "")
    shared = {name: value for name, value in options.items() if name not in ROUNDING}
    models = arguments.models or [shared.get("model", "")]
    names = _labels(models)
    configs = [EngineConfig(**{**shared, "model": model}) for model in models]
    first = configs[0]
    yield Contender(names[0], first)
    others = [(kind, "quantization", kind) for kind in arguments.quantizations]
    others += [(f"KV {kind}", "kv_cache_dtype", kind) for kind in arguments.kv_cache_dtypes]
    for label, name, kind in others:
        try:
            config = check_config(replace(first, **{name: kind}))
        except ConfigError as error:
            field = f"{name}s" if error.field == name else error.field  # the flag has several
            raise ConfigError(field, error.message) from None
        yield Contender(f"{names[0]} {label}", config)
    for name, config in zip(names[1:], configs[1:], strict=True):
        yield Contender(name, config)


def _labels(models: list[str]) -> list[str]:
    """Return the last part of each name, or the whole name if it is not unique."""
    short = [Path(model).name or BUNDLED for model in models]
    return [
        name if short.count(name) == 1 else model or BUNDLED
        for name, model in zip(short, models, strict=True)
    ]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"must be different names separated by commas, not {text[:60]!r}"
        )
    return names
