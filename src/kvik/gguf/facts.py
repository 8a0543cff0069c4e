"""Translates the metadata of a GGUF file to the keys of a Hugging Face config.json."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from kvik.core.sampling_params import PARAMETERS
from kvik.errors import ModelError, shown
from kvik.gguf.names import (
    EMBEDDING,
    HEAD,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    block_of,
    hf_name,
)
from kvik.gguf.reader import GgufFile, GgufTensor, Scalar
from kvik.gguf.rope import llama3_scaling, proportional_rope, rope_scaling
from kvik.gguf.types import Array, Metadata, ValueKind, shortest
from kvik.models.model_spec import ModelSpec
from kvik.models.registry import ARCHITECTURES
from kvik.spec.architecture import MAX_BIAS, SEPARATE, Architecture
from kvik.spec.declare import GATE_UP
from kvik.spec.experts import EXPERT_KEYS, MAX_EXPERTS, STEP_KEYS, SWITCH, ExpertsSpec, Router
from kvik.spec.fields import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields
from kvik.spec.kv import MAX_TAPS, StateSpec
from kvik.spec.layers import BLOCK_KINDS, CONV, EXPERTS, FULL, LINEAR, MLP, SLIDING
from kvik.spec.model import ModelScales
from kvik.spec.pooling import MAX_LABELS, PooledLayer, PoolingSpec, classifier
from kvik.spec.rope import MAX_POSITIONS
from kvik.spec.stored_weights import StoredQuantization, StoredRule, StoredScheme

# Storage schemes of GGUF's matrices, in the terms of other quantised checkpoints.

METHOD = "gguf"
MAX_DIVISORS_BYTES = 1 << 16
WEIGHT = ".weight"

# By type of block: bits of a code, weights that share a scale, and the meaning of code 0.
SCHEMES: Mapping[str, StoredScheme] = {
    scheme.layout: scheme
    for scheme in (
        StoredScheme("Q8_0", 8, 32),
        StoredScheme("Q4_0", 4, 32),
        StoredScheme("Q4_1", 4, 32, symmetric=False, minima=True),
        StoredScheme("Q5_0", 5, 32),
        StoredScheme("Q5_1", 5, 32, symmetric=False, minima=True),
        StoredScheme("Q2_K", 2, 16, symmetric=False, minima=True),
        StoredScheme("Q3_K", 3, 16),
        StoredScheme("Q4_K", 4, 32, symmetric=False, minima=True),
        StoredScheme("Q5_K", 5, 32, symmetric=False, minima=True),
        StoredScheme("Q6_K", 6, 16),
        StoredScheme("IQ4_NL", 4, 32),
        StoredScheme("IQ4_XS", 4, 32),
        StoredScheme("MXFP4", 4, 32),
    )
}


def stored_quantization(file: GgufFile) -> StoredQuantization | None:
    """Return the quantisation by the types of the tensors; None: all are floats."""
    named: dict[str, set[str]] = {}
    for name, tensor in named_tensors(file):
        if name != tensor.name and tensor.type.name in SCHEMES:
            named.setdefault(tensor.type.name, set()).add(name.removesuffix(WEIGHT))
    if not named:
        return None
    rules = tuple(StoredRule(SCHEMES[type], frozenset(layers)) for type, layers in named.items())
    return StoredQuantization(METHOD, rules, embeddings=True)


def usual_bits(file: GgufFile) -> int | None:
    """Return the bits of a code in the type of most weights of matrices; None: floats."""
    weights = Counter[str]()
    for tensor in file.tensors:
        if len(tensor.shape) > 1:
            weights[tensor.type.name] += prod(tensor.shape)
    scheme = SCHEMES.get(max(weights, key=weights.__getitem__, default=""))
    return scheme.bits if scheme else None


# Sampling parameters of a model's authors: `general.sampling` of a GGUF file to and from the keys
# of generation_config.json.

AT = "general.sampling"
# Key of generation_config.json -> key of a GGUF file.
KEYS: Mapping[str, str] = {
    one.facts["stored"]: f"{AT}.{one.facts['gguf']}"
    for one in PARAMETERS.values()
    if one.facts["gguf"]
}
LAST_N = f"{AT}.penalty_last_n"  # number of last tokens that the penalty counts
ALL = -1


def sampling_config(metadata: Metadata) -> dict[str, object]:
    """Return the parameters of a file, not yet checked."""
    return {stored: metadata.raw(key) for stored, key in KEYS.items() if key in metadata}


def sampling_metadata(config: Mapping[str, float | int]) -> dict[str, Scalar]:
    """Return the metadata of a generation_config.json; unknown keys are left out."""
    metadata: dict[str, Scalar] = {
        KEYS[stored]: value for stored, value in config.items() if stored in KEYS
    }
    return metadata | ({LAST_N: ALL} if KEYS["repetition_penalty"] in metadata else {})


def named_tensors(file: GgufFile) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the tensors by their names in checkpoints, with a separate tensor for each expert.

    A tensor without a name in checkpoints keeps its own. Multi-token-prediction layers after the
    last one are left out.

    Raises:
        ModelError: a tensor's number of experts or heads differs from the metadata.
    """
    names, metadata = family_of(file.metadata).gguf_names, file.metadata
    more = metadata.integer(f"{architecture(file)}.nextn_predict_layers", 0, MAX_LAYERS, 0)
    first = _layers(metadata) if more else 0
    experts = _expert_count(metadata)
    for tensor in file.tensors:
        block = block_of(tensor.name)
        if block is not None and first <= block < first + more:
            continue
        name = hf_name(tensor.name, names)
        if name is None or "{}" not in name:
            yield name or tensor.name, tensor
            continue
        count, *shape = tensor.shape
        num_parts, unit = experts, "experts"
        if (norm := re.search("attn_([qk])_norm", tensor.name)) is not None:
            key = "head_count" if norm[1] == "q" else "head_count_kv"
            at = f"{architecture(file)}.attention.{key}"
            num_parts, unit = metadata.integer(at, 1, MAX_HEADS), "heads"
        if count != num_parts or not shape:
            reason = f"must have a part for each of {num_parts} {unit}, not {list(tensor.shape)}"
            raise ModelError(file.path.name, f"tensor {shown(tensor.name)} {reason}")
        size = tensor.size // count
        for i in range(count):
            start = tensor.start + i * size
            part = replace(tensor, shape=tuple(shape), start=start, size=size)
            yield from _gate_and_up(name.format(i), part)


