"""Gemma 4 (Google DeepMind 2026): layers of two shapes.

Layers with a window have smaller heads than the others, which rotate only a part of each head.
Heads of q, k and v are normalised, and scores are not scaled. The last layers may read the keys and
values of earlier ones; layers without a window may have no value projection; each layer may read
its own vector of each token; and some models have routed experts in addition to the MLP.

Published models come with an assistant, which drafts their next tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.decoder import Decoder
from kvik.models.gemma import GEGLU, GGUF_NAMES, gemma_scales, softcap
from kvik.spec.architecture import Architecture, gguf_experts
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import SWITCH, ExpertsSpec, Router, expert_count
from kvik.spec.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_VOCAB, MAX_WIDTH, Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, layer_types, read_window
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import ForwardContext
from kvik.spec.rope import RopeSpec, read_rope

if TYPE_CHECKING:
    from torch import Tensor

CAP = "final_logit_softcapping"
ASSISTANT = "assistant"  # wiring of a small model that drafts; also the method that uses it
NAMES = ExpertNames(router="router.proj", scales="router.per_expert_scale")


class Gemma4Attention:
    """Grouped-query attention with RMSNorm on each head of q, k and v, over its own keys and values
    or an earlier layer's."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        facts, hidden = spec.layers[layer], spec.hidden_size
        kv_heads, dim = spec.heads(facts)
        counts = (spec.num_heads, kv_heads, kv_heads)
        norm = partial(builder.rms_norm, dim=dim, eps=spec.norm_eps)
        q_norm, k_norm, self.v_norm = norm("q_norm"), None, None
        names: tuple[str, ...] = ("q_proj",)
        if facts.kv_from is None:
            names = ("q_proj", "k_proj") if facts.value_is_key else ("q_proj", "k_proj", "v_proj")
            k_norm, self.v_norm = norm("k_norm"), builder.plain_norm(dim, spec.norm_eps)
        else:  # some checkpoints have the unused projections
            builder.ignore("k_norm.weight")
            builder.ignore(*(f"{kv}_proj.{part}" for kv in "kv" for part in ("weight", "bias")))
        self.heads = builder.heads(names, hidden, counts[: len(names)], dim, bias=spec.qkv_bias)
        norms = (q_norm, k_norm)
        self.attend = builder.attention(layer, facts, dim, 1.0, norms)
        self.o = builder.linear("o_proj", spec.num_heads * dim, hidden, bias=spec.o_bias, role="o")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """x [tokens, hidden], rotation [tokens, head_dim] -> [tokens, hidden]."""
        q, *kv = self.heads(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        if self.v_norm is None:
            return self.o(self.attend(q, None, None, ctx, rotation), ctx)
        return self.o(self.attend(q, kv[0], self.v_norm(kv[-1]), ctx, rotation), ctx)


class Gemma4FeedForward:
    """An MLP and, in some layers, routed experts in parallel; the output of each is normalised, and
    so is their sum. The router reads the residual stream through a separate norm."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        facts, hidden, eps = spec.layers[layer], spec.hidden_size, spec.norm_eps
        norm = partial(builder.rms_norm, dim=hidden, eps=eps)
        self.mlp_norm = norm("pre_feedforward_layernorm", before="gate_up")
        mlp = builder.at("mlp")
        self.mlp = mlp.gated_mlp(hidden, spec.inner(facts), bias=False, activation=GEGLU)
        self.experts = None
        if facts.experts is not None:
            self.fed_norm = norm("post_feedforward_layernorm_1")
            self.router_norm = norm("router", scale=hidden**-0.5, tensor="scale", before="router")
            self.experts_norm = norm("pre_feedforward_layernorm_2", before="expert_gate_up")
            self.experts = builder.experts(
                hidden, facts.experts, NAMES, activation="gelu_tanh_and_mul"
            )
            self.routed_norm = norm("post_feedforward_layernorm_2")
        self.norm = norm("post_feedforward_layernorm")

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Add the normalised output to the residual stream x [tokens, hidden]."""
        fed = self.mlp(self.mlp_norm(x), ctx)
        if self.experts is not None:
            routed = self.experts(self.experts_norm(x), ctx, routed_by=self.router_norm(x))
            fed = self.routed_norm.add(routed, self.fed_norm(fed))
        return self.norm.add(fed, x)


class OwnInput:
    """Projects a layer's own input of each token, gated by the residual stream, and has the norm of
    the result."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, width = spec.hidden_size, spec.layers[layer].token_input
        self.layer = layer
        self.gate = builder.linear(
            "per_layer_input_gate", hidden, width, bias=False, activation="gelu_tanh"
        )
        self.gated = builder.gated()
        self.project = builder.linear("per_layer_projection", width, hidden, bias=False)
        self.norm = builder.rms_norm("post_per_layer_input_norm", hidden, spec.norm_eps)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [tokens, hidden] -> what `norm` reads, [tokens, hidden]."""
        assert ctx.token_inputs is not None
        gated = self.gated(self.gate(x, ctx), ctx.token_inputs[:, self.layer])
        return self.project(gated, ctx)


class Gemma4Layer:
    """Attention, the feed-forward part, and the layer's own input of each token; the result is
    multiplied by a learned scalar."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        norm = partial(builder.rms_norm, dim=spec.hidden_size, eps=spec.norm_eps)
        self.attention_norm = norm("input_layernorm", before="qkv")
        self.attention = Gemma4Attention(spec, builder.at("self_attn"), layer)
        self.attended_norm = norm("post_attention_layernorm")
        self.feed = Gemma4FeedForward(spec, builder, layer)
        has_input = spec.layers[layer].token_input > 0
        self.own = OwnInput(spec, builder, layer) if has_input else None
        self.scale = builder.learned_scale("layer_scalar")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        x = self.attended_norm.add(self.attention(self.attention_norm(x), rotation, ctx), x)
        x = self.feed(x, ctx)
        if self.own is not None:
            x = self.own.norm.add(self.own(x, ctx), x)
        return self.scale(x)


class TokenInputs:
    """Computes each layer's own input of a token, from its id and from its embedding."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        width, hidden = spec.layers[0].token_input, spec.hidden_size
        self.sizes = spec.num_layers, width
        total, half = spec.num_layers * width, 0.5**0.5  # so that the sum is as large as its parts
        self.table = builder.token_inputs(
            "embed_tokens_per_layer",
            spec.vocab_size,
            total,
            scale=math.sqrt(width) * half,
            rows=spec.layers[0].input_tokens,
        )
        self.project = builder.linear("per_layer_model_projection", hidden, total, bias=False)
        # The embedding is divided by sqrt(hidden) before the projection; eps accounts for that.
        eps = spec.norm_eps * hidden
        self.norm = builder.rms_norm("per_layer_projection_norm", width, eps, scale=half)

    def __call__(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens], x [tokens, hidden], their embeddings -> [tokens, layers, width]."""
        projected = self.project(x, ctx).view(-1, *self.sizes)
        return self.norm.add(projected, self.table(ids)).view(-1, *self.sizes)


class Gemma4(Decoder):
    """The language model; image and audio encoders are not read."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        super().__init__(spec, builder, Gemma4Layer)
        self.inputs = None
        if spec.layers[0].token_input:
            self.inputs = TokenInputs(spec, builder.at("model"))

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        """ids [tokens], x [tokens, hidden], their embeddings -> [tokens, layers, width]."""
        return None if self.inputs is None else self.inputs(ids, x, ctx)


class Gemma4Assistant(Decoder):
    """A small model that drafts the next tokens of another Gemma 4, whose keys and values it reads:
    each layer has only queries, for those of the model's last layer of its kind.

    A forward reads the model's embedding of a token, and from `hidden` the hidden state before it,
    which is the model's or a projection of its own. All drafts of a proposal are at the position of
    the newest token, so they see the same keys.

    The published small ones may choose likely tokens by clusters, to read fewer rows of the output
    matrix; here all rows are read.
    """

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        """
        Args:
            spec: its `embedding_size` is the width of the model.
        """
        hidden, width = spec.hidden_size, spec.embedding_size
        self.joined = builder.joined()
        self.join = builder.linear("pre_projection", 2 * width, hidden, bias=False)
        self.project = builder.linear("post_projection", hidden, width, bias=False)
        builder.skip("masked_embedding")
        scales = replace(spec.scales, logits_cap=None)
        spec = replace(spec, embedding_size=hidden, scales=scales)
        super().__init__(spec, builder, Gemma4Layer, scopes=("model",))
        # [most tokens of a step, width], which the worker allocates.
        self.hidden: Tensor | None = None
        # ids [rows] -> [rows, width], of the model.
        self.embed_target: Callable[[Tensor], Tensor] | None = None

    def onward(self, hidden: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Its hidden [rows, hidden] -> what its next forward reads, [rows, width]."""
        return self.project(hidden)

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [rows] -> [rows, hidden]."""
        assert self.hidden is not None and self.embed_target is not None
        return self.join(self.joined(self.embed_target(ids), self.hidden[: len(ids)]), ctx)


def gemma4(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    return (Gemma4Assistant if spec.wiring == ASSISTANT else Gemma4)(spec, builder)


def gemma4_scales(fields: Fields) -> ModelScales:
    return replace(gemma_scales(fields), logits_cap=softcap(fields, CAP))


def gemma4_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with a window and without, by `layer_types`; the last layer has none."""
    if fields.raw("use_bidirectional_attention") not in (None, False, "vision"):
        raise fields.error("use_bidirectional_attention", 'must be null or "vision"')
    token_inputs = fields.integer("vocab_size_per_layer_input", 0, MAX_VOCAB, 1)
    if _token_input(fields) and token_inputs not in (1, fields.integer("vocab_size", 1, MAX_VOCAB)):
        raise fields.error("vocab_size_per_layer_input", "must be vocab_size")
    types = (*layer_types(fields, layers, every=6)[:-1], FULL)
    owners = kv_owners(fields, types)
    wide = fields.boolean("use_double_wide_mlp", False)
    inner = fields.integer("intermediate_size", 1, MAX_WIDTH)
    dense_inner = inner if fields.boolean(SWITCH, False) else None
    kinds, heads = _kinds(fields, positions), _own_heads(fields, layers)
    specs = []
    for layer, kind in enumerate(types):
        facts = replace(kinds[kind], inner=dense_inner)
        if layer in heads:
            head_dim, kv_heads = heads[layer]
            facts = replace(facts, head_dim=head_dim, kv_heads=kv_heads)
        if owners[layer] is not None:
            facts = replace(facts, kv_from=owners[layer], inner=2 * inner if wide else dense_inner)
        specs.append(facts)
    return tuple(specs)


def kv_owners(fields: Fields, types: Sequence[str]) -> tuple[int | None, ...]:
    """Return the layer whose keys and values each layer reads; None: it has its own. The last
    `num_kv_shared_layers` layers read those of the last earlier layer of their kind."""
    layers = len(types)
    num_with_kv = layers - fields.integer("num_kv_shared_layers", 0, layers - 1, 0)
    last = {kind: layer for layer, kind in enumerate(types[:num_with_kv])}
    for kind in types[num_with_kv:]:
        if kind not in last:
            message = f"must leave a layer of kind {kind} before those that read its keys"
            raise fields.error("num_kv_shared_layers", message)
    return (*[None] * num_with_kv, *(last[kind] for kind in types[num_with_kv:]))


def _kinds(fields: Fields, positions: int) -> dict[str, LayerSpec]:
    """Return a layer of each kind."""
    token_input = _token_input(fields)
    default = {
        SLIDING: RopeSpec(theta=1e4, original_max_position=positions),
        FULL: RopeSpec("proportional", 1e6, original_max_position=positions, fraction=0.25),
    }
    ropes = default
    if fields.mapping("rope_parameters") is not None:
        ropes = {kind: read_rope(fields, positions, layer_type=kind) for kind in default}
    value_is_key = fields.boolean("attention_k_eq_v", False)
    windowed = LayerSpec(read_window(fields), ropes[SLIDING], token_input=token_input)
    full = LayerSpec(None, ropes[FULL], value_is_key=value_is_key, token_input=token_input)
    if "per_layer_config" not in fields:  # in older files heads depend on the kind of the layer
        kv_heads = "num_global_key_value_heads"
        if value_is_key and kv_heads in fields and not fields.is_null(kv_heads):
            full = replace(full, kv_heads=_kv_heads(fields, fields, kv_heads))
        full = replace(full, head_dim=_head_dim(fields, "global_head_dim", 512))
    return {SLIDING: windowed, FULL: full}


def _token_input(fields: Fields) -> int:
    return fields.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, 256)


def _own_heads(fields: Fields, layers: int) -> dict[int, tuple[int | None, int | None]]:
    """Return the `head_dim` and `kv_heads` of `LayerSpec` that newer files give for some layers, by
    number."""
    heads: dict[int, tuple[int | None, int | None]] = {}
    per_layer = fields.inside("per_layer_config")
    for name in fields.mapping("per_layer_config") or ():
        if not name.isdecimal() or int(name) >= layers:
            message = f"must have numbers of layers up to {layers - 1}, not {shown(name)}"
            raise fields.error("per_layer_config", message)
        layer_fields = per_layer.inside(name)
        for key in per_layer.mapping(name) or ():
            if key not in ("head_dim", "num_key_value_heads"):
                raise layer_fields.error(key, "must not differ from other layers")
        heads[int(name)] = (
            _head_dim(layer_fields, "head_dim") if "head_dim" in layer_fields else None,
            _kv_heads(fields, layer_fields, "num_key_value_heads")
            if "num_key_value_heads" in layer_fields
            else None,
        )
    return heads


def _head_dim(fields: Fields, key: str, default: int | None = None) -> int:
    size = fields.integer(key, 2, MAX_HEAD_DIM, default)
    if size % 2:
        raise fields.error(key, f"must be even, not {size}")
    return size


def _kv_heads(fields: Fields, layer_fields: Fields, key: str) -> int:
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = layer_fields.integer(key, 1, MAX_HEADS)
    if heads % kv_heads:
        raise layer_fields.error(key, f"must divide num_attention_heads ({heads}), not {kv_heads}")
    return kv_heads


def gemma4_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """All layers have experts, or none has."""
    if not fields.boolean(SWITCH, False):
        return (None,) * layers
    count = expert_count(fields)
    router = Router(count, fields.integer("top_k_experts", 1, count), scaled=True)
    return (ExpertsSpec(router, fields.integer("moe_intermediate_size", 1, MAX_WIDTH)),) * layers


FILE_NAMES = GGUF_NAMES | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    **gguf_experts("", NAMES),
    "ffn_gate_inp.scale.": "router.scale",
    "ffn_down_exps.scale.": NAMES.scales,
    "ffn_gate_up_exps": "experts.{}.gate_up_proj",
}


def gemma4_implied(fields: Fields) -> dict[str, object]:
    """Return the facts that GGUF files imply."""
    is_stored = CAP in fields or fields.is_null(CAP)
    return {"attention_bias": False, **({} if is_stored else {CAP: 30.0})}


GEMMA4 = Architecture(
    "Gemma4ForCausalLM",
    "gemma4_text",
    "Gemma 4, text-only models",
    gemma4,
    layers=gemma4_layers,
    experts=gemma4_experts,
    optional_experts=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    value_norm=True,
    activations=("gelu_pytorch_tanh",),
    scales=gemma4_scales,
    tied=True,
    head_dim=256,
    eos_token_ids=(1,),
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        CAP: None,
        SWITCH: False,
    },
    keys={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    gguf="gemma4",
    gguf_names=FILE_NAMES,
    gguf_by_kind=True,
    gguf_characters="gemma4",
    gguf_scales=(CAP,),
    gguf_implied=gemma4_implied,
    gguf_extra=lambda spec: {CAP: spec.scales.logits_cap or 0.0},
)
# As published, with image encoders and, for the small ones, audio encoders.
# The 12B, which reads patches of images and frames of sound without encoders.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    models="Gemma 4 12B, text part alone",
    experts=None,
    optional_experts=False,
    defaults={
        **GEMMA4.defaults,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)
