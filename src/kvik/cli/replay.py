"""`kvik replay FILE`: run a recording again and compare the plans and the tokens."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kvik import __version__
from kvik.cli.flags import Parser
from kvik.cli.terminal import say, share_bar
from kvik.config.config import ResolvedConfig
from kvik.config.model_source import find_model
from kvik.config.parallel import with_ranks
from kvik.core.types import EngineRequest
from kvik.engine.recorder import RecordReader, open_recording
from kvik.errors import ModelError

EQUAL, DIFFERENT = 0, 1


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "replay",
        "FILE [--model PATH] [--tensor-parallel-size N]",
        "Run a flight recording again and check that the same plans and tokens result. The exit "
        "code is 1 if they differ.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="written by kvik serve --record")
    parser.add_argument("--model", metavar="PATH", help="path of the model (default: as recorded)")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="processes among which the model is divided (default: as recorded)",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    from kvik.launch import play

    path: Path = arguments.file
    with open_recording(path) as file:
        reader = RecordReader(file, path.name)
        header = reader.header
        if header.version != __version__:
            say(f"recorded by kvik {header.version}; this is {__version__}")
        config = _at(header.config, arguments.model)
        if arguments.tensor_parallel_size is not None:
            config = with_ranks(config, arguments.tensor_parallel_size)
        size = path.stat().st_size
        fetched = _fetched(path, config)
        with share_bar() as tell:
            played = play(
                config,
                header.readings,
                reader.events(),
                lambda steps: tell(f"step {steps}", file.tell() / size),
                fetched,
            )
    compared = f"{played.steps} steps, {played.requests} requests, {played.tokens} tokens"
    if played.difference is not None:
        say(f"different after {compared}:\n{played.difference}")
        return DIFFERENT
    say(f"equal: {compared}")
    if played.failed_steps:
        say(f"{played.failed_steps} steps had failed, and were not compared")
    if played.stopped is None:
        cut = f", {reader.cut} bytes into an event" if reader.cut else ""
        say(f"the recording breaks off there{cut}: the engine was not stopped properly")
        if played.unfinished:
            say(f"unfinished steps, computed again: {played.unfinished}")
    else:
        say(f"the recording ends there: {played.stopped}")
    return EQUAL


def _fetched(path: Path, config: ResolvedConfig) -> list[EngineRequest]:
    """Return what is to be computed first, since other engines had it. Raises RecordError."""
    if config.cache.tiers is None or not config.cache.tiers.peers:
        return []
    from kvik.engine.replay import fetches

    with open_recording(path) as file:
        return fetches(RecordReader(file, path.name).events())


def _at(config: ResolvedConfig, model: str | None) -> ResolvedConfig:
    """Return the configuration with the model at another path. Raises ModelError if it is a
    different model, or missing."""
    if model is None:
        if not Path(config.runner.model_path).exists():
            where = config.runner.model_path
            raise ModelError("model", f"is no longer at {where}: give its path with --model")
        return config
    from kvik.fallback import read_spec

    path = find_model(model)
    fallback = "none" if config.model.fallback is None else "transformers"
    if read_spec(path, fallback) != config.model:
        raise ModelError("model", f"{path} is another model than the one of the recording")
    return replace(config, runner=replace(config.runner, model_path=str(path)))
