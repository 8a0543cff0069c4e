"""Shared by the bench commands: flags for repetitions and output, and writing results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvik.cli.flags import OF_SERVERS, Parser, add_engine_flags, add_model
from kvik.cli.terminal import say
from kvik.errors import ConfigError
from kvik.files import can_write, write_whole
from kvik.options import Integer

if TYPE_CHECKING:
    from kvik_bench.report.result import Result


def engine_parser(verb: str, description: str, repeats: int) -> Parser:
    """Return the parser of a command that measures a local engine; the command adds the flags of
    its load.

    Args:
        repeats: default of `--repeats`.
    """
    parser = Parser(verb, "[MODEL]", description)
    add_model(parser)
    add_run_flags(parser, repeats)
    add_output_flags(parser)
    add_engine_flags(parser, left_out=["chat_template", *OF_SERVERS])
    return parser


def integers(text: str) -> tuple[int, ...]:
    """ "1,8,32" -> (1, 8, 32), for argparse."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or len(set(numbers)) < len(numbers):
        message = f"must be different integers separated by commas, not {text[:60]!r}"
        raise argparse.ArgumentTypeError(message)
    return numbers


def integer_up_to(high: int) -> Callable[[str], int]:
    """Return a reader of an integer from 1 to `high`, for argparse."""
    kind = Integer(1, high)

    def read(text: str) -> int:
        try:
            return kind.checked(kind.parse(text))
        except ValueError:
            message = f"must be an integer in [1, {high}], not {text[:60]!r}"
            raise argparse.ArgumentTypeError(message) from None

    return read


class Flags(Protocol):
    """A parser, or a group of its flags."""

    def add_argument(self, *names: str, **facts: Any) -> object: ...


def add_number(to: Flags, flag: str, default: float, help_text: str, metavar: str = "N") -> None:
    """Add a flag for a number of the type of its default."""
    shown = f"{help_text} (default: {default:g})"
    to.add_argument(flag, type=type(default), default=default, metavar=metavar, help=shown)


def add_numbers(
    to: Flags, flag: str, default: tuple[int, ...], help_text: str, metavar: str = "N,N"
) -> None:
    """Add a flag for different integers."""
    shown = f"{help_text} (default: {','.join(map(str, default))})"
    to.add_argument(flag, type=integers, default=default, metavar=metavar, help=shown)


def add_lengths(to: Flags, prompt: str, output: str) -> None:
    """Add flags for the lengths of prompts and answers, which have these defaults."""
    forms = "512, 100..200, normal:512:64 or lognormal:512:0.8"
    for flag, help_text, default in (
        ("--prompt-tokens", f"tokens of a prompt: {forms}", prompt),
        ("--output-tokens", "tokens of an answer", output),
    ):
        to.add_argument(flag, metavar="LENGTH", help=f"{help_text} (default: {default})")


def add_run_flags(parser: argparse.ArgumentParser, repeats: int) -> None:
    group = parser.add_argument_group("repetition")
    add_number(group, "--repeats", repeats, "number of measurements")
    add_number(group, "--warmup", 1, "warm-ups, which are not measured")
    add_number(group, "--seed", 0, "seed of prompts and loads")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write every value; -: to standard output")
    group.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    group.add_argument("--plot", metavar="FOLDER", help="write charts as PNG")
    group.add_argument("--html", metavar="FILE", help="write a report with charts, in one file")


def reported(
    measure: Callable[[argparse.Namespace], Result],
) -> Callable[[argparse.Namespace], int]:
    """Turn a measurement into a command, which writes its result if that is possible."""

    def run(arguments: argparse.Namespace) -> int:
        check_output(arguments)
        from kvik_bench.report.result import run_facts

        facts = run_facts()
        result = measure(arguments)
        write_out(replace(result, facts={**facts, **result.facts}), arguments)
        return 0

    return run


def check_output(arguments: argparse.Namespace) -> None:
    """Check, before anything is measured, that the output can be written."""
    if arguments.plot or arguments.html:
        from kvik_bench.report.plots import require_matplotlib

        require_matplotlib("plot" if arguments.plot else "html")
    for name in ("json", "html"):
        file = getattr(arguments, name)
        if not file or (name == "json" and file == "-"):
            continue
        if not can_write(Path(file)):
            raise ConfigError(name, f"{file[:60]!r} must be a file in a folder to write to")
    if arguments.plot and not can_write(Path(arguments.plot) / "chart.png", parents=True):
        raise ConfigError("plot", f"{arguments.plot[:60]!r} must be a folder to write to")


def write_out(result: Result, arguments: argparse.Namespace) -> None:
    """Write the requested files, then print the tables, even if a file cannot be written. Files
    come first, so that they exist if the reader of the tables closes its pipe."""
    try:
        _write_files(result, arguments)
    finally:
        _print(result, arguments)


def _write_files(result: Result, arguments: argparse.Namespace) -> None:
    if arguments.json and arguments.json != "-":
        _write(Path(arguments.json), result.to_json() + "\n", "json")
    if arguments.plot:
        from kvik_bench.report.plots import write_plots

        for path in write_plots(result, Path(arguments.plot)):
            say(f"wrote {path}", error=True)
    if arguments.html:
        from kvik_bench.report.plots import as_html

        _write(Path(arguments.html), as_html(result), "html")


def _print(result: Result, arguments: argparse.Namespace) -> None:
    from kvik_bench.report.table import as_markdown, print_tables

    if arguments.json == "-":
        say(result.to_json())
    elif arguments.markdown:
        say(as_markdown(result))
    else:
        print_tables(result)


def _write(path: Path, text: str, name: str) -> None:
    try:
        write_whole(path, text.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(name, f"cannot be written ({error.strerror})") from None
    say(f"wrote {path}", error=True)
