"""Shapes of decoders that kvik does not run, from config.json and a table row for each family.

A row describes what config.json does not say about a family, and transformers' defaults for absent
keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvik.errors import ModelError, shown
from kvik.planner.formats import weight_format
from kvik.planner.shape import CacheShape, MatrixGroup, ModelShape
from kvik.spec.experts import EXPERT_KEYS, sparse_layers
from kvik.spec.fields import Fields
from kvik.spec.model import DTYPE_BYTES, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from kvik.spec.rope import MAX_POSITIONS
from kvik.spec.visible_keys import Window

LARGEST = 1 << 20  # limit of any width


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """Keys of routed experts. The number of layers with experts is read from config.json.

    Attributes:
        total, active, width: keys for the experts per layer, the experts per token, and their
            width.
        shared: key for the number of experts that every token uses.
    """

    total: str = "num_experts"
    active: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """Attributes:
    model_types: the family's names in config.json, used if it names no architecture.
    keys: usual key -> this family's name for it in config.json.
    defaults: values of keys that config.json may omit.
    computed: keys whose value is computed from others.
    qkv_bias, o_bias, mlp_bias: a constant, or the key that decides.
    gated_mlp: down(act(gate(x)) * up(x)), else down(act(up(x))).
    norms: number of norms of the hidden size per layer.
    norm_vectors: 0: norms without parameters; 1: with weights; 2: with weights and biases.
    embedding_norm: a norm follows the embedding.
    positions: learned positions beyond `max_position_embeddings`; None: rotary or no table.
    windows: layers may have a sliding window, as set in config.json.
    """

    model_types: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Fields], int]] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    gated_mlp: bool = True
    norms: int = 2
    norm_vectors: int = 1
    embedding_norm: bool = False
    positions: int | None = None
    windows: bool = False
    tied: bool = False
    experts: ExpertFields | None = None


def _integer(fields: Fields, key: str, default: int | None = None) -> int:
    return fields.integer(key, 1, LARGEST, default)


def _four_times(key: str, hidden: str) -> Callable[[Fields], int]:
    """Return a rule for the MLP's width: four times the hidden size if config.json omits it."""
    return lambda fields: _integer(fields, key, 4 * _integer(fields, hidden))


def _falcon_kv_heads(fields: Fields) -> int:
    heads = _integer(fields, "num_attention_heads")
    if fields.boolean("new_decoder_architecture", False):
        return _integer(fields, "num_kv_heads", heads)
    return 1 if fields.boolean("multi_query", True) else heads


def _falcon_norms(fields: Fields) -> int:
    if fields.boolean("new_decoder_architecture", False):
        return _integer(fields, "num_ln_in_parallel_attn", 2)
    return 1 if fields.boolean("parallel_attn", True) else 2


def _bigcode_kv_heads(fields: Fields) -> int:
    return 1 if fields.boolean("multi_query", True) else _integer(fields, "n_head")


def _qwen_width(fields: Fields) -> int:
    return fields.integer("intermediate_size", 2, LARGEST) // 2  # of gate and up together


_GPT_KEYS: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

# Used for a decoder without its own row.
LLAMA_LIKE = Family(
    qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", windows=True
)

FAMILIES: Mapping[str, Family] = {
    # Variants that kvik does not run.
    "FalconForCausalLM": Family(
        ("falcon", "RefinedWeb", "RefinedWebModel"),
        keys={"num_key_value_heads": "num_kv_heads"},
        defaults={"max_position_embeddings": 2048},
        computed={
            "num_key_value_heads": _falcon_kv_heads,
            "intermediate_size": _four_times("ffn_hidden_size", "hidden_size"),
            "norms": _falcon_norms,
        },
        qkv_bias="bias",
        o_bias="bias",
        mlp_bias="bias",
        gated_mlp=False,
        norm_vectors=2,
        tied=True,
    ),
    # dense, like Llama with small differences
    "InternLMForCausalLM": Family(
        ("internlm",), defaults={"bias": True}, qkv_bias="bias", o_bias="bias"
    ),
    "InternLM2ForCausalLM": Family(("internlm2",), qkv_bias="bias", o_bias="bias"),
    "QWenLMHeadModel": Family(
        ("qwen",),
        keys={"max_position_embeddings": "seq_length"},
        computed={"intermediate_size": _qwen_width},
        qkv_bias=True,
    ),
    "BaichuanForCausalLM": Family(("baichuan",), defaults={"max_position_embeddings": 4096}),
    "OlmoForCausalLM": Family(
        ("olmo",), qkv_bias="attention_bias", o_bias="attention_bias", norm_vectors=0
    ),
    # dense, of GPT's kind: LayerNorm, two matrices in the MLP
    "GPTBigCodeForCausalLM": Family(
        ("gpt_bigcode",),
        keys=_GPT_KEYS,
        computed={
            "num_key_value_heads": _bigcode_kv_heads,
            "intermediate_size": _four_times("n_inner", "n_embd"),
        },
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm_vectors=2,
        positions=0,
        tied=True,
    ),
    "BloomForCausalLM": Family(
        ("bloom",),
        keys={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        },
        computed={"intermediate_size": lambda fields: 4 * _integer(fields, "hidden_size")},
        defaults={"seq_length": 2048},
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm_vectors=2,
        embedding_norm=True,
        tied=True,
    ),
}


