"""`kvik plan [MODEL]`: memory, speed and cost of a model on some hardware. Loads nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

from kvik.cli.flags import Parser, add_question_flag, integer, number
from kvik.cli.plan_text import as_text
from kvik.cli.terminal import say, say_report
from kvik.planner.plan import Plan, Question, plan
from kvik.spec.model import SHORT_DTYPES

# Weight and KV formats go by short names; the engine's own names of its dtypes will do too.

# Flags that the question calls otherwise.
FIELDS: Mapping[str, str] = {
    "dtype": "weight_format",
    "kv_dtype": "kv_format",
    "output_tokens": "output",
    "memory_utilization": "utilization",
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "plan",
        "[MODEL]",
        "Tell what a model takes and gives on some hardware: memory, speed, cost. Loads nothing.",
    )
    parser.add_argument(
        "model", nargs="?", default="", help="a folder, hub id or config.json (default: bundled)"
    )

    add = partial(add_question_flag, parser)
    add("--hardware", str, "NAME", "h200, a100-80g, rtx4090, ..., this (default), or a file")
    add("--context", integer, "N", "tokens of a request, prompt and output")
    add("--batch", integer, "N", "requests that run together (default: 1)")
    add("--dtype", _format, "FORMAT", "of weights: bf16, fp16, fp32, fp8, int8, ..., int4")
    add("--kv-dtype", _format, "FORMAT", "of the KV cache: bf16, fp16, fp32, fp8, int8, int4")
    add("--tp", integer, "N", "devices that share each layer (default: 1)")
    add("--pp", integer, "N", "stages of whole layers, of --tp devices each (default: 1)")
    add("--price", number, "USD", "of one device for an hour")
    add("--load", str, "LOAD", "tokens a day (50M), or requests a second (5/s)")
    add("--output-tokens", integer, "N", "generated of the context (default: a quarter)")
    add("--draft", str, "MODEL", "that drafts for speculative decoding")
    add("--draft-cost", number, "C", "time of a draft's step over one of the model (default: 0)")
    add("--memory-utilization", number, "SHARE", "of a device's memory to use (default: 0.9)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    return parser


def run(arguments: argparse.Namespace) -> int:
    answer = plan(question_of(arguments))
    if arguments.json:
        say(json.dumps(as_object(answer)))
    else:
        say_report(as_text(answer))
    return 0


def question_of(arguments: argparse.Namespace) -> Question:
    """What the flags ask."""
    given = {FIELDS.get(name, name): value for name, value in vars(arguments).items()}
    return Question(**{name: value for name, value in given.items() if name != "json"})


def as_object(answer: Plan) -> dict[str, object]:
    """Everything in plain types and exact figures."""
    memory = answer.memory
    sums = {"total": memory.total, "missing": memory.missing, "fits": memory.fits}
    return {**asdict(answer), "memory": {**asdict(memory), **sums}}


def _format(text: str) -> str:
    return SHORT_DTYPES.get(text, text)
