"""`kvik train-heads [MODEL] --data FILE -o FOLDER`: draft heads for speculative decoding."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvik.cli.flags import (
    Parser,
    add_engine_flags,
    add_force_flag,
    add_model,
    add_option_flags,
    check_new,
    engine_options,
    given_options,
)
from kvik.cli.terminal import say, say_answer, share_bar
from kvik.config.config import EngineConfig
from kvik.config.draft_heads import EAGLE, KINDS, MAX_DEPTH, MAX_LAYERS, MEDUSA
from kvik.errors import ConfigError
from kvik.options import FORMERLY, Integer, Number, OneOf, normalised, option, options_of

if TYPE_CHECKING:
    from kvik.training.heads import HeadsRecipe, TrainedHeads

# Options that affect the hidden states that the heads learn from.
READING = (
    *("lora", "dtype", "quantization", "device", "kernels", "attention_backend", "threads"),
    *("kv_cache_dtype", "memory_utilization"),
)
DRAFTS = 4, 8, 16, 32  # sizes of trees in the report


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """Options of the heads and their training."""

    kind: str = option(
        MEDUSA,
        OneOf(KINDS),
        "medusa: heads that each predict a token further ahead; eagle: one layer that continues "
        "from its own drafts",
    )
    depth: int = option(4, Integer(1, MAX_DEPTH), "tokens drafted ahead")
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
        1_000_000, Integer(1, 1 << 40), "training tokens; a shorter text is read several times"
    )
    rows: int = option(512, Integer(1, 1 << 20), "tokens per step")
    learning_rate: float = option(
        1e-3, Number(0, 1, above=True), "learning rate of AdamW", {FORMERLY: "rate"}
    )
    window: int = option(
        512, Integer(2, 1 << 16), "tokens that the model reads at once, at most its context"
    )
    seed: int = option(0, Integer(0, 1 << 62), "random seed")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "train-heads",
        "[MODEL] --data FILE -o FOLDER",
        "Train small networks that predict a model's next tokens from its last hidden states. The "
        "model and its answers do not change. Heads learn most from text that the model itself "
        "generated. Ctrl-C ends the training early and saves the heads; the same command resumes "
        "the training.",
    )
    add_model(parser)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help='plain text, or .jsonl with a field "text" in each line; one of sixteen windows is '
        "held out, for measuring",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder to write"
    )
    add_force_flag(parser)
    add_option_flags(parser, "the heads and their training", HeadsOptions)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    add_engine_flags(parser, READING)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from kvik.evaluate.windows import longest_window, read_texts
    from kvik.launch import load_tokenizer, resolve_config
    from kvik.training.heads import check_place, holds_finished, train_heads, windows_of

    options = _heads_options(arguments)
    vars(arguments).pop("window", None)  # of the text, not the engine's option of that name
    config = EngineConfig(**engine_options(arguments, arguments.model))
    check_place(arguments.output)
    check_new(arguments, holds_finished(arguments.output))
    texts = read_texts(arguments.data)
    resolved = resolve_config(config)
    if resolved.model.fallback is not None:
        raise ConfigError(
            "fallback", "must be none: heads need hidden states that only kvik computes"
        )
    tokenizer = load_tokenizer(resolved)
    if tokenizer is None:
        raise ConfigError("model", "has no tokenizer, and the data is text")
    window = min(options.window, longest_window(config))
    windows = windows_of(texts, tokenizer, window)
    recipe = _recipe(options, resolved.model.hidden_size)
    with share_bar() as progress:
        trained = train_heads(config, windows, recipe, arguments.output, progress)
    if not trained.finished:
        hint = "the same command continues"
        say(f"interrupted: the heads are saved as they are; {hint}", error=True)
    report = _report(trained)
    say_answer(report, _as_text(report), as_json=arguments.json)
    say(f"\nsaved in {arguments.output}", error=True)
    return 0


def _heads_options(arguments: argparse.Namespace) -> HeadsOptions:
    """Return the options of the heads, checked."""
    options = HeadsOptions(**given_options(HeadsOptions, arguments))
    normalised(options, ConfigError)
    for field in options_of(HeadsOptions):
        kind = field.facts.get("kind", options.kind)
        if getattr(options, field.name) is not None and options.kind != kind:
            raise ConfigError(field.name, f"must be left out: it is for {kind} heads only")
    return options


def _recipe(options: HeadsOptions, hidden: int) -> HeadsRecipe:
    from kvik.training.heads import HeadsRecipe
    from kvik.training.train import Schedule

    return HeadsRecipe(
        kind=options.kind,
        depth=options.depth,
        layers=options.layers or 1,
        inner=options.inner or 2 * hidden,
        schedule=Schedule(options.tokens, options.rows, options.learning_rate, options.seed),
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
        "tokens ahead   right   among 3   among 10   (of held-out text)",
    ]
    for depth, ranks in enumerate(report["accuracies"], 2):
        lines.append(
            f"{depth:12}   {ranks[0]:5.1%}   {sum(ranks[:3]):7.1%}   {sum(ranks[:10]):8.1%}"
        )
    lines += ["", "drafts in the tree   tokens of a step that they promise"]
    for drafts, tokens in report["tokens_per_step"].items():
        lines.append(f"{drafts:>18}   {tokens:.2f}")
    return "\n".join(lines)
