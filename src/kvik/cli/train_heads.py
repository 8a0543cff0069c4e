"""`kvik train-heads [MODEL] --data FILE -o FOLDER`: draft heads for speculative decoding."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvik.cli.flags import Parser, add_engine_flags, engine_options, integer, number
from kvik.cli.terminal import say, say_report, share_bar
from kvik.config.config import EngineConfig
from kvik.config.draft_heads import EAGLE, KINDS, MAX_DEPTH, MAX_LAYERS, MEDUSA
from kvik.errors import ConfigError

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
DEFAULT_DEPTH, DEFAULT_WINDOW, DEFAULT_TOKENS, DEFAULT_ROWS = 4, 512, 1_000_000, 512
DEFAULT_RATE = 1e-3
MAX_WINDOW = 1 << 16
DRAFTS = 4, 8, 16, 32  # trees that the report tells of


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "train-heads",
        "[MODEL] --data FILE -o FOLDER",
        "Train small networks that guess what a model will say, from its last hidden states. The "
        "model stays as it is, and its answers too. Text that the model itself wrote teaches them "
        "most. Ctrl-C ends the training early and keeps what was learned; the same command goes on "
        "from there, as it does when it was cut short.",
    )
    parser.add_argument(
        "model", nargs="?", default="", help="a folder or hub id (default: bundled)"
    )
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
    group = parser.add_argument_group("the heads")
    group.add_argument(
        "--kind",
        default=MEDUSA,
        metavar="NAME",
        help="medusa (heads that each guess a token further ahead) or eagle (one layer that goes "
        f"on from its own guesses) ({MEDUSA})",
    )
    group.add_argument(
        "--depth",
        type=integer,
        default=DEFAULT_DEPTH,
        metavar="N",
        help=f"tokens guessed ahead ({DEFAULT_DEPTH})",
    )
    group.add_argument("--layers", type=integer, metavar="N", help="medusa: blocks of a head (1)")
    group.add_argument(
        "--inner",
        type=integer,
        metavar="N",
        help="eagle: width of its feed-forward (twice the hidden size)",
    )
    group = parser.add_argument_group("training")
    group.add_argument(
        "--tokens",
        type=integer,
        default=DEFAULT_TOKENS,
        metavar="N",
        help=f"learned from, in a text of fewer several times ({DEFAULT_TOKENS:,})",
    )
    group.add_argument(
        "--rows",
        type=integer,
        default=DEFAULT_ROWS,
        metavar="N",
        help=f"tokens of a step ({DEFAULT_ROWS})",
    )
    group.add_argument(
        "--rate", type=number, default=DEFAULT_RATE, metavar="X", help=f"of AdamW ({DEFAULT_RATE})"
    )
    group.add_argument(
        "--window",
        type=integer,
        default=DEFAULT_WINDOW,
        metavar="N",
        help=f"tokens that the model reads at once ({DEFAULT_WINDOW}, or its context)",
    )
    group.add_argument("--seed", type=integer, default=0, metavar="N", help="of everything (0)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    add_engine_flags(parser, READING)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from kvik.evaluate.reader import longest_window
    from kvik.evaluate.windows import read_texts
    from kvik.launch import load_tokenizer, resolve_config
    from kvik.training.heads import check_place, train_heads, windows_of

    config = EngineConfig(**engine_options(arguments, arguments.model))
    _check(arguments)
    check_place(arguments.output)
    texts = read_texts(arguments.data)
    resolved = resolve_config(config)
    tokenizer = load_tokenizer(resolved)
    if tokenizer is None:
        raise ConfigError("model", "has no tokenizer, and the data is text")
    window = min(arguments.window, longest_window(config))
    windows = windows_of(texts, tokenizer, window)
    recipe = _recipe(arguments, resolved.model.hidden_size)
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


def _check(arguments: argparse.Namespace) -> None:
    if arguments.kind not in KINDS:
        raise ConfigError("kind", f"must be one of {', '.join(KINDS)}, not {arguments.kind!r}")
    for name, most in (
        ("depth", MAX_DEPTH),
        ("layers", MAX_LAYERS),
        ("inner", 1 << 20),
        ("tokens", 1 << 40),
        ("rows", 1 << 20),
        ("seed", 1 << 62),
        ("window", MAX_WINDOW),
    ):
        value, least = getattr(arguments, name), {"seed": 0, "window": 2}.get(name, 1)
        if value is not None and not least <= value <= most:
            raise ConfigError(name, f"must be in [{least}, {most}], not {value}")
    for name, kind in (("layers", MEDUSA), ("inner", EAGLE)):
        if getattr(arguments, name) is not None and arguments.kind != kind:
            raise ConfigError(name, f"must be left out: it is for {kind} heads alone")
    if not 0 < arguments.rate < 1:
        raise ConfigError("rate", f"must be between 0 and 1, not {arguments.rate}")


def _recipe(arguments: argparse.Namespace, hidden: int) -> HeadsRecipe:
    from kvik.training.heads import HeadsRecipe
    from kvik.training.train import Schedule

    return HeadsRecipe(
        kind=arguments.kind,
        depth=arguments.depth,
        layers=arguments.layers or 1,
        inner=arguments.inner or 2 * hidden,
        schedule=Schedule(arguments.tokens, arguments.rows, arguments.rate, arguments.seed),
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
