"""`kvik build [MODEL] -o ENGINE`: write an engine folder, whose weights are mapped unchanged."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kvik.cli.flags import (
    Parser,
    add_engine_flags,
    add_force_flag,
    add_model,
    check_new,
    engine_options,
)
from kvik.cli.terminal import byte_bar, say
from kvik.config.units import show_bytes
from kvik.errors import ConfigError
from kvik.spec.engine_folder import Manifest, is_engine_folder, verify

FIELDS = (
    *("revision", "lora", "quantization", "dtype", "kernels", "device", "threads"),
    *("memory_utilization", "spec_method"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "build",
        "[MODEL] -o ENGINE",
        "Write a model's weights in the layout of this machine's kernels, quantised if requested. "
        "An engine folder is used like a model, gives the same tokens, and is ready sooner.",
    )
    add_model(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="ENGINE", help="folder to write; must be new or empty"
    )
    add_force_flag(parser)
    parser.add_argument(
        "--verify",
        type=Path,
        metavar="ENGINE",
        help="build nothing, but read every byte of this folder and compare it with its hash",
    )
    add_engine_flags(parser, only=FIELDS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    if arguments.output is None and arguments.verify is None:
        raise ConfigError("output", "is missing: give -o ENGINE, or --verify ENGINE")
    if arguments.output is not None and arguments.verify is not None:
        raise ConfigError("output", "must be left out with --verify, which builds nothing")
    if arguments.verify is not None:
        if not is_engine_folder(arguments.verify):
            raise ConfigError("verify", f"{str(arguments.verify)!r} is not an engine folder")
        size = verify(arguments.verify)
        say(f"{arguments.verify}: {show_bytes(size)}, all as they were built")
        return 0

    check_new(arguments, is_engine_folder(arguments.output))

    from kvik.build import build_engine
    from kvik.config.config import EngineConfig

    config = EngineConfig(**engine_options(arguments, arguments.model))
    with byte_bar("writing weights") as advance:
        folder, manifest = build_engine(config, arguments.output, advance)
    say(_summary(folder, manifest, time.monotonic() - started))
    return 0


def _summary(folder: Path, manifest: Manifest, seconds: float) -> str:
    quantized = manifest.quantization
    words = "as stored" if quantized == "none" else quantized
    return (
        f"{folder}: {show_bytes(manifest.weight_bytes)} of weights in {seconds:.1f} s "
        f"({manifest.dtype}, quantization {words}, {manifest.kernels} kernels)"
    )
