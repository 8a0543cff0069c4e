"""The flags of `kvik bench serve`, and which of them go together."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from kvik.cli.bench_output import integers
from kvik.cli.remote_server import add_key_flag
from kvik.errors import ConfigError

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = (8,)
MAX_IN_FLIGHT = 512
BURSTINESS = 2.0
PROMPT_TOKENS = "128"
OUTPUT_TOKENS = "64"

# flags that mean nothing without one of others, or beside another one
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
    add("--url", required=True, help="such as http://127.0.0.1:8000")
    add("--model", default="", metavar="NAME", help="as the server calls it (its first)")
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="/v1/completions or /v1/chat/completions (completions)",
    )
    add_key_flag(group)
    add("--timeout", default="10m", metavar="TIME", help="of a request (10m)")
    add("--extra-body", default="{}", metavar="JSON", help="fields added to each request")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers of the full length, where the server can (on)",
    )


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load: closed loop, open loop or a trace")
    add = group.add_argument
    add(
        "--concurrency",
        type=integers,
        metavar="N,N",
        help="closed loop: so many users, one number after another (8)",
    )
    add("--think-time", metavar="TIME", help="of a user between an answer and what follows (none)")
    add("--rate", type=_numbers, metavar="R,R", help="open loop: so many requests a second")
    add(
        "--arrivals",
        choices=("poisson", "constant", "bursts"),
        help="of an open loop (poisson)",
    )
    add(
        "--burstiness",
        type=_positive_number,
        metavar="X",
        help="of bursts: coefficient of variation of the gaps; 1 is Poisson (2)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="open loop: times and lengths from a csv file with TIMESTAMP, ContextTokens, "
        "GeneratedTokens",
    )
    add("--speed", type=_positive_number, metavar="X", help="of a trace (1)")
    add("--limit", type=_positive, metavar="N", help="of a trace: its first rows")
    add(
        "--max-in-flight",
        type=_positive,
        metavar="N",
        help="open loop: hold back what would be more (512)",
    )
    add(
        "--num-requests",
        type=_positive,
        metavar="N",
        help=f"to send ({DEFAULT_REQUESTS}, or as many as --duration or the trace allow)",
    )
    add("--duration", metavar="TIME", help="nothing is due after 30s, 5m ...")
    add("--slo", metavar="LIMITS", help="for goodput: ttft=300ms,tpot=50ms,e2e=5s")


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the requests")
    add = group.add_argument
    add(
        "--prompt-tokens",
        metavar="LENGTH",
        help="512, 100..200, normal:512:64 or lognormal:512:0.8 (128)",
    )
    add("--output-tokens", metavar="LENGTH", help="likewise (64)")
    add("--prefix-tokens", type=_positive, metavar="N", help="more, shared by many prompts")
    add("--prefixes", type=_positive, metavar="N", help="different ones (1)")
    add("--turns", type=_positive, default=1, metavar="N", help="of conversations that grow (1)")
    add("--prompts", type=Path, metavar="FILE", help="a text on each line, or .jsonl with `prompt`")
    add("--tokenizer", metavar="MODEL", help="send random token ids of this model, not words")
    add("--vocab-size", type=_positive, metavar="N", help="send random token ids below N")


def check_together(arguments: argparse.Namespace) -> None:
    """Refuse what would be ignored."""
    given = {name for name, value in vars(arguments).items() if value is not None}
    for name, needed in NEEDS:
        if name in given and given.isdisjoint(needed):
            flags = " or ".join(f"--{flag.replace('_', '-')}" for flag in needed)
            raise ConfigError(name, f"means nothing without {flags}")
    for name, other in EXCLUDES:
        if name in given and other in given:
            raise ConfigError(other, f"cannot be together with --{name}")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text[:60]!r}")
    return number


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
