"""config.json -> the shape of a model, also of decoders that kvik does not run."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from importlib.resources import files

from kvik.config.config import EngineConfig, Notes, check_config
from kvik.config.fit import STREAMED_CONTEXT
from kvik.config.model_source import CONFIG, find_config
from kvik.config.resolve import as_streamed
from kvik.errors import ConfigError, ModelError, shown
from kvik.files import is_gguf
from kvik.gguf.facts import METHOD, gguf_model_spec, model_config, usual_bits
from kvik.gguf.reader import GgufFile, read_gguf
from kvik.models import registry
from kvik.models.deepseek import DEEPSEEK3
from kvik.models.model_spec import (
    DTYPE,
    ModelSpec,
    architecture_of,
    dtype_of,
    read_config,
    text_config,
)
from kvik.models.qwen3 import QWEN3, QWEN3_MOE
from kvik.planner.formats import weight_facts, weight_format
from kvik.planner.shape import LayerShape, MatrixGroup, ModelShape, changed_layers
from kvik.spec.declared import UNQUANTISED, DeclaredLinear, DeclaredNorm, DeclaredOther
from kvik.spec.engine_folder import read_built
from kvik.spec.experts import EXPERT_KEYS, MAX_EXPERTS, Router
from kvik.spec.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields, read_json
from kvik.spec.kv import STATE_BYTES
from kvik.spec.layers import LayerSpec
from kvik.spec.stored_weights import StoredScheme
from kvik.spec.weights import loaded_kind, matrix_kind

# Parts in which names of one configuration differ: owner, maker, and the purpose of tuning.
_OWNER = re.compile(r".*/|^meta-")
_TUNED = re.compile(r"-(instruct|chat|base|hf|it)\b")


@cache
def public_configs() -> Mapping[str, Mapping[str, object]]:
    """Return the cost-relevant fields of each public config.json, by a short lower-case name."""
    text = files("kvik.models").joinpath("public_configs.json").read_text(encoding="utf-8")
    configs: dict[str, dict[str, object]] = json.loads(text)
    return configs


HUB_IDS = frozenset({"gpt2"})  # short names under which the hub has the model, too


def public_name(model: str) -> str | None:
    """Return the short name for a hub id or a common name of a model; None: unknown model."""
    name = _OWNER.sub("", _OWNER.sub("", model.lower()))
    names = (name, _TUNED.sub("", name))  # a few tuned models differ from their base
    return next((known for known in names if known in public_configs()), None)


def is_short_name(model: str) -> bool:
    """Return whether a model is named by a short name that is not also its hub id."""
    return "/" not in model and model not in HUB_IDS and public_name(model) is not None


# Keys of layers that share a cache, or do not (only) attend over a cache of all tokens.
FOREIGN_KEYS = (
    *("attention_chunk_size", "attn_layer_period", "attn_type_list", "full_attention_interval"),
    *("hybrid_override_pattern", "index_topk", "layers_block_type", "linear_attn_config"),
    *("linear_num_value_heads", "mamba_d_state", "num_kv_shared_layers", "ssm_state_size"),
    "state_size",
)
# Keys that determine the cost of an unknown decoder. Others may have values that kvik lacks.
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("attention_bias", "tie_word_embeddings", *DTYPE),
    *("layer_types", "sliding_window"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    *("mlp_layer_types", "moe_layers", "first_k_dense_replace", "moe_layer_freq"),
    *("decoder_sparse_step", "interleave_moe_layer_step", "mlp_only_layers"),
)
DECODER_ENDINGS = ("ForCausalLM", "LMHeadModel")

# Architectures that generate text: encoders and rerankers are not supported here.
ARCHITECTURES = {name: row for name, row in registry.ARCHITECTURES.items() if row.pooled is None}


def read_shape(model: str) -> ModelShape:
    """Return the shape of a model: a folder, an engine folder, a hub id, the path of a config.json
    or GGUF file, the name of a public model such as "llama-3.1-8b", or "": the bundled one.

    Public models that kvik knows need neither a file nor a network.

    Raises:
        ModelError: no model is found, or it cannot be read as a decoder.
    """
    model_name = public_name(model)
    if model_name is not None and not os.path.exists(os.path.expanduser(model)):
        shape = shape_from_config(public_configs()[model_name], model_name)
        note = f"by the public configuration of {model_name}, which kvik knows"
        return replace(shape, notes=(*shape.notes, note))
    path = find_config(model)
    name = path.parent.name if path.name == CONFIG else path.stem
    if model and not os.path.exists(os.path.expanduser(model)):
        name = model.rpartition("/")[2]  # in the hub's cache the folder's name is a commit
    if is_gguf(path):
        return _gguf_shape(read_gguf(path), name)
    config = read_config(path.parent) if path.name == CONFIG else read_json(path)
    shape = shape_from_config(config, name)
    built = read_built(path.parent) if path.name == CONFIG else None
    if built is None:
        return shape
    stored = weight_format(built.dtype, built.quantization)
    if built.quantization == "none" and not weight_facts(shape.stored).dtype:
        stored = shape.stored
    like, notes = replace(shape.like, built=built), (*shape.notes, str(built))
    return replace(shape, dtype=built.dtype, stored=stored, like=like, notes=notes)


def _gguf_shape(file: GgufFile, name: str) -> ModelShape:
    config, bits = model_config(file), usual_bits(file)
    if bits is not None:
        nearest = 4 if bits <= 4 else 8
        config["quantization_config"] = {"quant_method": METHOD, "bits": nearest}
    return _from_spec(gguf_model_spec(file), Fields(config), name)


def shape_from_config(config: Mapping[str, object], name: str) -> ModelShape:
    """Return the shape that a parsed config.json describes.

    Raises:
        ModelError: a field that is missing or cannot be; the message names it.
    """
    fields = Fields(config)
    if fields.mapping("text_config") is None:
        return _shape(_architecture(fields), config, fields.where, fields, name)
    merged, outer = text_config(config), fields.strings("architectures")
    inside = Fields(merged, "config.json text_config")
    note = "only text_config is read: encoders of images or sound are not counted"
    runs = None
    with suppress(ModelError):
        runs = architecture_of(fields)
    if runs in ARCHITECTURES:
        shape = _shape(runs, config, fields.where, inside, name)
        return replace(shape, notes=(note, *shape.notes))
    shape = _shape(_architecture(inside), merged, inside.where, inside, name)
    architecture = outer[0] if outer else shape.architecture
    return replace(shape, architecture=architecture, runs=False, notes=(note, *shape.notes))


def _shape(
    architecture: str, config: Mapping[str, object], where: str, fields: Fields, name: str
) -> ModelShape:
    """Return the shape of an architecture.

    Args:
        where: the config is, for errors.
        fields: of the text model.
    """
    if architecture not in ARCHITECTURES:
        spec = _most_similar(fields, architecture)
        shape = _from_spec(spec, fields, name)
        note = f"{shown(architecture)} is not known: counted like {spec.architecture}"
        notes = (note, *shape.notes)
        return replace(shape, architecture=architecture, runs=False, notes=notes)
    named = {**config, "architectures": [architecture]}
    try:
        return _from_spec(ModelSpec.from_config(named, where), fields, name)
    except ModelError as error:
        plain = {key: value for key, value in named.items() if key != "quantization_config"}
        if plain == named:
            raise
        shape = _from_spec(ModelSpec.from_config(plain, where), fields, name)
        # Tools leave the head in floats.
        matrices = (
            replace(m, stored=((m.outputs, None),)) if m.role == "head" else m
            for m in shape.outside.matrices
        )
        outside = replace(shape.outside, matrices=tuple(matrices))
        notes = (*shape.notes, f"kvik does not run this checkpoint: {error}")
        return replace(shape, runs=False, outside=outside, notes=notes)


def _architecture(fields: Fields) -> str:
    """Return the first known architecture in the file, else that of model_type, else the first
    named."""
    names = fields.strings("architectures")
    for name in names:
        if name in ARCHITECTURES:
            return name
    model_type = fields.raw("model_type")
    types = {row.model_type: name for name, row in ARCHITECTURES.items()}
    if not names and isinstance(model_type, str):
        return types.get(model_type, types.get(model_type.removesuffix("_text"), model_type))
    if not names:
        raise fields.error("architectures", "is missing, and so is model_type")
    return names[0]


def _most_similar(fields: Fields, architecture: str) -> ModelSpec:
    """Return the spec of the most similar decoder that kvik runs, with the sizes of an unknown one.

    Raises:
        ModelError: it is not a decoder, its layers have no similar ones, or a size is invalid.
    """
    if fields.raw("architectures") and not architecture.endswith(DECODER_ENDINGS):
        raise fields.error("architectures", f"{shown(architecture)} is not a text decoder")
    if fields.boolean("is_encoder_decoder", False):
        raise fields.error("is_encoder_decoder", "must be false: only decoders can be planned")
    for key in FOREIGN_KEYS:
        if key in fields:
            raise fields.error(key, "means layers that are not plain attention: cannot be planned")
    counts = [fields.raw(key) for key in EXPERT_KEYS if key in fields]
    similar = QWEN3_MOE if counts else QWEN3
    if "kv_lora_rank" in fields:
        similar = DEEPSEEK3
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    defaults = {
        "head_dim": fields.integer("hidden_size", 1, MAX_WIDTH) // heads,
        "moe_intermediate_size": fields.raw("intermediate_size"),
        "first_k_dense_replace": 0,
    }
    sizes = {key: fields.raw(key) for key in SIZES if key in fields}
    if not counts:
        sizes["first_k_dense_replace"] = fields.raw("num_hidden_layers")
    windows = "sliding_window" in fields and fields.boolean("use_sliding_window", True)
    fixed = {
        "architectures": [similar.name],
        "num_local_experts": counts[0] if counts else None,
        "use_sliding_window": windows,
        "max_window_layers": 0,
    }
    spec = ModelSpec.from_config({**defaults, **sizes, **fixed}, fields.where)
    shared = fields.integer("n_shared_experts", 0, MAX_EXPERTS, 0)
    if similar is QWEN3_MOE and shared:
        pairs = ((layer, layer.experts) for layer in spec.layers)
        layers = (
            replace(layer, experts=experts and replace(experts, shared=shared * experts.inner))
            for layer, experts in pairs
        )
        spec = replace(spec, layers=tuple(layers))
    return spec


# Method, format or bits in a quantization_config -> the nearest weight format.
STORED: Mapping[str | int, str] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "float-quantized": "fp8",
    "mxfp4": "mxfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "int-quantized": "int8",
    "bitnet": "int8",  # 2 bits, which are widened to 8 for products with 8 bits
    2: "int4",
    3: "int4",
    4: "int4",
    8: "int8-weight-only",
}


def _stored_format(fields: Fields) -> tuple[str, str, tuple[str, ...]]:
    """Return the dtype of a checkpoint, the nearest weight format, and notes on both."""
    dtype = dtype_of(fields)
    plain = weight_format(dtype)
    if "quantization_config" not in fields:
        note = f"no dtype is given: {dtype} taken"
        return dtype, plain, () if any(key in fields for key in DTYPE) else (note,)
    config = fields.inside("quantization_config")
    inside, method = fields.mapping("quantization_config") or {}, config.raw("quant_method")
    # compressed-tensors has one method name for everything; its "format" tells most of them apart,
    # and its first group the others
    weights = _first_group(config)
    float8 = "fp8" if weights.get("type") == "float" and weights.get("num_bits") == 8 else None
    names = ((bits, f"load_in_{bits}bit") for bits in (4, 8))  # of bitsandbytes
    loaded = (bits for bits, name in names if True in (config.raw(name), config.raw(f"_{name}")))
    bits = (weights.get("num_bits"), next(loaded, None), *_said_of_weights(inside))
    for hint in (method, config.raw("format"), float8, *bits):
        nearest = _nearest_format(hint)
        if nearest == "fp8":
            return dtype, nearest, ()
        if nearest is not None:
            return dtype, nearest, (f"quantised by {shown(method)}: counted as {nearest}",)
    return dtype, plain, (f"quantised by {shown(method)}, which is not known: {plain} taken",)


# A number format in a word: "nvfp4", "int4_weight_only", "Int8DynamicActivationInt4WeightConfig".
_NUMBER = re.compile(r"(fp|float|nf|int)(\d)")
_BITS = ("bits", "nbits", "weights", "quant_type", "_type", "quant_algo", "forward_dtype", "dtype")
# Objects with the quantisation of weights: of HQQ, torchao and Quark.
_WITHIN = ("quant_config", "weight_quant_params", "default", "global_quant_config", "weight")


def _said_of_weights(config: Mapping[str, object]) -> Iterator[object]:
    """Yield what methods say of the bits of a weight, each in its own way."""
    for key, value in config.items():
        if isinstance(value, Mapping) and (key in _WITHIN or key in _BITS):
            yield from _said_of_weights(value)
        elif key in _BITS:
            yield value
    codebooks, bits, group = map(
        config.get, ("num_codebooks", "nbits_per_codebook", "in_group_size")
    )
    if type(codebooks) is type(bits) is type(group) is int and group > 0:  # AQLM
        yield round(codebooks * bits / group)


def _nearest_format(hint: object) -> str | None:
    """Return the nearest weight format to a word or a number of bits; None: it says none."""
    if isinstance(hint, str) and hint not in STORED:
        numbers = _NUMBER.findall(hint.lower())
        if not numbers:
            return None
        kind, bits = numbers[-1]  # activations come before weights
        hint = "fp8" if kind in ("fp", "float") and bits == "8" else int(bits)
    return STORED.get(hint) if isinstance(hint, str | int) else None


def _first_group(config: Fields) -> Mapping[str, object]:
    """Return what the first group of compressed-tensors says of weights."""
    groups = config.raw("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def attention_kind(heads: int, kv_heads: int) -> str:
    if kv_heads == heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def _from_spec(spec: ModelSpec, fields: Fields, name: str) -> ModelShape:
    """Return the shape of a model with the engine's spec."""
    latent = spec.latent
    *layers, outside = _layers(spec)
    dtype, stored, notes = _stored_format(fields)
    predicting = fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
    if predicting:
        notes += (f"layers for multi-token prediction count only with --draft mtp: {predicting}",)
    return ModelShape(
        name=name,
        architecture=spec.architecture,
        attention="MLA" if latent else attention_kind(spec.num_heads, spec.num_kv_heads),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=latent.query if latent else spec.head_dim,
        v_head_dim=latent.value if latent else spec.head_dim,
        max_context=spec.max_context,
        dtype=dtype,
        stored=stored,
        tied=spec.tie_word_embeddings,
        layers=tuple(layers),
        outside=outside,
        latent_dim=latent.rank if latent else 0,
        like=spec,
        notes=notes,
    )