MAX_EXPERTS = 1 << 14


class Sizes:
    """Reads sizes from a config.json, using the family's key names and defaults."""

    def __init__(self, fields: Fields, family: Family) -> None:
        self.fields = fields
        self.family = family

    def integer(self, key: str, high: int, default: int | None = None, low: int = 1) -> int:
        rule = self.family.computed.get(key)
        if rule is not None:
            return rule(self.fields)
        own = self.family.keys.get(key, key)
        return self.fields.integer(own, low, high, self.family.defaults.get(own, default))

    def flag(self, rule: bool | str) -> bool:
        """Return a flag that a row gives as a constant or as a key of config.json."""
        if isinstance(rule, bool):
            return rule
        return self.fields.boolean(rule, bool(self.family.defaults.get(rule, False)))

    def error(self, key: str, message: str) -> ModelError:
        return self.fields.error(self.family.keys.get(key, key), message)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One part of the decoder: its matrices, and its number of norm weights and biases."""

    matrices: tuple[MatrixGroup, ...]
    others: int = 0


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Attention of all layers; the other attributes are those of `ModelShape` and `CacheShape`."""

    kind: str
    kv_heads: int
    head_dim: int
    v_head_dim: int
    elements: int
    vectors: int
    latent_dim: int
    part: LayerPart


def attention_kind(heads: int, kv_heads: int) -> str:
    if kv_heads == heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def attention(sizes: Sizes, layers: int, hidden: int, heads: int) -> AttentionPart:
    """Return attention over K and V of each KV head."""
    family = sizes.family
    kv_heads = sizes.integer("num_key_value_heads", MAX_HEADS, heads)
    if heads % kv_heads:
        raise sizes.error("num_key_value_heads", f"must divide the {heads} heads, not {kv_heads}")
    head_dim = _head_dim(sizes, hidden, heads)
    queries, keys = heads * head_dim, kv_heads * head_dim
    others = (queries + 2 * keys) * sizes.flag(family.qkv_bias)
    others += hidden * sizes.flag(family.o_bias)
    matrices = (
        MatrixGroup("qkv", layers, hidden, queries + 2 * keys),
        MatrixGroup("o", layers, queries, hidden),
    )
    return AttentionPart(
        attention_kind(heads, kv_heads),
        kv_heads,
        head_dim,
        head_dim,
        elements=2 * keys,
        vectors=2 * kv_heads,
        latent_dim=0,
        part=LayerPart(matrices, layers * others),
    )


def latent_attention(sizes: Sizes, layers: int, hidden: int, heads: int) -> AttentionPart:
    """Return MLA (arXiv 2405.04434): K and V of all heads are computed from one latent, which is
    cached with one rotary key. Queries are also compressed, unless q_lora_rank is null
    (DeepSeek-V2-Lite)."""
    fields = sizes.fields
    latent = fields.integer("kv_lora_rank", 1, MAX_WIDTH)
    rope = fields.integer("qk_rope_head_dim", 1, MAX_WIDTH)
    nope = fields.integer("qk_nope_head_dim", 0, MAX_WIDTH)
    v_head_dim = fields.integer("v_head_dim", 1, MAX_WIDTH)
    queries = heads * (nope + rope)
    matrices = [
        MatrixGroup("kv_down", layers, hidden, latent + rope),
        MatrixGroup("kv_up", layers, latent, heads * (nope + v_head_dim)),
        MatrixGroup("o", layers, heads * v_head_dim, hidden),
    ]
    norms, biased = latent, latent + rope + hidden
    if "q_lora_rank" in fields:
        rank = fields.integer("q_lora_rank", 1, MAX_WIDTH)
        matrices.append(MatrixGroup("q_down", layers, hidden, rank))
        matrices.append(MatrixGroup("q_up", layers, rank, queries))
        norms, biased = norms + rank, biased + rank
    else:
        matrices.append(MatrixGroup("q_up", layers, hidden, queries))
    others = norms + biased * sizes.flag("attention_bias")
    return AttentionPart(
        "MLA",
        heads,
        nope + rope,
        v_head_dim,
        elements=latent + rope,
        vectors=1,
        latent_dim=latent,
        part=LayerPart(tuple(matrices), layers * others),
    )


