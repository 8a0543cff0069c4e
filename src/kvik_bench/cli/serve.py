"""`kvik bench serve --url URL`: load any OpenAI-compatible server, and measure it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvik.cli.flags import Parser
from kvik.config.model_source import find_model
from kvik.errors import ConfigError
from kvik.interrupts import ended_like_ctrl_c
from kvik.model_files import model_files
from kvik.planner.serving import parse_seconds, parse_slo
from kvik.remote_server import RemoteServer, add_key_flag
from kvik_bench.cli.output import (
    add_lengths,
    add_output_flags,
    add_run_flags,
    check_output,
    integer_up_to,
    integers,
    write_out,
)
from kvik_bench.load.drive import Budget, ClosedLoop, Level, LoadTest, OpenLoop, RunLog
from kvik_bench.load.workload import (
    MAX_TOKENS,
    DrawnLengths,
    Filler,
    Lengths,
    LoadWorkload,
    RandomWorkload,
    TextWorkload,
    TokenFiller,
    TraceLengths,
    TraceRow,
    WordFiller,
    bursts,
    constant,
    parse_length,
    poisson,
    read_texts,
    read_trace,
)
from kvik_bench.report.result import run_facts

if TYPE_CHECKING:
    from kvik_bench.load.openai_target import TargetServer


# The flags of `kvik bench serve`, and their valid combinations.

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = (8,)
MAX_USERS = 1 << 16  # with a connection each
MAX_IN_FLIGHT = 512
_positive = integer_up_to(MAX_TOKENS)
BURSTINESS = 2.0
PROMPT_TOKENS = "128"
OUTPUT_TOKENS = "64"

# flags that need one of others, and flags that exclude each other
NEEDS = (
    ("arrivals", ("rate",)),
    ("burstiness", ("rate",)),
    ("max_in_flight", ("rate", "trace")),
    ("speed", ("trace",)),
    ("limit", ("trace",)),
    ("prefixes", ("prefix_tokens",)),
)
EXCLUDES = (
    ("concurrency", "rate"),
    ("concurrency", "trace"),
    ("rate", "trace"),
    ("trace", "prompt_tokens"),
    ("trace", "output_tokens"),
    ("prompts", "trace"),
    ("prompts", "prompt_tokens"),
    ("prompts", "prefix_tokens"),
    ("prompts", "tokenizer"),
    ("prompts", "vocab_size"),
    ("tokenizer", "vocab_size"),
)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    add = group.add_argument
    add("--url", required=True, help="URL of the server, such as http://127.0.0.1:8000")
    add(
        "--model",
        default="",
        metavar="NAME",
        help="the server's name of the model (default: the first that it lists); of several, "
        "separated by commas, each conversation takes one",
    )
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="/v1/completions or /v1/chat/completions (default: completions)",
    )
    add_key_flag(group)
    add("--timeout", default="10m", metavar="TIME", help="limit of a request (default: 10m)")
    add("--extra-body", default="{}", metavar="JSON", help="fields added to each request")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="request answers of the full length, if the server supports it (default: on)",
    )


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load: closed loop, open loop or a trace")
    add = group.add_argument
    add(
        "--concurrency",
        type=integers,
        metavar="N,N",
        help="closed loop: users at a time; several numbers are measured one after another "
        "(default: 8)",
    )
    add("--think-time", metavar="TIME", help="closed loop: pause of a user after an answer")
    add("--rate", type=_numbers, metavar="R,R", help="open loop: requests a second")
    add(
        "--arrivals",
        choices=("poisson", "constant", "bursts"),
        help="open loop with --rate: distribution of arrivals (default: poisson)",
    )
    add(
        "--burstiness",
        type=_positive_number,
        metavar="X",
        help="--arrivals bursts: coefficient of variation of the gaps; 1 is Poisson (default: 2)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="open loop: times and lengths from a csv file with TIMESTAMP, ContextTokens, "
        "GeneratedTokens",
    )
    add(
        "--speed", type=_positive_number, metavar="X", help="trace: speed of its clock (default: 1)"
    )
    add("--limit", type=_positive, metavar="N", help="trace: number of rows to send")
    add(
        "--max-in-flight",
        type=_positive,
        metavar="N",
        help="open loop: limit of requests in flight; further ones wait (default: 512)",
    )
    add(
        "--num-requests",
        type=_positive,
        metavar="N",
        help=f"requests to send (default: {DEFAULT_REQUESTS}, or all of --duration or the trace)",
    )
    add("--duration", metavar="TIME", help="time after which no request is due, such as 30s or 5m")
    add("--slo", metavar="LIMITS", help="limits for goodput, such as ttft=300ms,tpot=50ms,e2e=5s")


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the requests")
    add = group.add_argument
    add_lengths(group, PROMPT_TOKENS, OUTPUT_TOKENS)
    add("--prefix-tokens", type=_positive, metavar="N", help="shared tokens before each prompt")
    add("--prefixes", type=_positive, metavar="N", help="number of different prefixes (default: 1)")
    add(
        "--turns",
        type=_positive,
        default=1,
        metavar="N",
        help="turns of each conversation; each repeats the turns before (default: 1)",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="send these prompts: a text on each line, or .jsonl with a field prompt",
    )
    add("--tokenizer", metavar="MODEL", help="send random token ids of this model, not words")
    add("--vocab-size", type=_positive, metavar="N", help="send random token ids below N")


def check_together(arguments: argparse.Namespace) -> None:
    """Refuse flags that would be ignored."""
    options = {name for name, value in vars(arguments).items() if value is not None}
    for name, needed in NEEDS:
        if name in options and options.isdisjoint(needed):
            flags = " or ".join(f"--{flag.replace('_', '-')}" for flag in needed)
            raise ConfigError(name, f"needs {flags}")
    for name, other in EXCLUDES:
        if name in options and other in options:
            raise ConfigError(other, f"cannot be combined with --{name}")


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text[:60]!r}")
    return number


def _numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(map(_positive_number, text.split(",")))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"must be different numbers, not {text[:60]!r}")
    return numbers


DESCRIPTION = (
    "Load any OpenAI-compatible server and measure it: times to the first token, between "
    "tokens and to the end, throughput, goodput, and the client's own delay."
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("bench serve", "--url URL", DESCRIPTION)
    add_server_flags(parser)
    add_load_flags(parser)
    add_workload_flags(parser)
    add_run_flags(parser, repeats=1)
    add_output_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError("bench serve", "needs aiohttp: pip install 'kvik[bench]'") from None

    from kvik_bench.load.serve import ServeBench

    bench = ServeBench(_test(arguments), _server(arguments))
    facts = {**run_facts(), **_facts(arguments)}
    progress = Progress()
    try:
        with ended_like_ctrl_c():
            asyncio.run(bench.run(progress.show if sys.stderr.isatty() else None))
    finally:  # after an interruption, print the results so far
        progress.end()
        if any(log.records for logs in bench.logs.values() for log in logs):
            write_out(bench.result(facts), arguments)
    return 0 if bench.succeeded else 1


class Progress:
    """Shows progress in one line on standard error."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, label: str, log: RunLog, seconds: float) -> None:
        text = (
            f"{label}: {seconds:.0f} s, {log.finished} done, {log.in_flight} in flight, "
            f"{log.failed} failed, {log.output_tokens / seconds:.0f} tokens/s"
        )
        print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def end(self) -> None:
        if self._width:
            print("\r" + " " * self._width, end="\r", file=sys.stderr, flush=True)


