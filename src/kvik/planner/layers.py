"""What the layers of a decoder are made of: attention, latent attention, dense and routed MLPs."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.errors import ModelError
from kvik.planner.family_table import ExpertFields, Family
from kvik.planner.shape import MatrixGroup
from kvik.spec.experts import EXPERT_KEYS, sparse_layers
from kvik.spec.fields import Fields
from kvik.spec.model import MAX_HEADS, MAX_WIDTH

MAX_EXPERTS = 1 << 14


class Sizes:
    """Sizes of a config.json under its family's names, with its defaults."""

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
        """Return what a row gives as a fact, or as the key that decides."""
        if isinstance(rule, bool):
            return rule
        return self.fields.boolean(rule, bool(self.family.defaults.get(rule, False)))

    def error(self, key: str, message: str) -> ModelError:
        return self.fields.error(self.family.keys.get(key, key), message)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One part of the decoder: its matrices, and how many norm weights and biases it has."""

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
    """Attention over K and V of each KV head."""
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
    """MLA (arXiv 2405.04434): K and V of all heads are made from one latent, which is cached with
    one rotary key. Queries are compressed too, unless q_lora_rank is null (DeepSeek-V2-Lite)."""
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
    """The MLPs of all layers, and the width that one token goes through."""
    experts = sizes.family.experts
    if experts is None:
        inner = sizes.integer("intermediate_size", MAX_WIDTH)
        return _dense(sizes, layers, hidden, inner), inner
    # files written by newer versions of transformers may use another family's key
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
    """Router, routed experts, and those that every token uses as one wide MLP."""
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