def windowed(shape: ModelShape, window: int | None, sinks: int) -> ModelShape:
    """Return a model whose tokens see a window and sinks, as set by an engine's options.

    Raises:
        ConfigError: the model cannot be run that way, or there are sinks without a window.
    """
    config = check_config(EngineConfig(window=window, attention_sinks=sinks))
    if window is None:
        return shape
    if not shape.runs:
        raise ConfigError("window", f"must be left out: kvik does not run {shape.architecture}")
    spec = as_streamed(config, shape.like, Notes())
    seen = spec.windows[0]
    layers = changed_layers(
        shape.layers,
        lambda layer: replace(layer, cache=layer.cache and replace(layer.cache, window=seen)),
    )
    longest = max(shape.max_context, STREAMED_CONTEXT)
    return replace(shape, like=spec, layers=layers, max_context=longest)


def with_own_head(shape: ModelShape) -> ModelShape:
    """Return the shape with the head that predicts further tokens, if it has one, as one more
    layer."""
    spec = replace(shape.like, predictor=shape.like.family.predictor)
    if spec.predictor is None:
        return shape
    declared, scope = spec.declaration, spec.predictor_scope
    linears = [linear for linear in declared.linears if linear.names[0].startswith(scope)]
    other_parameters = sum(linear.bias * sum(linear.outputs) for linear in linears)
    parts: list[DeclaredNorm | DeclaredOther] = [*declared.norms, *declared.others]
    other_parameters += sum(part.num_parameters for part in parts if part.name.startswith(scope))
    counts = Counter(_matrix(spec, linear) for linear in linears)
    head = replace(
        next(layer for layer in reversed(shape.layers) if layer.attends),
        matrices=tuple(replace(matrix, count=count) for matrix, count in counts.items()),
        other_parameters=other_parameters,
    )
    return replace(shape, layers=(*shape.layers, head))