def _server(arguments: argparse.Namespace) -> TargetServer:
    from kvik_bench.load.openai_target import Dialect, TargetServer

    remote = RemoteServer.at(arguments.url, arguments.api_key)
    try:
        extra = json.loads(arguments.extra_body)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError("extra_body", f"must be a JSON object, not {arguments.extra_body[:60]!r}")
    return TargetServer(
        remote.url,
        arguments.endpoint,
        arguments.model,
        remote.key,
        extra,
        parse_seconds("timeout", arguments.timeout),
        Dialect(ignore_eos=arguments.ignore_eos),
    )


def _test(arguments: argparse.Namespace) -> LoadTest:
    if arguments.repeats < 1:
        raise ConfigError("repeats", f"must be at least 1, not {arguments.repeats}")
    if not 0 <= arguments.warmup <= MAX_TOKENS:
        raise ConfigError("warmup", f"must be in [0, {MAX_TOKENS}], not {arguments.warmup}")
    duration = parse_seconds("duration", arguments.duration) if arguments.duration else None
    num_requests = arguments.num_requests
    if num_requests is None and duration is None and arguments.trace is None:
        num_requests = DEFAULT_REQUESTS
    think_time = parse_seconds("think_time", arguments.think_time) if arguments.think_time else 0.0
    levels, workload = _levels_and_workload(arguments, think_time)
    return LoadTest(
        levels,
        workload,
        Budget(num_requests, duration),
        parse_slo(arguments.slo) if arguments.slo else None,
        think_time,
        arguments.repeats,
        arguments.warmup,
        arguments.seed,
        fresh=not (arguments.prompts or arguments.prefix_tokens or arguments.turns > 1),
    )