def mlp(sizes: Sizes, layers: int, hidden: int) -> tuple[LayerPart, int]:
    """Return the MLPs of all layers, and the MLP width that one token uses."""
    experts = sizes.family.experts
    if experts is None:
        inner = sizes.integer("intermediate_size", MAX_WIDTH)
        return _dense(sizes, layers, hidden, inner), inner
    # newer versions of transformers may write another family's key
    key = next((key for key in (experts.total, *EXPERT_KEYS) if key in sizes.fields), experts.total)
    total = sizes.integer(key, MAX_EXPERTS)
    first = sizes.family.defaults.get("first_k_dense_replace", 0)
    sparse = sum(sparse_layers(sizes.fields, layers, first))
    routed, width = _routed(sizes, experts, total, sparse, hidden)
    if sparse == layers:
        return routed, width
    inner = sizes.integer("intermediate_size", MAX_WIDTH)
    dense = _dense(sizes, layers - sparse, hidden, inner)
    return LayerPart(dense.matrices + routed.matrices, dense.others + routed.others), width


def _head_dim(sizes: Sizes, hidden: int, heads: int) -> int:
    if "head_dim" in sizes.fields or "head_dim" in sizes.family.defaults:
        return sizes.integer("head_dim", MAX_WIDTH)
    if hidden % heads:
        raise sizes.error(
            "num_attention_heads", f"must divide the hidden size {hidden}, not {heads}"
        )
    return hidden // heads


def _dense(sizes: Sizes, layers: int, hidden: int, inner: int) -> LayerPart:
    ups, up = (2, "gate_up") if sizes.family.gated_mlp else (1, "up")
    matrices = (
        MatrixGroup(up, layers, hidden, ups * inner),
        MatrixGroup("down", layers, inner, hidden),
    )
    biases = (ups * inner + hidden) * sizes.flag(sizes.family.mlp_bias)
    return LayerPart(matrices, layers * biases)


def _routed(
    sizes: Sizes, experts: ExpertFields, total: int, layers: int, hidden: int
) -> tuple[LayerPart, int]:
    """Return the router, the routed experts, and the shared experts as one wide MLP."""
    active = sizes.integer(experts.active, total)
    width = sizes.integer(experts.width, MAX_WIDTH)
    matrices = [
        MatrixGroup("router", layers, hidden, total),
        MatrixGroup("expert_gate_up", layers * total, hidden, 2 * width, total, active),
        MatrixGroup("expert_down", layers * total, width, hidden, total, active),
    ]
    shared = 0
    if experts.shared:
        shared = width * sizes.integer(experts.shared, MAX_EXPERTS, default=0, low=0)
    if shared:
        matrices.append(MatrixGroup("shared_gate_up", layers, hidden, 2 * shared))
        matrices.append(MatrixGroup("shared_down", layers, shared, hidden))
    return LayerPart(tuple(matrices)), active * width + shared


# Method, format or bits in a quantization_config -> the nearest weight format.
STORED: Mapping[str | int, str] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "float-quantized": "fp8",
    "mxfp4": "mxfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "int-quantized": "int8",
    "pack-quantized": "int4",
    4: "int4",
    8: "int8-weight-only",
}
FULL, SLIDING = "full_attention", "sliding_attention"


def uncounted(fields: Fields) -> tuple[str, ...]:
    """Return a note on layers for multi-token prediction, if there are any."""
    extra = fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
    return (f"layers for multi-token prediction are not counted: {extra}",) if extra else ()