def _gate_and_up(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a matrix of an expert; gate and up separately, if it holds both."""
    if not name.endswith(f".gate_up_proj{WEIGHT}"):
        yield name, tensor
        return
    rows, *rest = tensor.shape
    if rows % 2:
        reason = f"must have an even number of rows, for gate and up, not {rows}"
        raise ModelError(shown(tensor.name), reason)
    size = tensor.size // 2
    for i, part in enumerate(GATE_UP):
        start = tensor.start + i * size
        half = replace(tensor, shape=(rows // 2, *rest), start=start, size=size)
        yield name.replace("gate_up_proj", part), half


# `general.architecture` of models that read images -> that of their text model, which such files
# hold: the encoder has a file of its own.
TEXT_MODELS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
# `general.architecture` -> architectures of config.json. Mistral is "llama" in GGUF.
GGUF_FAMILIES: Mapping[str, tuple[Architecture, ...]] = {
    name: tuple(row for row in ARCHITECTURES.values() if text in (row.gguf, row.gguf_experts))
    for name, text in (
        *((name, name) for row in ARCHITECTURES.values() for name in (row.gguf, row.gguf_experts)),
        *TEXT_MODELS.items(),
    )
    if name
}
RANK = 4  # `pooling_type` of rerankers and classifiers
POOLINGS = {1: "mean", 2: "cls", 3: "last"}  # `pooling_type` of models that were trained to embed
# Tokens that end an answer: the end of the text, of a turn and of a message.
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# The same, by their spelling: most files name only the end of the text, and llama.cpp finds the
# others so too. The first two end an answer in Harmony, in which MESSAGE_END does not.
MESSAGE_END = "<|end|>"
ENDS = (
    *("<|return|>", "<|call|>", MESSAGE_END, "<|eot_id|>", "<|eom_id|>", "<|im_end|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "[EOT]", "[e~["),
)


MODEL_NAME = "general.name"
NAME = "general.architecture"


def architecture(file: GgufFile) -> str:
    """Return `general.architecture`.

    Raises:
        ModelError: the architecture is not supported.
    """
    name = file.metadata.string(NAME)
    if name not in GGUF_FAMILIES:
        names = ", ".join(GGUF_FAMILIES)
        raise file.metadata.error(NAME, f"must be one of {names}, not {name!r}")
    return name


def family_of(metadata: Metadata) -> Architecture:
    """Return the architecture of a file's model, by its name in GGUF, the presence of experts, and
    `gguf_marker` among architectures of one name.

    Raises:
        ModelError: the model has experts and its family has none, or vice versa.
    """
    name, count = metadata.string(NAME), _expert_count(metadata)
    rows = [
        row
        for row in GGUF_FAMILIES[name]
        if row.optional_experts or (row.experts is not None) == (count > 0)
    ]
    if not rows:
        allowed = "0: the family has no experts" if count else "at least 1"
        raise metadata.error(f"{name}.expert_count", f"must be {allowed}")
    for row in rows:
        if row.gguf_marker:
            key, minimum, flag = row.gguf_marker
            marked = bool(flag) and metadata.boolean(f"{name}.{flag}", False)
            value = minimum if marked else 0
            if metadata.integer(f"{name}.{key}", 0, MAX_POSITIONS, value) >= minimum:
                return row
    return next((row for row in rows if not row.gguf_marker), rows[0])


def _expert_count(metadata: Metadata) -> int:
    name = metadata.string(NAME)
    return metadata.integer(f"{name}.expert_count", 0, MAX_EXPERTS, 0)


def _layers(metadata: Metadata) -> int:
    """Return the number of layers, without multi-token-prediction layers."""
    name = metadata.string(NAME)
    blocks = metadata.integer(f"{name}.block_count", 1, MAX_LAYERS)
    return blocks - metadata.integer(f"{name}.nextn_predict_layers", 0, blocks - 1, 0)


def gguf_model_spec(file: GgufFile) -> ModelSpec:
    """Return the spec of the model in a file.

    Raises:
        ModelError: an unknown architecture, or a value out of range.
    """
    spec = ModelSpec.from_config(model_config(file))
    return replace(spec, quantization=stored_quantization(file), pooling=_pooling(file, spec))


def _pooling(file: GgufFile, spec: ModelSpec) -> PoolingSpec | None:
    """Return how the model in a file makes vectors or scores; None: the file does not say."""
    key, metadata = f"{architecture(file)}.pooling_type", file.metadata
    number = metadata.integer(key, 0, 1 << 16, 0)
    if number in POOLINGS:
        return PoolingSpec(POOLINGS[number])
    if not spec.encoder or not number:
        return spec.pooling
    output = file.tensor("cls.output.weight")
    if number != RANK or output is None or len(output.shape) != 2:
        reason = f"must be {', '.join(map(str, POOLINGS))}, or {RANK} with a matrix cls.output"
        raise metadata.error(key, f"{reason}, not {number}")
    hidden, count = spec.hidden_size, output.shape[0]
    dense = PooledLayer("classifier.dense", hidden, hidden, function="tanh")
    last = PooledLayer("classifier.out_proj", hidden, count)
    layers = (dense, last) if file.tensor("cls.weight") is not None else (last,)
    key = f"{architecture(file)}.classifier.output_labels"
    labels = metadata.string_array(key, MAX_LABELS)
    if labels and len(labels) != count:
        raise metadata.error(key, f"must have {count} values, not {len(labels)}")
    named = {"id2label": {str(i): label for i, label in enumerate(labels)}}
    return classifier(Fields(named if labels else {"num_labels": count}), "cls", *layers)


def model_config(file: GgufFile) -> dict[str, object]:
    """Return the facts of a file with the keys of config.json, for `ModelSpec.from_config`.

    Raises:
        ModelError: an unknown architecture, or a value out of range.
    """
    name = architecture(file)
    family, names = family_of(file.metadata), {tensor.name for tensor in file.tensors}
    config = metadata_config(file.metadata)
    for key, tensors in (
        (family.qkv_bias, ("attn_q", "attn_qkv")),
        (family.o_bias, ("attn_output",)),
        (family.mlp_bias, ("ffn_up",)),
    ):
        if isinstance(key, str):
            config.setdefault(key, any(f"blk.0.{tensor}.bias" in names for tensor in tensors))
    if isinstance(family.qk_norm, str):
        config.setdefault(family.qk_norm, "blk.0.attn_q_norm.weight" in names)
    for layer, key in family.gguf_present.items():
        config[key] = f"blk.0.{layer}.weight" in names
    config |= {
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": HEAD not in names,
        "dtype": _dtype(file),
    }
    if family.gguf_by_kind:
        config |= _full_layers_config(file, config)
    elif "rope_scaling" not in config and ROPE_FACTORS in names:
        width = _rope_width(file.metadata, name)
        theta = Fields(config).number("rope_theta", 1.0, 1e12)
        scaling = llama3_scaling(_divisors(file, ROPE_FACTORS), theta, width)
        if scaling is not None:
            config["rope_scaling"] = scaling
    if "rope_scaling" not in config and {LONG_FACTORS, SHORT_FACTORS} & names:
        config["rope_scaling"] = _longrope_scaling(file, name)
    return config | _token_ids(file)


def _full_layers_config(file: GgufFile, config: Mapping[str, object]) -> dict[str, object]:
    """Return the facts of layers without a window that only tensors give: which pairs are rotated,
    and whether keys are values."""
    fields, size = Fields(config), _head_size(file.metadata, architecture(file))
    turns = proportional_rope(_divisors(file, ROPE_FACTORS), size)
    ropes = fields.inside("rope_parameters")
    rotations = {kind: ropes.mapping(kind) or {} for kind in (SLIDING, FULL)}
    types = fields.strings("layer_types")
    num_owners = len(types) - fields.integer("num_kv_shared_layers", 0, len(types) - 1)
    full = [layer for layer in range(num_owners) if types[layer] == FULL]
    return {
        "rope_parameters": {**rotations, FULL: {**rotations[FULL], **turns}},
        "attention_k_eq_v": all(file.tensor(f"blk.{i}.attn_v.weight") is None for i in full),
    }


def _longrope_scaling(file: GgufFile, name: str) -> dict[str, object]:
    """Return `rope_scaling` of config.json from the divisors of the frequencies, in two tensors."""
    metadata, at = file.metadata, f"{name}.rope.scaling"
    scaling: dict[str, object] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": metadata.integer(
            f"{at}.original_context_length", 1, MAX_POSITIONS
        ),
    }
    if f"{at}.attn_factor" in metadata:
        scaling["attention_factor"] = metadata.number(f"{at}.attn_factor", 0.0, 1e6)
    for key, tensor in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        scaling[key] = [shortest(divisor) for divisor in _divisors(file, tensor)]
    return scaling


def _divisors(file: GgufFile, name: str) -> tuple[float, ...]:
    """Return the divisors of the frequencies in a tensor."""
    tensor = file.tensor(name)
    if tensor is None or tensor.type.name != "F32":
        raise ModelError(file.path.name, f"must have a vector {name} of F32")
    data = file.read(tensor, MAX_DIVISORS_BYTES)
    return struct.unpack(f"<{len(data) // 4}f", data)


# Constant factors of networks: key of config.json -> key of a GGUF file, and its value for export.
SCALES: Mapping[str, tuple[str, Callable[[ModelScales], float | None]]] = {
    "embedding_multiplier": ("embedding_scale", lambda scales: scales.embedding),
    "residual_multiplier": ("residual_scale", lambda scales: scales.residual),
    "attention_multiplier": ("attention.scale", lambda scales: scales.attention),
    "logits_scaling": ("logit_scale", lambda scales: 1.0 / scales.logits),
    "logit_scale": ("logit_scale", lambda scales: scales.logits),
    "attn_logit_softcapping": ("attn_logit_softcapping", lambda scales: scales.attention_cap),
    "final_logit_softcapping": ("final_logit_softcapping", lambda scales: scales.logits_cap),
    "clip_qkv": ("attention.clamp_kqv", lambda scales: scales.qkv_limit),
}
# 0 in a file: none
CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")
PARALLEL = "use_parallel_residual"  # the key in both


def eps_key(family: Architecture) -> str:
    """Return the key of the eps of norms, which files call as config.json does."""
    usual = family.rms_norm and family.keys.get("rms_norm_eps") != "layer_norm_epsilon"
    return f"attention.layer_norm_{'rms_' if usual else ''}epsilon"


def metadata_config(metadata: Metadata) -> dict[str, object]:
    """Return the facts in the metadata alone, with the keys of config.json.

    Raises:
        ModelError: a value is out of range.
    """
    name, family = metadata.string(NAME), family_of(metadata)

    def size(key: str, limit: int, default: int | None = None) -> int:
        return metadata.integer(f"{name}.{key}", 1, limit, default)

    latent = f"{name}.{LATENT_RANK}" in metadata
    head_dim, width = _head_size(metadata, name), _rope_width(metadata, name)
    if size("attention.value_length", MAX_WIDTH, head_dim) != head_dim and not latent:
        key = f"{name}.attention.value_length"
        raise metadata.error(key, f"must be the size of a head, {head_dim}")
    heads, layers = size("attention.head_count", MAX_HEADS), _layers(metadata)
    kv_heads = _kv_heads(metadata, name, heads, layers, mixed=family.gguf_by_kind)
    context = size("context_length", MAX_POSITIONS)
    experts_inner = metadata.integer(f"{name}.expert_feed_forward_length", 0, MAX_WIDTH, 0)
    inner = _inner_sizes(metadata, family, layers, experts_inner or None)
    usual: dict[str, object] = {
        "hidden_size": size("embedding_length", MAX_WIDTH),
        "intermediate_size": inner[0] or max(inner),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.number(f"{name}.{eps_key(family)}", 0.0, 1.0),
        "rope_theta": metadata.number(f"{name}.rope.freq_base", 1.0, 1e12, 10000.0),
        "hidden_act": family.activations[0],
        "type_vocab_size": metadata.integer(TOKEN_TYPES, 0, 1 << 16, 1),
    }
    config: dict[str, object] = {family.keys.get(key, key): value for key, value in usual.items()}
    config["architectures"] = [family.name]
    window = metadata.integer(f"{name}.attention.sliding_window", 0, MAX_POSITIONS, 0)
    config["sliding_window"] = window or None
    pattern = metadata.raw(f"{name}.attention.sliding_window_pattern")
    if window and isinstance(pattern, Array) and pattern.kind is ValueKind.BOOL:
        if pattern.count != layers:
            key = f"{name}.attention.sliding_window_pattern"
            raise metadata.error(key, f"must have {layers} values, not {pattern.count}")
        config["layer_types"] = [SLIDING if windowed else FULL for windowed in pattern.numbers()]
    if f"{name}.{TAPS}" in metadata:
        config |= {"conv_L_cache": size(TAPS, MAX_TAPS), "layer_types": _states(kv_heads, CONV)}
    if f"{name}.ssm.conv_kernel" in metadata:
        config |= _recurrent_config(metadata, family, kv_heads, inner)
    if latent:
        config |= _latent_config(metadata, name)
    elif width != head_dim:
        # Plus one half, so that rounding down gives the width despite rounding of the fraction.
        config["partial_rotary_factor"] = (width + 0.5) / head_dim
        try:
            family.layers(Fields({**family.defaults, **config}), layers, context)
        except ModelError:
            key = f"{name}.rope.dimension_count"
            raise metadata.error(key, f"must be the size of a head, {head_dim}") from None
    scaling = rope_scaling(metadata, name, context, family.gguf_log_scale)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if family.gguf_by_kind:
        config |= _kinds_config(metadata, name, config, kv_heads, inner)
    for key in family.gguf_scales:
        at = f"{name}.{SCALES[key][0]}"
        if at in metadata:
            value = metadata.number(at, 0.0, 1e9)
            config[key] = None if value == 0.0 and key in CAPS else value
    if f"{name}.{MAX_BIAS}" in metadata:
        config["alibi_bias_max"] = metadata.number(f"{name}.{MAX_BIAS}", 0.0, 1e6)
    if f"{name}.{PARALLEL}" in metadata:
        config[PARALLEL] = metadata.boolean(f"{name}.{PARALLEL}", True)
    config |= _experts_config(metadata, family, layers, config)
    if family.gguf_implied is not None:
        config |= family.gguf_implied(Fields(config))
    return config


TOKEN_TYPES = "tokenizer.ggml.token_type_count"
TAPS = "shortconv.l_cache"
LATENT_RANK = "attention.kv_lora_rank"
# Key of config.json, which may have another name in a family -> key of a GGUF file, and its value
# for export from the state of a recurrent layer. Instead of the size of a value head, files have it
# times the number of value heads.
RECURRENT: Mapping[str, tuple[str, Callable[[StateSpec], int]]] = {
    "linear_conv_kernel_dim": ("ssm.conv_kernel", lambda state: state.width),
    "linear_key_head_dim": ("ssm.state_size", lambda state: state.key_dim),
    "linear_num_key_heads": ("ssm.group_count", lambda state: state.key_heads),
    "linear_num_value_heads": ("ssm.time_step_rank", lambda state: state.value_heads),
    "linear_value_head_dim": ("ssm.inner_size", lambda state: state.values),
}
VALUE_DIM = "linear_value_head_dim"
FULL_INTERVAL, RECURRENT_LAYERS = "full_attention_interval", "attention.recurrent_layers"


def _inner_sizes(
    metadata: Metadata, family: Architecture, layers: int, default: int | None
) -> tuple[int, ...]:
    """Return the width of the MLP or of the experts of each layer; 0: it has neither."""
    key, alone = f"{metadata.string(NAME)}.feed_forward_length", BLOCK_KINDS in family.keys.values()
    if not ((family.gguf_by_kind or alone) and isinstance(metadata.raw(key), Array)):
        return (metadata.integer(key, 1, MAX_WIDTH, default),) * layers
    sizes, low = metadata.integer_array(key, MAX_LAYERS)[:layers], 0 if alone else 1
    if len(sizes) != layers or not all(low <= size <= MAX_WIDTH for size in sizes):
        raise metadata.error(key, f"must have {layers} values in [{low}, {MAX_WIDTH}]")
    return tuple(sizes)


def _kinds_config(
    metadata: Metadata,
    name: str,
    config: Mapping[str, object],
    kv_heads: Sequence[int],
    inner: Sequence[int],
) -> dict[str, object]:
    """Return the keys of config.json about layers with a window and others, whose heads and
    positions differ, and about layers that read the keys and values of earlier ones."""
    at, layers = f"{name}.attention", len(inner)
    if (types := Fields(config).strings("layer_types"))[-1:] != (FULL,):
        reason = "must give the layers with a window; the last layer has none"
        raise metadata.error(f"{at}.sliding_window_pattern", reason)
    if "rope_scaling" in config:
        raise metadata.error(f"{name}.rope.scaling.type", "must be none")
    sizes = {FULL: _head_size(metadata, name)}
    sizes[SLIDING] = metadata.integer(f"{at}.key_length_swa", 1, MAX_WIDTH)
    for key, kind in (
        (f"{at}.value_length_swa", SLIDING),
        (f"{name}.rope.dimension_count", FULL),
        (f"{name}.rope.dimension_count_swa", SLIDING),
    ):
        if metadata.integer(key, 1, MAX_WIDTH, sizes[kind]) != sizes[kind]:
            raise metadata.error(key, f"must be the size of a head, {sizes[kind]}")
    shared = metadata.integer(f"{at}.shared_kv_layers", 0, layers - 1, 0)
    wide = (inner[0],) * (layers - shared) + (2 * inner[0],) * shared
    if len(set(inner)) > 1 and inner != wide:
        reason = f"must be {inner[0]}, or twice that in the last {shared} layers"
        raise metadata.error(f"{name}.feed_forward_length", reason)
    kv = dict(zip(types, kv_heads, strict=True))
    if any(kv[kind] != heads for kind, heads in zip(types, kv_heads, strict=True)):
        reason = "must be the same in all layers with a window, and in all others"
        raise metadata.error(f"{at}.head_count_kv", reason)
    usual = kv.get(SLIDING, kv[FULL])
    full = {"head_dim": sizes[FULL]}
    if kv[FULL] != usual:
        full["num_key_value_heads"] = kv[FULL]
    input_width = metadata.integer(f"{name}.embedding_length_per_layer_input", 0, MAX_WIDTH, 0)
    theta = metadata.number(f"{name}.rope.freq_base_swa", 1.0, 1e12, 10000.0)
    return {
        "head_dim": sizes[SLIDING],
        "num_key_value_heads": usual,
        "per_layer_config": {str(i): full for i, kind in enumerate(types) if kind == FULL},
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len(set(inner)) > 1,
        "hidden_size_per_layer_input": input_width,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": theta},
            FULL: {"rope_type": "proportional", "rope_theta": config["rope_theta"]},
        },
    }


def _kv_heads(
    metadata: Metadata, name: str, heads: int, layers: int, *, mixed: bool
) -> tuple[int, ...]:
    """Return the number of KV heads of each layer; 0: it has no attention.

    Args:
        mixed: all layers have attention, with different numbers of KV heads.
    """
    key = f"{name}.attention.head_count_kv"
    if not isinstance(metadata.raw(key), Array):
        return (metadata.integer(key, 1, MAX_HEADS, heads),) * layers
    counts = metadata.integer_array(key, MAX_LAYERS)[:layers]
    largest = max(counts, default=0)
    if mixed and len(counts) == layers and min(counts) >= 1 and largest <= MAX_HEADS:
        return tuple(counts)
    if (
        len(counts) != layers
        or largest < 1
        or set(counts) - {0, largest}
        or (mixed and 0 in counts)
    ):
        raise metadata.error(key, f"must have {layers} values, all equal except zeros")
    return tuple(counts)


def _states(attend: Iterable[object], other: str) -> list[str]:
    return [FULL if flag else other for flag in attend]


def _latent_config(metadata: Metadata, name: str) -> dict[str, object]:
    """Return the keys of config.json about latent attention. Old files have one matrix for keys and
    values, and their usual keys give the head sizes that new files have in the keys with "_mla"."""
    at = f"{name}.attention"
    new = f"{at}.key_length_mla" in metadata
    ends = ("key_length_mla", "value_length_mla") if new else ("key_length", "value_length")
    key, value = (metadata.integer(f"{at}.{end}", 1, MAX_WIDTH) for end in ends)
    turned = metadata.integer(f"{name}.rope.dimension_count", 1, MAX_WIDTH)
    if turned >= key:
        message = f"must be below {at}.{ends[0]} ({key}), not {turned}"
        raise metadata.error(f"{name}.rope.dimension_count", message)
    q_rank = metadata.integer(f"{at}.q_lora_rank", 0, MAX_WIDTH, 0)
    return {
        "kv_lora_rank": metadata.integer(f"{name}.{LATENT_RANK}", 1, MAX_WIDTH),
        "q_lora_rank": q_rank or None,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        SEPARATE: new,
    }


def _recurrent_config(
    metadata: Metadata, family: Architecture, kv_heads: Sequence[int], inner: Sequence[int]
) -> dict[str, object]:
    """Return the keys of config.json about recurrent layers, and which layers are of which kind."""
    name, layers = metadata.string(NAME), len(kv_heads)
    config: dict[str, object] = {
        family.keys.get(key, key): metadata.integer(f"{name}.{at}", 1, MAX_WIDTH)
        for key, (at, _) in RECURRENT.items()
    }
    width = metadata.integer(f"{name}.ssm.inner_size", 1, MAX_WIDTH)
    heads = metadata.integer(f"{name}.ssm.time_step_rank", 1, MAX_WIDTH)
    if width % heads:
        raise metadata.error(f"{name}.ssm.inner_size", f"must be a multiple of {heads} heads")
    config[family.keys.get(VALUE_DIM, VALUE_DIM)] = width // heads
    kinds, recurrent = _states(kv_heads, LINEAR), metadata.raw(f"{name}.{RECURRENT_LAYERS}")
    if (key := family.keys.get("layer_types", "")) == BLOCK_KINDS:
        feed = EXPERTS if _expert_count(metadata) else MLP
        pairs = zip(kinds, inner, strict=True)
        return config | {key: [feed if width else kind for kind, width in pairs]}
    if 0 in kv_heads:
        return config | {"layer_types": kinds}
    if not isinstance(recurrent, Array):
        every = metadata.integer(f"{name}.{FULL_INTERVAL}", 1, MAX_LAYERS, 4)
        return config | {"full_attention_interval": every}
    if recurrent.kind is not ValueKind.BOOL or recurrent.count < layers:
        raise metadata.error(f"{name}.{RECURRENT_LAYERS}", f"must have {layers} booleans")
    return config | {
        "layer_types": _states((not flag for flag in recurrent.numbers()), LINEAR)[:layers]
    }


# Experts: key of config.json -> key of a GGUF file, and its value for export.
EXPERT_SIZES: Mapping[str, tuple[str, Callable[[ExpertsSpec], int | None]]] = {
    EXPERT_KEYS[0]: ("expert_count", lambda experts: experts.router.experts),
    "num_experts_per_tok": ("expert_used_count", lambda experts: experts.router.active),
    "n_shared_experts": (
        "expert_shared_count",
        lambda experts: None if experts.gated else experts.shared // experts.inner or None,
    ),
    "shared_expert_intermediate_size": (
        "expert_shared_feed_forward_length",
        lambda experts: experts.shared if experts.gated else None,
    ),
    "n_group": ("expert_group_count", lambda experts: _groups(experts.router, "groups")),
    "topk_group": (
        "expert_group_used_count",
        lambda experts: _groups(experts.router, "kept_groups"),
    ),
}


def _groups(router: Router, field: str) -> int | None:
    """Return the number of groups, or of kept groups; None: all are kept."""
    return getattr(router, field) if router.kept_groups < router.groups else None


STEP = STEP_KEYS[1]  # the key in both, for families that have a default
GATING = {"softmax": 1, "sigmoid": 2}  # scores of a router -> `expert_gating_func`


def _experts_config(
    metadata: Metadata, family: Architecture, layers: int, config: Mapping[str, object]
) -> dict[str, object]:
    """Return the keys of config.json about experts."""
    if family.experts is None:
        return {}
    at, count = f"{metadata.string(NAME)}.", _expert_count(metadata)
    switch: dict[str, object] = {SWITCH: count > 0} if SWITCH in family.defaults else {}
    shared = "shared_expert_intermediate_size"
    if not count:
        size = metadata.integer(at + EXPERT_SIZES[shared][0], 0, MAX_WIDTH, 0)
        alone = {family.keys[shared]: size} if shared in family.keys and size else {}
        return {EXPERT_KEYS[0]: 0, **switch, **alone}
    inner, first = f"{at}expert_feed_forward_length", f"{at}leading_dense_block_count"
    facts: dict[str, object] = {"first_k_dense_replace": metadata.integer(first, 0, layers, 0)}
    if inner in metadata:
        facts["moe_intermediate_size"] = metadata.integer(inner, 1, MAX_WIDTH)
    metadata.integer(f"{at}expert_used_count", 1, MAX_EXPERTS)
    for key, (name, _) in EXPERT_SIZES.items():
        if at + name in metadata and (size := metadata.integer(at + name, 0, MAX_WIDTH)):
            facts[family.keys.get(key, key)] = size
    facts = {"n_group": 1, "topk_group": 1, **switch, **facts}  # override the family's defaults
    if STEP in family.defaults:
        facts[STEP] = metadata.integer(f"{at}{STEP}", 1, MAX_LAYERS, 1)
    if f"{at}expert_weights_norm" in metadata:
        facts["norm_topk_prob"] = metadata.boolean(f"{at}expert_weights_norm", True)
    scale = metadata.number(f"{at}expert_weights_scale", 0.0, 1e6, 0.0)
    facts["routed_scaling_factor"] = scale or 1.0  # 0 stands for none
    fields = Fields({**family.defaults, **config, **facts}, f"{metadata.where} {family.gguf}")
    scores = next((moe.router.scores for moe in family.experts(fields, layers) if moe), "softmax")
    gating = f"{at}expert_gating_func"
    if metadata.integer(gating, 0, 1 << 16, 0) not in (0, GATING[scores]):
        raise metadata.error(gating, f"must be {GATING[scores]} ({scores})")
    return facts


def _head_size(metadata: Metadata, name: str) -> int:
    """Return the size of a head of queries, keys or values."""
    hidden = metadata.integer(f"{name}.embedding_length", 1, MAX_WIDTH)
    heads = metadata.integer(f"{name}.attention.head_count", 1, MAX_HEADS)
    usual = max(1, hidden // heads)
    return metadata.integer(f"{name}.attention.key_length", 1, MAX_WIDTH, usual)


def _rope_width(metadata: Metadata, name: str) -> int:
    """Return the number of rotated channels of a head."""
    size = _head_size(metadata, name)
    width = metadata.integer(f"{name}.rope.dimension_count", 1, MAX_WIDTH, size)
    if width > size:
        key = f"{name}.rope.dimension_count"
        raise metadata.error(key, f"must be at most the size of a head, {size}")
    return width


def _vocab_size(file: GgufFile) -> int:
    """Return the rows of the embedding, which may be more than the tokens."""
    embedding = file.tensor(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(file.path.name, f"must have a matrix {EMBEDDING}")
    rows = embedding.shape[0]
    tokens = file.metadata.array_length("tokenizer.ggml.tokens")
    if tokens > rows:
        raise file.metadata.error(
            "tokenizer.ggml.tokens", f"must have at most {rows} values by {EMBEDDING}, not {tokens}"
        )
    return rows


def _token_ids(file: GgufFile) -> dict[str, object]:
    """Return BOS and the tokens that end an answer; both are optional in a file."""
    metadata, limit = file.metadata, (1 << 32) - 1
    keys = {name: f"tokenizer.ggml.{name}" for name in ("bos_token_id", *END_TOKENS)}
    ids = {name: metadata.integer(key, 0, limit) for name, key in keys.items() if key in metadata}
    config: dict[str, object] = {}
    if "bos_token_id" in ids:
        config["bos_token_id"] = ids["bos_token_id"]
    named = [ids[name] for name in END_TOKENS if name in ids]
    # Present even if empty, because the architecture's defaults would apply otherwise.
    config["eos_token_id"] = list(dict.fromkeys([*named, *_spelled_ends(metadata)]))
    return config


def _spelled_ends(metadata: Metadata) -> list[int]:
    """Return the tokens that end an answer by their spelling."""
    tokens = metadata.string_array("tokenizer.ggml.tokens", MAX_VOCAB)
    ends = {token: index for index, token in enumerate(tokens) if token in ENDS}
    if all(token in ends for token in ENDS[:2]):
        ends.pop(MESSAGE_END, None)
    return list(ends.values())


def _dtype(file: GgufFile) -> str:
    """Return the dtype of the computation, by the types of matrices that are not quantised."""
    types = {tensor.type.name for tensor in file.tensors if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if "F16" in types and "BF16" not in types else "bfloat16"
