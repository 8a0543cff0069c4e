"""`kvik train-heads [MODEL] --data FILE -o FOLDER`: draft heads for speculative decoding."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvik.cli.flags import (
    Parser,
    add_engine_flags,
    add_model,
    add_option_flags,
    engine_options,
    given_options,
)
from kvik.cli.terminal import say, say_report, share_bar
from kvik.config.config import EngineConfig
from kvik.config.draft_heads import EAGLE, KINDS, MAX_DEPTH, MAX_LAYERS, MEDUSA
from kvik.errors import ConfigError
from kvik.options import FORMERLY, Integer, Number, OneOf, normalised, option, options_of

if TYPE_CHECKING:
    from kvik.training.heads import HeadsRecipe, TrainedHeads

# Options that bear on the hidden states that the heads learn from.
READING = (
    "dtype",
    "quantization",
    "device",
    "kernels",
    "attention_backend",
    "threads",
    "kv_cache_dtype",
    "memory_utilization",
)
DRAFTS = 4, 8, 16, 32  # trees that the report tells of


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """Which heads to train, and how long."""

    kind: str = option(
        MEDUSA,
        OneOf(KINDS),
        "medusa: heads that each guess a token further ahead; eagle: one layer that goes on from "
        "its own guesses",
    )
    depth: int = option(4, Integer(1, MAX_DEPTH), "tokens guessed ahead")
    layers: int | None = option(
        None, Integer(1, MAX_LAYERS), "medusa: blocks of a head; None: 1", {"kind": MEDUSA}
    )
    inner: int | None = option(
        None,
        Integer(1, 1 << 20),
        "eagle: width of its feed-forward; None: twice the hidden size",
        {"kind": EAGLE},
    )
    tokens: int = option(
        1_000_000, Integer(1, 1 << 40), "tokens to learn from; a shorter text is read several times"
    )
    rows: int = option(512, Integer(1, 1 << 20), "tokens of a step")
    learning_rate: float = option(1e-3, Number(0, 1, above=True), "of AdamW", {FORMERLY: "rate"})
    window: int = option(
        512, Integer(2, 1 << 16), "tokens that the model reads at once, at most its context"
    )
    seed: int = option(0, Integer(0, 1 << 62), "seed of everything that is drawn")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "train-heads",
        "[MODEL] --data FILE -o FOLDER",
        "Train small networks that guess what a model will say, from its last hidden states. The "
        "model stays as it is, and its answers too. Text that the model itself wrote teaches them "
        "most. Ctrl-C ends the training early and keeps what was learned; the same command goes on "
        "from there, as it does when it was cut short.",
    )
    add_model(parser)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help='plain text, or .jsonl with a field "text" in each line; of each sixteen windows of '
        "it one is kept out, to measure with",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="where to save them"
    )
    add_option_flags(parser, "the heads and their training", HeadsOptions, defaults=True)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    add_engine_flags(parser, READING)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from kvik.evaluate.windows import longest_window, read_texts
    from kvik.launch import load_tokenizer, resolve_config
    from kvik.training.heads import check_place, train_heads, windows_of

    config = EngineConfig(**engine_options(arguments, arguments.model))
    asked = _asked(arguments)
    check_place(arguments.output)
    texts = read_texts(arguments.data)
    resolved = resolve_config(config)
    if resolved.model.fallback is not None:
        raise ConfigError("fallback", "must be none: heads read what kvik alone computes")
    tokenizer = load_tokenizer(resolved)
    if tokenizer is None:
        raise ConfigError("model", "has no tokenizer, and the data is text")
    window = min(asked.window, longest_window(config))
    windows = windows_of(texts, tokenizer, window)
    recipe = _recipe(asked, resolved.model.hidden_size)
    with share_bar() as progress:
        trained = train_heads(config, windows, recipe, arguments.output, progress)
    if not trained.finished:
        again = "the same command goes on"
        say(f"interrupted: the heads are as far as they came; {again}", error=True)
    report = _report(trained)
    if arguments.json:
        say(json.dumps(report))
    else:
        say_report(_as_text(report))
    say(f"\nsaved in {arguments.output}", error=True)
    return 0


def _asked(arguments: argparse.Namespace) -> HeadsOptions:
    """Return the options of the heads, checked."""
    asked = HeadsOptions(**given_options(HeadsOptions, arguments))
    normalised(asked, ConfigError)
    for one in options_of(HeadsOptions):
        kind = one.facts.get("kind", asked.kind)
        if getattr(asked, one.name) is not None and asked.kind != kind:
            raise ConfigError(one.name, f"must be left out: it is for {kind} heads alone")
    return asked


def _recipe(asked: HeadsOptions, hidden: int) -> HeadsRecipe:
    from kvik.training.heads import HeadsRecipe
    from kvik.training.train import Schedule

    return HeadsRecipe(
        kind=asked.kind,
        depth=asked.depth,
        layers=asked.layers or 1,
        inner=asked.inner or 2 * hidden,
        schedule=Schedule(asked.tokens, asked.rows, asked.learning_rate, asked.seed),
    )


def _report(trained: TrainedHeads) -> dict[str, Any]:
    from kvik.worker.draft_tree import DraftTree

    shares = trained.spec.accuracies
    return {
        "kind": trained.spec.kind,
        "finished": trained.finished,
        "tokens": trained.tokens,
        "bytes": trained.num_bytes,
        "accuracies": [list(ranks) for ranks in shares],
        "tokens_per_step": {
            str(drafts): round(1 + DraftTree.best(shares, drafts).worth(shares), 2)
            for drafts in DRAFTS
        },
    }


def _as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['kind']} heads, {report['bytes'] / 1e6:.1f} MB, from {report['tokens']:,} tokens",
        "",
        "tokens ahead   right   among 3   among 10   (of text that was kept out)",
    ]
    for depth, ranks in enumerate(report["accuracies"], 2):
        lines.append(
            f"{depth:12}   {ranks[0]:5.1%}   {sum(ranks[:3]):7.1%}   {sum(ranks[:10]):8.1%}"
        )
    lines += ["", "drafts in the tree   tokens of a step that they promise"]
    for drafts, tokens in report["tokens_per_step"].items():
        lines.append(f"{drafts:>18}   {tokens:.2f}")
    return "\n".join(lines)
