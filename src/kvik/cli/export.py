"""`kvik export [MODEL] -o FILE.gguf`: write the model as one file, for llama.cpp and programs based
on it."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvik.cli.flags import Parser, add_force_flag, add_model, check_new
from kvik.cli.terminal import byte_bar, say
from kvik.config.model_source import find_adapter, find_model
from kvik.config.units import show_bytes
from kvik.errors import ConfigError
from kvik.files import GGUF, can_write

DEFAULT_TYPE = "q8_0"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "export",
        "[MODEL] -o FILE.gguf",
        "Write a model and its tokenizer as a GGUF file, which llama.cpp and kvik load.",
    )
    add_model(parser, "a folder, a hub id or a GGUF file of floats")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help=f"file to write; ends in {GGUF}",
    )
    parser.add_argument(
        "--type",
        default=DEFAULT_TYPE,
        metavar="TYPE",
        help="type of the matrices: f32, bf16, f16, q8_0, q6_k, q5_k_m, q4_k_m or q4_0; the last "
        f"three use finer types for the most sensitive matrices (default: {DEFAULT_TYPE})",
    )
    parser.add_argument(
        "--lora",
        metavar="DIR",
        help="folder or hub id of a LoRA adapter that is merged into the weights",
    )
    add_force_flag(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from kvik.export import TYPES, plan_export

    path: Path = arguments.output
    if path.suffix.lower() != GGUF:
        raise ConfigError("output", f"must end in {GGUF}, not {path.name[:60]!r}")
    if not can_write(path):
        raise ConfigError("output", f"cannot be written: {str(path)[:200]!r}")
    check_new(arguments, path.is_file())
    if arguments.type not in TYPES:
        raise ConfigError("type", f"must be one of {', '.join(TYPES)}, not {arguments.type[:60]!r}")
    adapter = None if arguments.lora is None else find_adapter("lora", arguments.lora)
    export = plan_export(find_model(arguments.model), TYPES[arguments.type], adapter)
    with byte_bar("writing") as advance:
        export.write(path, lambda size: advance(size, export.size))
    bits = 8 * export.size / export.weights
    say(f"{path}: {show_bytes(path.stat().st_size)}, {bits:.2f} bits a weight")
    return 0