def read_decoder(fields: Fields, family: Family, name: str, architecture: str) -> ModelShape:
    """Return the shape of a decoder of a family.

    Raises:
        ModelError: a field that is missing or cannot be.
    """
    sizes = Sizes(fields, family)
    hidden = sizes.integer("hidden_size", MAX_WIDTH)
    layers = sizes.integer("num_hidden_layers", MAX_LAYERS)
    heads = sizes.integer("num_attention_heads", MAX_HEADS)
    vocab = sizes.integer("vocab_size", MAX_VOCAB)
    context = sizes.integer("max_position_embeddings", MAX_POSITIONS)
    tied = fields.boolean("tie_word_embeddings", family.tied)
    dtype, stored, notes = stored_format(fields)
    notes += uncounted(fields)

    of_layers = latent_attention if "kv_lora_rank" in fields else attention
    attending = of_layers(sizes, layers, hidden, heads)
    mlps, width = mlp(sizes, layers, hidden)
    tables = _tables(sizes, vocab, hidden, context, tied)
    parts = (tables, attending.part, mlps)
    norms_of = family.computed.get("norms")
    norms = layers * (norms_of(fields) if norms_of else family.norms)
    norms += 1 + family.embedding_norm
    return ModelShape(
        name=name,
        architecture=architecture,
        attention=attending.kind,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=attending.kv_heads,
        head_dim=attending.head_dim,
        v_head_dim=attending.v_head_dim,
        max_context=context,
        dtype=dtype,
        stored=stored,
        tied=tied,
        matrices=tuple(m for part in parts for m in part.matrices if m.count),
        other_parameters=norms * hidden * family.norm_vectors + sum(p.others for p in parts),
        caches=tuple(
            CacheShape(count, attending.elements, attending.vectors, window)
            for window, count in Counter(_windows(sizes, layers)).items()
        ),
        latent_dim=attending.latent_dim,
        notes=notes,
    )


def stored_format(fields: Fields) -> tuple[str, str, tuple[str, ...]]:
    """Return the dtype of a checkpoint, the nearest weight format, and notes on both."""
    key = "dtype" if "dtype" in fields else "torch_dtype"
    dtype = fields.choice(key, tuple(DTYPE_BYTES), "float32")
    plain = weight_format(dtype)
    if "quantization_config" not in fields:
        return dtype, plain, () if key in fields else (f"no dtype is given: {dtype} taken",)
    config = fields.inside("quantization_config")
    method = config.raw("quant_method")
    # compressed-tensors has one method name for everything; its "format" tells them apart
    for said in (method, config.raw("format"), config.raw("bits")):
        nearest = STORED.get(said) if isinstance(said, str | int) else None
        if nearest == "fp8":
            return dtype, nearest, ()
        if nearest is not None:
            return dtype, nearest, (f"quantised by {shown(method)}: counted as {nearest}",)
    return dtype, plain, (f"quantised by {shown(method)}, which is not known: {plain} taken",)


def _tables(sizes: Sizes, vocab: int, hidden: int, context: int, tied: bool) -> LayerPart:
    """Return the embedding, learned positions and head."""
    family = sizes.family
    matrices = [MatrixGroup("head", 1, hidden, vocab)]
    if not tied:
        matrices.append(MatrixGroup("embedding", 1, hidden, vocab, multiplied=False))
    if family.positions is not None:
        rows = context + family.positions
        matrices.append(MatrixGroup("positions", 1, hidden, rows, multiplied=False))
    return LayerPart(tuple(matrices), 0)


def _windows(sizes: Sizes, layers: int) -> tuple[Window | None, ...]:
    """Return the sliding window of each layer; None: no window."""
    fields, family = sizes.fields, sizes.family
    types = fields.strings("layer_types")
    if types and len(types) != layers:
        raise fields.error("layer_types", f"must have {layers} entries, not {len(types)}")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise fields.error(
                "layer_types", f"must hold {FULL} or {SLIDING}: {shown(kind)} cannot be planned"
            )
    given = "sliding_window" in fields or "sliding_window" in family.defaults
    used = family.windows and given and not fields.is_null("sliding_window")
    window = None
    if used and fields.boolean("use_sliding_window", True):
        window = Window(sizes.integer("sliding_window", MAX_POSITIONS))
    if types:
        return tuple(window if kind == SLIDING else None for kind in types)
    return (window,) * layers
