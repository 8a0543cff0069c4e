"""Reads the facts of any model, through transformers if kvik does not know the model.

transformers needs torch, so a separate process inspects the model, without its weights, and reports
the facts. Neither process runs code from the model's folder.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvik.child_process import python_command
from kvik.config.model_source import CONFIG
from kvik.errors import ConfigError, ModelError
from kvik.files import is_gguf
from kvik.model_files import model_files
from kvik.models.model_spec import ModelSpec, with_eos
from kvik.models.registry import ARCHITECTURES
from kvik.spec.fields import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, read_json
from kvik.spec.layers import LayerSpec
from kvik.spec.model import FallbackFacts
from kvik.spec.rope import MAX_POSITIONS

SECONDS = 300.0  # to import transformers and to make a model without memory, on a busy machine
MAX_BYTES = 1 << 62


def read_spec(path: Path, fallback: str) -> ModelSpec:
    """Return the facts of a model at a path that `find_model` returned.

    Args:
        fallback: see `EngineConfig`.

    Raises:
        ModelError: the files cannot be used, or neither kvik nor transformers knows the model.
        ConfigError: transformers is needed and not installed.
    """
    try:
        return model_files(path).spec()
    except ModelError:
        if fallback == "none" or is_gguf(path) or not (path / CONFIG).exists():
            raise
        names = Fields(read_json(path / CONFIG)).strings("architectures")
        is_native = not ARCHITECTURES.keys().isdisjoint(names)
        try:
            return fallback_spec(path, ask(path))
        except ModelError:
            if not is_native:
                raise
        raise  # kvik knows the model: its own error says what is missing


def ask(folder: Path) -> dict[str, Any]:
    """Return what transformers reports of a folder, see `transformers_model.model_facts`.

    Raises:
        ModelError: transformers cannot run the model.
        ConfigError: transformers is not installed.
    """
    command = python_command("kvik.worker.transformers_model", str(folder.absolute()))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError("model", f"transformers did not read it in {SECONDS:.0f} s") from None
    line = (done.stdout.splitlines() or [""])[-1]
    if done.returncode or not line:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ModelError("model", f"transformers cannot read it: {reason}")
    facts: dict[str, Any] = json.loads(line)
    if "field" in facts:
        kind = ConfigError if facts["field"] == "fallback" else ModelError
        raise kind(facts["field"], facts["message"])
    return facts


def fallback_spec(folder: Path, facts: Mapping[str, Any]) -> ModelSpec:
    """Return the facts of a model that runs through transformers.

    Args:
        facts: as `ask` returns them.

    Raises:
        ModelError: a fact is invalid.
    """
    config = read_json(folder / CONFIG)
    names = Fields(config).strings("architectures")
    fields = Fields(facts, "transformers")
    vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
    heads = fields.integer("num_heads", 1, MAX_HEADS)
    eos = fields.token_ids("eos_token_id", vocab)
    bos = fields.token_ids("bos_token_id", vocab)
    spec = ModelSpec(
        architecture=names[0] if names else str(config.get("model_type")),
        vocab_size=vocab,
        hidden_size=fields.integer("hidden_size", 1, MAX_WIDTH),
        embedding_size=fields.integer("hidden_size", 1, MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        layers=(LayerSpec(),) * fields.integer("num_layers", 1, MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=fields.integer("num_kv_heads", 1, MAX_HEADS),
        head_dim=fields.integer("head_dim", 1, MAX_WIDTH),
        max_position_embeddings=fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
        norm_eps=0.0,
        activation="",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        head_bias=False,
        qk_norm=False,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=str(facts["dtype"]),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        fallback=FallbackFacts(
            parameters=fields.integer("parameters", 1, MAX_BYTES),
            cache_numbers=fields.integer("cache_numbers", 0, MAX_BYTES),
            state_bytes=fields.integer("state_bytes", 0, MAX_BYTES),
            scores=fields.boolean("scores", True),
        ),
    )
    return with_eos(spec, folder)