def _layers(spec: ModelSpec) -> list[LayerShape]:
    """Return the shape of each layer, and at the end what is in no layer."""
    declared = spec.declaration
    matrices = [Counter[MatrixGroup]() for _ in range(spec.num_layers + 1)]
    other_parameters = [0] * len(matrices)
    for linear in declared.linears:
        at = -1 if linear.layer is None else linear.layer
        matrices[at][_matrix(spec, linear)] += 1
        other_parameters[at] += linear.bias * sum(linear.outputs)
    for table in declared.tables:
        if not table.tied:  # else it is the head
            scheme = spec.quantization and spec.quantization.embedding_scheme(table.name)
            kind = loaded_kind(scheme, table.width) if scheme else None
            stored = ((table.rows, kind),) if kind else ()
            sizes = table.width, table.rows
            matrices[-1][MatrixGroup(table.role, 1, *sizes, multiplied=False, stored=stored)] += 1
    declarations: list[DeclaredNorm | DeclaredOther] = [*declared.norms, *declared.others]
    for part in declarations:
        other_parameters[-1 if part.layer is None else part.layer] += part.num_parameters
    shapes: dict[LayerShape, LayerShape] = {}
    layers = []
    caches = spec.kv_specs(1)
    each = (*caches[: spec.num_layers], None)
    parts = zip((*spec.layers, LayerSpec()), matrices, each, other_parameters, strict=True)
    for number, (layer, counts, kv, rest) in enumerate(parts):
        state = layer.state
        shape = LayerShape(
            tuple(replace(matrix, count=count) for matrix, count in counts.items()),
            rest,
            kv,
            STATE_BYTES * state.size if state else 0,
            tuple(state.flops.items()) if state else (),
            layer.kv_from,
            tuple(
                replace(of, entries_of=None) for n in spec.entries_of(number) if (of := caches[n])
            ),
        )
        layers.append(shapes.setdefault(shape, shape))
    return layers


def _matrix(spec: ModelSpec, linear: DeclaredLinear) -> MatrixGroup:
    quantised = spec.quantization is not None and linear.role not in UNQUANTISED
    stored = tuple(spec.stored_parts(linear)) if quantised else ()
    sizes = linear.inputs, sum(linear.outputs)
    return _matrix_of(linear.role, *sizes, linear.router, stored, linear.uses)


@lru_cache(maxsize=256)  # a model may have thousands of equal experts
def _matrix_of(
    role: str,
    inputs: int,
    outputs: int,
    router: Router | None,
    stored: tuple[tuple[int, tuple[StoredScheme | None, ...]], ...],
    uses: int,
) -> MatrixGroup:
    chosen = (router.experts, router.active) if router else (0, 0)
    head = role == "head"
    parts = ((count, matrix_kind("none", inputs, schemes, head=head)) for count, schemes in stored)
    return MatrixGroup(role, 1, inputs, outputs, *chosen, uses=uses, stored=tuple(parts))
