"""`kvik models`: list the supported models."""

from __future__ import annotations

import argparse
import json

from kvik.cli.flags import Parser
from kvik.cli.terminal import say
from kvik.config.units import columns
from kvik.models.registry import ARCHITECTURES, DECLARED, WITH_ENCODERS

INSIDE = "the text model, by the model_type in text_config"
HEADER = ("models", "architecture", "files")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "models", "", "List the supported models, by the architecture that config.json names."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    rows = [
        {
            "architecture": architecture.name,
            "model_type": architecture.model_type,
            "models": architecture.models,
            "files": ["safetensors", "gguf"] if architecture.gguf else ["safetensors"],
        }
        for architecture in ARCHITECTURES.values()
    ]
    for name, kind in WITH_ENCODERS.items():
        row = {"architecture": name, "model_type": kind, "models": INSIDE, "files": ["safetensors"]}
        rows.append(row)
    if arguments.json:
        say(json.dumps(rows, indent=2))
        return 0
    listed = [row for row in rows if row["architecture"] in DECLARED.keys() | WITH_ENCODERS.keys()]
    table = [(str(r["models"]), str(r["architecture"]), ", ".join(r["files"])) for r in listed]
    say("\n".join(columns([HEADER, *table], "<<<", indent=0)))
    say("\nEach causal model also runs as a classifier: ...ForSequenceClassification")
    say("Other causal models run through transformers, slowly: --fallback transformers")
    return 0
