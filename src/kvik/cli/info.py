"""`kvik info [MODEL]`: facts about a model, the decisions for it, and what fits. Loads nothing."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from kvik.cli.flags import Parser, add_engine_flags, add_model, engine_options
from kvik.cli.report import kv_format
from kvik.cli.terminal import say_answer
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import detect, find_gpus
from kvik.config.kv_budget import asked_budgets
from kvik.config.model_source import find_model
from kvik.config.resolve import resolve
from kvik.config.units import show_bytes
from kvik.errors import CapacityError
from kvik.fallback import read_spec
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import CompressedSpec, IndexSpec
from kvik.spec.layers import LayerSpec
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.pooling import PoolingSpec
from kvik.spec.rope import MAX_POSITIONS

KIND_COSTS = ("kv_bytes_per_token", "kv_bytes_per_request")  # of the layers of one kind


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "info", "[MODEL]", "Describe a model and what fits this machine, without loading it."
    )
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    add_engine_flags(parser, left_out=["chat_template"])
    return parser


def run(arguments: argparse.Namespace) -> int:
    config = EngineConfig(**engine_options(arguments, arguments.model))
    path = find_model(config.model, weights=False, revision=config.revision)
    spec = read_spec(path, config.fallback)
    gpus = () if config.device == "cpu" else find_gpus()
    budgets = asked_budgets(config.kv_budget, spec)
    resolved, refusal = None, ""
    try:
        resolved = resolve(config, spec, detect(gpus), str(path), budgets=budgets)
        spec = replace(spec, layers=resolved.model.layers)  # with the window that was asked for
    except CapacityError as error:
        refusal = str(error)
    say_answer(
        _as_json(str(path), spec, resolved, refusal),
        _as_text(str(path), spec, resolved, refusal),
        as_json=arguments.json,
    )
    return 0


def _as_text(folder: str, spec: ModelSpec, resolved: ResolvedConfig | None, refusal: str) -> str:
    dtype = resolved.runner.dtype if resolved else spec.dtype
    kv_dtype = kv_format(resolved) if resolved else dtype
    weights = show_bytes(_weights(spec, dtype, resolved))
    if spec.built is None:
        weights += (
            f" in {dtype}" if spec.quantization is None else f" in {dtype} where not quantised"
        )
    rows = [
        ("model", folder),
        ("architecture", spec.architecture),
        (
            "layers",
            f"{spec.num_layers} of width {spec.hidden_size}"
            + (f", inner {spec.intermediate_size}" if spec.intermediate_size else "")
            + (f", {spec.streams.count} residual streams" if spec.streams else ""),
        ),
        *(
            ("", f"{count} {_kind(spec, layer)}")
            for layer, count in _kinds(spec)
            if spec.fallback is None
        ),
        ("heads", _heads(spec)),
        ("vocabulary", f"{spec.vocab_size:,} tokens"),
        ("context", f"{spec.max_context:,} tokens"),
        ("parameters", f"{spec.num_parameters:,}"),
        ("checkpoint", _stored_as(spec)),
        ("weights", weights),
        *_kv_lines(spec, resolved, kv_dtype),
    ]
    if spec.with_encoders:
        rows.insert(
            2, ("reads", "text alone: its parts for images are left out, and images refused")
        )
    if spec.pooling is not None:
        rows.insert(2, ("gives", _gives(spec, spec.pooling)))
    if spec.fallback is not None:
        rows.insert(2, ("runs", "through transformers, in caches of its own"))
    if spec.state_bytes:
        kind = " in float32" if spec.states else ""
        rows.append(("states", f"{spec.state_bytes:,} bytes per request{kind}"))
    lines = [f"{name:14}{value}" for name, value in rows]
    if resolved is None:
        return "\n".join([*lines, "", f"does not fit: {refusal}"])
    lines += ["", "decided"]
    lines += [f"  {d.name:24}{d.value:11} {d.reason}" for d in resolved.decisions]
    memory = resolved.memory
    lines += ["", f"memory, of {show_bytes(memory.limit)} allowed"]
    parts = ["weights", "activations", "kv_cache", "overhead", "total"]
    if memory.kv_tiers:
        parts.insert(3, "kv_tiers")
    for part in parts:
        lines.append(f"  {part:24}{show_bytes(getattr(memory, part))}")
    return "\n".join(lines)


def _as_json(
    folder: str, spec: ModelSpec, resolved: ResolvedConfig | None, refusal: str
) -> dict[str, object]:
    dtype = resolved.runner.dtype if resolved else spec.dtype
    facts: dict[str, object] = {
        "model": folder,
        "architecture": spec.architecture,
        "num_layers": spec.num_layers,
        "layers": [
            {
                "count": count,
                **asdict(layer),
                "window": layer.window.keys if layer.window else None,
                "sinks": layer.window.sinks if layer.window else 0,
                "chunked": layer.window is not None and layer.window.chunked,
                **dict(zip(KIND_COSTS, _kind_cost(spec, layer, resolved), strict=True)),
            }
            for layer, count in _kinds(spec)
        ],
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "context": spec.max_context,
        "parameters": spec.num_parameters,
        "dtype": dtype,
        "stored_as": _stored_as(spec),
        "weight_bytes": _weights(spec, dtype, resolved),
        "kv_bytes_per_token": _kv_bytes(spec, resolved),
        "state_bytes_per_request": spec.state_bytes,
        "encoder": spec.encoder,
        "fallback": None if spec.fallback is None else asdict(spec.fallback),
        "pooling": None if spec.pooling is None else asdict(spec.pooling),
        "fits": resolved is not None,
    }
    if resolved is None:
        return {**facts, "refusal": refusal}
    memory = asdict(resolved.memory)
    return {
        **facts,
        "decisions": [asdict(decision) for decision in resolved.decisions],
        "memory": {**memory, "total": resolved.memory.total},
    }


def _heads(spec: ModelSpec) -> str:
    latent = spec.latent
    if not any(layer.attends for layer in spec.layers):
        return "none with attention"
    if latent is None:
        return f"{spec.num_heads} query, {spec.num_kv_heads} key/value, of {spec.head_dim}"
    kind = "with" if spec.ropes else "without"
    vectors = f"latent vectors of {latent.rank} and {latent.rope} {kind} positions"
    return f"{spec.num_heads} query, of {latent.query}, over {vectors}"


def _kinds(spec: ModelSpec) -> Sequence[tuple[LayerSpec, int]]:
    """Return the kinds of layers in order of first occurrence, with their numbers. Layers that
    differ only in constant decays are of one kind."""
    alike = (
        replace(layer, state=replace(layer.state, rates=())) if layer.state else layer
        for layer in spec.layers
    )
    return list(Counter(alike).items())


def _chosen(index: IndexSpec | None) -> str:
    """Return which of the keys that it sees a query reads; "": all."""
    if index is None:
        return ""
    if index.span:
        blocks = f"{index.top // index.span} blocks of {index.span}"
        return f", of which each key/value head chooses {blocks}"
    by = "an earlier layer" if index.shared else "an indexer"
    return f", of which {by} chooses {index.top:,}"


def _entries(of: CompressedSpec) -> str:
    """Return which entries a query reads, and that keys are values."""
    if not of.every:
        return " by one vector each"
    sums = f" by one vector each, and entries of {of.every} earlier ones"
    return f"{sums}{_chosen(of.index)}"


def _kind(spec: ModelSpec, layer: LayerSpec) -> str:
    """Describe a kind of layer: the tokens it sees and its positions, or its state; and experts, or
    that it has only an MLP."""
    experts = layer.experts
    if experts is not None:
        router = experts.router
        chosen = f"{router.active} of {router.experts} experts of width {experts.inner:,}"
        always = f", and one of {experts.shared:,} for all tokens" if experts.shared else ""
        mixer = "have only " if layer.feeds else f"{_kind(spec, replace(layer, experts=None))}; "
        return f"{mixer}{chosen}{always}"
    if layer.sparsity:
        return f"{_kind(spec, replace(layer, sparsity=0.0))}; use {1 - layer.sparsity:.0%} of gates"
    if layer.feeds:
        return "have only an MLP"
    state = layer.state
    if state is not None:
        parts = [f"the last {state.width - 1} inputs"] if state.channels else []
        if state.by_channel:
            parts.append(f"{state.key_dim} numbers for each of {state.values:,} channels")
        elif state.value_heads:
            parts.append(f"matrices of {state.value_heads} heads")
        text = f"keep a state of {state.size:,} numbers: {', and '.join(parts)}"
        alone = replace(layer, state=None, beside=False)
        return f"{text}; {_kind(spec, alone)}" if layer.beside else text
    seen = f"see {_seen(layer)}"
    if layer.latent is not None:
        seen += f" by latent vectors of {layer.latent.width}"
    elif layer.compressed is not None:
        seen += _entries(layer.compressed)
    elif layer.kv_heads or layer.head_dim:
        seen += " by {} key/value heads of {}".format(*spec.heads(layer))
    seen += _chosen(layer.index)
    if layer.value_is_key:
        seen += ", values made of keys"
    if layer.kv_from is not None:
        seen += f", the keys and values of layer {layer.kv_from}"
    rope = layer.rope
    if layer.slopes:
        return f"{seen}, positions by ALiBi"
    if rope is None:
        kind = "without" if spec.family.rotary else "with learned"
        return f"{seen}, {kind} positions{' and distances' if layer.distances else ''}"
    text = f"{seen}, rotary positions of base {rope.theta:,.0f}"
    if rope.fraction != 1.0:
        text += f" in {rope.fraction:.0%} of each head"
    if rope.kind == "default":
        return text
    stretched = f"stretched {rope.factor:g} times ({rope.kind})"
    return f"{text}, {rope.kind if rope.factor == 1.0 else stretched}"


def _seen(layer: LayerSpec) -> str:
    if layer.bidirectional is not None:
        local = layer.bidirectional < MAX_POSITIONS
        return f"tokens up to {layer.bidirectional:,} away" if local else "all tokens on both sides"
    if layer.budget is not None:
        return f"all tokens of a prompt, and then keep {layer.budget.tokens:,}"
    if layer.window is None:
        return "all tokens"
    sinks = f"the first {layer.window.sinks:,} and the last " if layer.window.sinks else ""
    return f"{sinks}{'chunks of ' if layer.window.chunked else ''}{layer.window.keys:,} tokens"


def _kind_cost(
    spec: ModelSpec, kind: LayerSpec, resolved: ResolvedConfig | None
) -> tuple[int, int]:
    """Return the KV bytes of the layers of one kind: of one token, and of a request of maximum
    length, which a window limits."""
    if resolved is None:
        specs = enumerate(spec.kv_specs(_stored_bytes(spec)))
        sizes = {i: kv.bytes_per_token for i, kv in specs if kv is not None}
    else:
        groups = resolved.cache.groups
        sizes = {
            i: kv.bytes_per_token for g in groups for i, kv in zip(g.layers, g.specs, strict=True)
        }
    layers = [i for i, layer in enumerate(spec.layers) if layer == kind]
    entries = sum(sizes[number] for i in layers for number in spec.entries_of(i))
    token = sum(sizes.get(i, 0) for i in layers)
    longest = spec.max_context if resolved is None else resolved.scheduler.max_model_len
    seen = longest if kind.window is None else min(longest, kind.window.max_keys)
    return token + entries, token * seen + entries * longest


def _kv_lines(
    spec: ModelSpec, resolved: ResolvedConfig | None, dtype: str
) -> list[tuple[str, str]]:
    size = f"{_kv_bytes(spec, resolved):,} bytes per token"
    if spec.fallback is not None:
        return [("KV cache", f"{size} in {dtype}, as measured without weights")]
    if spec.encoder:
        return [("KV cache", f"{size} of a step in {dtype}, which all layers use in turn")]
    return [("KV cache", f"{size} in {dtype}"), *(("", text) for text in _kv_rows(spec, resolved))]


def _gives(spec: ModelSpec, pooling: PoolingSpec) -> str:
    """Describe the result of pooling."""
    suffix = "" if spec.encoder else ", and text"
    if pooling.scores:
        return f"scores of pairs of texts{suffix}"
    text = f"vectors of {pooling.width(spec.hidden_size):,}, by pooling {pooling.kind!r}{suffix}"
    if pooling.any_dimension or pooling.dimensions:
        text += f"; dimensions {pooling.allowed(spec.hidden_size)}"
    return text


def _kv_rows(spec: ModelSpec, resolved: ResolvedConfig | None) -> list[str]:
    """Return a row per kind of layer: its KV bytes per token and per request."""
    rows = []
    for kind, count in _kinds(spec):
        if not kind.attends or kind.kv_from is not None:
            continue
        token, request = _kind_cost(spec, kind, resolved)
        per_token = f"{token:,} in {count} that see {_seen(kind)}"
        rows.append(f"{per_token}, at most {show_bytes(request)} per request")
    return rows


def _stored_as(spec: ModelSpec) -> str:
    return str(spec.built or spec.quantization or spec.dtype)


def _weights(spec: ModelSpec, dtype: str, resolved: ResolvedConfig | None) -> int:
    """Return the bytes of the weights as stored, with those that must be `dtype` in it."""
    if spec.built is not None:
        return spec.built.weight_bytes
    kernels = "torch" if resolved is None else resolved.runner.kernels
    return spec.weight_bytes(dtype, "none", kernels)


def _kv_bytes(spec: ModelSpec, resolved: ResolvedConfig | None) -> int:
    """Return the KV bytes of a token in all layers, as decided or in the checkpoint's dtype."""
    if resolved is None:
        return spec.kv_bytes_per_token(_stored_bytes(spec))
    return sum(group.bytes_per_token for group in resolved.cache.groups)


def _stored_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a number in the dtype of the checkpoint."""
    return DTYPE_BYTES[spec.dtype]
