"""`kvik eval [MODEL]`: perplexity on a text, and the divergence from a reference model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvik.cli.flags import Parser, add_engine_flags, add_model, engine_options
from kvik.cli.terminal import say_answer
from kvik.config.config import EngineConfig

if TYPE_CHECKING:
    from kvik.evaluate.quality import Quality

# Options that affect what a model computes; the others are for serving.
READING = (
    *("lora", "dtype", "quantization", "device", "max_model_len", "max_num_batched_tokens"),
    *("block_size", "memory_utilization", "kv_cache_dtype", "kv_cache_dtype_skip_layers"),
    *("kernels", "attention_backend", "threads"),
)
# Options that the reference does not share: it is read as stored.
ROUNDING = ("quantization", "kv_cache_dtype", "kv_cache_dtype_skip_layers")
SAME = "same"  # the reference is the model itself


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "eval",
        "[MODEL]",
        "Measure how well a model predicts a text, with the kernels, weight and KV formats of "
        "serving. Every token is scored at most once, with its window as context.",
    )
    add_model(parser)
    parser.add_argument(
        "--reference",
        metavar="MODEL",
        help="also measure the divergence from this model, as stored: KL divergence and how often "
        f"both predict the same token; {SAME}: MODEL itself, without the rounding options",
    )
    add_text_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    add_engine_flags(parser, READING)
    return parser


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the text")
    add_data_flag(group)
    group.add_argument(
        "--window",
        dest="reading_window",  # distinct from the engine's option
        type=int,
        metavar="N",
        help="tokens of a window (default: the context, at most 2048)",
    )
    group.add_argument(
        "--stride", type=int, metavar="N", help="tokens between window starts (default: the window)"
    )


def add_data_flag(add: argparse._ActionsContainer) -> None:
    """Add the flag that `texts_of` reads."""
    add.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='plain text, or .jsonl with a field "text" in each line, each read separately '
        "(default: a story of about 1500 tokens that ships with kvik)",
    )


def texts_of(arguments: argparse.Namespace) -> Sequence[str]:
    from kvik.evaluate.windows import held_out_texts, read_texts

    return held_out_texts() if arguments.data is None else read_texts(arguments.data)


def text_name(arguments: argparse.Namespace) -> str:
    return "the story that ships with kvik" if arguments.data is None else str(arguments.data)


def reference_of(arguments: argparse.Namespace, options: dict[str, Any]) -> EngineConfig | None:
    if arguments.reference is None:
        return None
    shared = {name: value for name, value in options.items() if name not in ROUNDING}
    named = {} if arguments.reference == SAME else {"model": arguments.reference, "lora": None}
    return EngineConfig(**{**shared, **named})


def run(arguments: argparse.Namespace) -> int:
    from kvik.evaluate.quality import measure_quality, reading_bar

    options = engine_options(arguments, arguments.model)
    texts = texts_of(arguments)
    with reading_bar("reading") as progress:
        quality = measure_quality(
            EngineConfig(**options),
            texts,
            window=arguments.reading_window,
            stride=arguments.stride,
            reference=reference_of(arguments, options),
            progress=progress,
        )
    say_answer(_as_json(quality, arguments), _as_text(quality, arguments), as_json=arguments.json)
    return 0


def _as_text(quality: Quality, arguments: argparse.Namespace) -> str:
    rows = [
        ("text", text_name(arguments)),
        ("window", f"{quality.window} tokens, every {quality.stride}"),
        ("scored", f"{quality.num_scored:,} tokens"),
        ("perplexity", f"{quality.perplexity:.4f}"),
    ]
    if quality.divergence is not None and quality.agreement is not None:
        rows += [
            ("KL divergence", f"{quality.divergence:.6f} nats a token, from the reference"),
            ("top-1", f"{quality.agreement:.2%} of tokens expected as by the reference"),
        ]
    return "\n".join(f"{name:16}{value}" for name, value in rows)


def _as_json(quality: Quality, arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "text": text_name(arguments),
        "window": quality.window,
        "stride": quality.stride,
        "scored_tokens": quality.num_scored,
        "perplexity": quality.perplexity,
        "loss": quality.loss,
        "kl_divergence": quality.divergence,
        "top1_agreement": quality.agreement,
    }