def _levels_and_workload(
    arguments: argparse.Namespace, think_time: float
) -> tuple[tuple[Level, ...], Callable[[str], LoadWorkload]]:
    check_together(arguments)
    if arguments.trace:
        rows = read_trace(arguments.trace, arguments.speed or 1.0, arguments.limit)
        return (_trace_level(arguments, rows),), _workload(arguments, rows)
    if arguments.rate:
        levels = tuple(_open_level(arguments, rate) for rate in arguments.rate)
    else:
        users = arguments.concurrency or DEFAULT_CONCURRENCY
        for number in users:
            if not 1 <= number <= MAX_USERS:
                raise ConfigError("concurrency", f"must be in [1, {MAX_USERS}], not {number}")
        levels = tuple(_closed_level(number, think_time) for number in users)
    return levels, _workload(arguments, ())


def _closed_level(users: int, think_time: float) -> Level:
    return Level(f"concurrency {users}", users, lambda seed: ClosedLoop(users, think_time))


def _open_level(arguments: argparse.Namespace, rate: float) -> Level:
    limit = arguments.max_in_flight or MAX_IN_FLIGHT
    burstiness = arguments.burstiness or BURSTINESS
    offsets: Mapping[str, Callable[[str], Iterator[float]]] = {
        "constant": lambda seed: constant(rate),
        "poisson": lambda seed: poisson(rate, seed),
        "bursts": lambda seed: bursts(rate, burstiness, seed),
    }
    kind = arguments.arrivals or "poisson"
    return Level(
        f"{rate:g} requests/s, {kind}", limit, lambda seed: OpenLoop(offsets[kind](seed), limit)
    )


def _trace_level(arguments: argparse.Namespace, rows: Sequence[TraceRow]) -> Level:
    offsets = [row.offset for row in rows]
    limit = arguments.max_in_flight or MAX_IN_FLIGHT
    label = arguments.trace.name + (f" x{arguments.speed:g}" if arguments.speed else "")
    return Level(label, limit, lambda seed: OpenLoop(offsets, limit))


def _workload(
    arguments: argparse.Namespace, rows: Sequence[TraceRow]
) -> Callable[[str], LoadWorkload]:
    """Return a function from seed to workload; lengths come from the trace, if there is one."""

    prompt = parse_length("prompt_tokens", arguments.prompt_tokens or PROMPT_TOKENS)
    output = parse_length("output_tokens", arguments.output_tokens or OUTPUT_TOKENS)
    turns, prefix = arguments.turns, arguments.prefix_tokens or 0
    if arguments.prompts:
        texts = read_texts(arguments.prompts)
        return lambda seed: TextWorkload(texts, output, seed, turns)
    filler = _filler(arguments)

    def workload(seed: str) -> LoadWorkload:
        lengths: Lengths = TraceLengths(rows) if rows else DrawnLengths(prompt, output, seed)
        return RandomWorkload(lengths, filler, seed, turns, prefix, arguments.prefixes or 1)

    return workload


def _filler(arguments: argparse.Namespace) -> Filler:
    """Return a filler of token ids if the vocabulary is known, else of words."""

    if not arguments.tokenizer and not arguments.vocab_size:
        return WordFiller()
    if arguments.endpoint != "completions" or arguments.turns > 1:
        named = "tokenizer" if arguments.tokenizer else "vocab_size"
        raise ConfigError(
            named, "makes token ids, which need the endpoint completions and a single turn"
        )
    if arguments.vocab_size:
        return TokenFiller(arguments.vocab_size)
    tokenizer = model_files(find_model(arguments.tokenizer, weights=False)).tokenizer()
    return TokenFiller(tokenizer.vocab_size, tokenizer.special_ids)


def _facts(arguments: argparse.Namespace) -> Mapping[str, str]:
    """Return the facts of the load, and the command without the key."""
    words = ["kvik", *sys.argv[1:]]
    for i, word in enumerate(words):
        if word.startswith("--api-key=") and not word.startswith("--api-key=@"):
            words[i] = "--api-key=..."
        elif i and words[i - 1] == "--api-key" and not word.startswith("@"):
            words[i] = "..."
    exact = arguments.tokenizer or arguments.vocab_size
    if arguments.prompts:
        prompts = (
            f"texts of {arguments.prompts}, from the first for each load and repeat: a prefix "
            "cache has them from the one before"
        )
    else:
        prompts = "random token ids" if exact else "random words, about one token each"
    return {"command": shlex.join(words), "prompts": prompts, "seed": str(arguments.seed)}
