"""Llama 2, 3 and 3.x (Touvron et al. 2023, Grattafiori et al. 2024), and the parts of most
decoders: grouped-query attention, an MLP or experts, and layers that combine them.

Many models are this network with other names, another attention or other `ModelFacts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvik.spec.declare import (
    ALL,
    EXPERT_NAMES,
    GATE_UP,
    Architecture,
    ExpertNames,
    FeedForward,
    ForwardContext,
    LayerBuilder,
    LinearLayer,
    Norm,
    PositionTable,
    Role,
)
from kvik.spec.layers import (
    sometimes_turned_layers,
    switched_layers,
    windowed_layers,
)
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

QKV = ("q_proj", "k_proj", "v_proj")


class LlamaAttention:
    """Grouped-query attention (Ainslie et al. 2023), with rotary positions or none.

    Args:
        scope: of its names.
        qkv: names of the projections of queries, keys and values, or of one for all three.
        o: name of the output projection.
        norms: names of the RMSNorm on each head of q and of k, before the rotation; (): none.
        offset: of the norms' gains.
        by_head: as in `LayerBuilder.heads`.
        sinks: each head has a learned score in the softmax without a key or value.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        scope: str = "self_attn",
        qkv: tuple[str, ...] = QKV,
        o: str = "o_proj",
        norms: tuple[str, ...] = (),
        offset: float = 0.0,
        by_head: bool = False,
        sinks: bool = False,
    ) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        hidden, facts, inner = spec.hidden_size, spec.layers[layer], builder.at(scope)
        counts = (heads, kv_heads, kv_heads)
        self.qkv = inner.heads(
            qkv, hidden, counts, dim, bias=spec.qkv_bias, rope=facts.rope, by_head=by_head
        )
        norm = partial(inner.rms_norm, dim=dim, eps=spec.norm_eps, offset=offset, rope=facts.rope)
        self.attend = inner.attention(
            layer,
            dim,
            spec.scales.attention,
            norms=(norm(norms[0]), norm(norms[1])) if norms else None,
            softcap=spec.scales.attention_cap,
            sinks=heads if sinks else 0,
            rope=facts.rope,
            bidirectional=facts.bidirectional,
        )
        self.o = inner.linear(o, heads * dim, hidden, bias=spec.o_bias, role="o")
        # Some old checkpoints contain frequencies and causal masks.
        inner.ignore("rotary_emb.inv_freq", "bias", "masked_bias")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] or None -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        return self.o(self.attend(q, k, v, ctx, rotation), ctx, residual)


class AttentionBlock(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] or None -> [tokens, hidden]."""
        ...


class Layer(Protocol):
    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        ...


# Each makes a part of the model in the scope of the builder.
MakeAttention = Callable[[ModelFacts, LayerBuilder, int], AttentionBlock]
MakeFeedForward = Callable[[ModelFacts, LayerBuilder, int], FeedForward]
MakeLayer = Callable[[ModelFacts, LayerBuilder, int], Layer]
MakeNorm = Callable[[ModelFacts, LayerBuilder], Norm]
MakePositions = Callable[[ModelFacts, LayerBuilder], PositionTable]


def feed_forward(
    spec: ModelFacts,
    builder: LayerBuilder,
    layer: int,
    scope: str = "mlp",
    names: ExpertNames = EXPERT_NAMES,
    gate_up: tuple[str, ...] = GATE_UP,
    down: str = "down_proj",
    activation: str = "silu_and_mul",
) -> FeedForward:
    """Return the MLP of a layer, or its routed experts.

    Args:
        scope: of the MLP or the experts.
        names: of the experts in it.
        gate_up, down, activation: of the MLP, as in `LayerBuilder.gated_mlp`.
    """
    experts, inside = spec.layers[layer].experts, builder.at(scope)
    if experts is not None:
        return inside.experts(spec.hidden_size, experts, names)
    inner, bias = spec.inner(spec.layers[layer]), spec.mlp_bias
    return inside.gated_mlp(
        spec.hidden_size, inner, bias=bias, names=gate_up, down=down, activation=activation
    )


def plain_mlp(
    spec: ModelFacts, builder: LayerBuilder, layer: int, up: str, down: str, scope: str = "mlp"
) -> FeedForward:
    """Return an MLP without a gate, by the names of its matrices and their scope."""
    hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    return builder.at(scope).mlp(up, down, hidden, inner, bias=bias, activation=spec.activation)


def layer_norms(
    spec: ModelFacts, builder: LayerBuilder, offset: float = 0.0
) -> Callable[..., Norm]:
    """Return a function that makes norms of the model's kind over the residual stream, by name."""
    make = builder.rms_norm if spec.rms_norm else builder.layer_norm
    return partial(make, dim=spec.hidden_size, eps=spec.norm_eps, offset=offset)


def first_of_mlp(spec: ModelFacts) -> Role:
    """Return the role of the matrices that read the input of an MLP."""
    return "gate_up" if spec.gated_mlp else "up"


class LlamaLayer:
    """Attention, then MLP or experts; each reads the normalised residual stream and adds to it.

    Args:
        norms: names of the norms before each.
        offset: of the norms' gains.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        attention: MakeAttention = LlamaAttention,
        feed: MakeFeedForward = feed_forward,
        norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
        offset: float = 0.0,
    ) -> None:
        norm = layer_norms(spec, builder, offset)
        self.attention_norm = norm(norms[0], before="qkv")
        self.attention = attention(spec, builder, layer)
        self.mlp_norm = norm(norms[1], before=first_of_mlp(spec))
        self.mlp = feed(spec, builder, layer)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attention(self.attention_norm(x), x, rotation, ctx)
        return self.mlp(self.mlp_norm(x), ctx, x)


class ParallelLayer:
    """Attention and MLP in parallel; both read the residual stream, normalised by LayerNorm, and
    add to it.

    Args:
        norms: names of one norm for both, or of one for each.
        norm_bias: norms have a bias.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        attention: MakeAttention = LlamaAttention,
        feed: MakeFeedForward = feed_forward,
        norms: tuple[str, ...] = ("input_layernorm",),
        norm_bias: bool = True,
    ) -> None:
        norm = partial(builder.layer_norm, dim=spec.hidden_size, eps=spec.norm_eps, bias=norm_bias)
        if len(norms) == 1:
            self.attention_norm = self.mlp_norm = norm(norms[0])
        else:
            self.attention_norm = norm(norms[0], before="qkv")
            self.mlp_norm = norm(norms[1], before=first_of_mlp(spec))
        self.attention = attention(spec, builder, layer)
        self.mlp = feed(spec, builder, layer)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        normed = self.attention_norm(x)
        fed = normed if self.mlp_norm is self.attention_norm else self.mlp_norm(x)
        return self.mlp(fed, ctx, self.attention(normed, x, rotation, ctx))


class SandwichLayer:
    """Attention, then MLP; each reads the normalised residual stream, and its output is normalised
    and added to the stream.

    Args:
        norms: names of the norms before and after attention, and before and after the MLP.
        offset: of the norms' gains.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        attention: MakeAttention = LlamaAttention,
        feed: MakeFeedForward = feed_forward,
        norms: tuple[str, str, str, str] = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        offset: float = 0.0,
    ) -> None:
        norm = layer_norms(spec, builder, offset)
        self.attention_norm = norm(norms[0], before="qkv")
        self.attention = attention(spec, builder, layer)
        self.attended_norm = norm(norms[1])
        self.mlp_norm = norm(norms[2], before=first_of_mlp(spec))
        self.mlp = feed(spec, builder, layer)
        self.fed_norm = norm(norms[3])

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attended_norm.add(self.attention(self.attention_norm(x), None, rotation, ctx), x)
        return self.fed_norm.add(self.mlp(self.mlp_norm(x), ctx), x)


class Llama:
    """The language model.

    Args:
        make_layer: makes a layer in the scope of its names.
        make_norm: makes the norm after the last layer; None: like the model's other norms.
        scopes: of all but the head; the first one in the checkpoint is taken.
        names: of the embedding, the layers, the last norm and the head; "": no such norm or head.
        make_positions: makes the table of learned positions; None: none.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        make_layer: MakeLayer = LlamaLayer,
        make_norm: MakeNorm | None = None,
        scopes: tuple[str, ...] = ("model", ""),
        names: tuple[str, str, str, str] = ("embed_tokens", "layers", "norm", "lm_head"),
        make_positions: MakePositions | None = None,
    ) -> None:
        embed, layers, last, head = names
        trunk = builder.at(*scopes)
        self.embed = trunk.token_embedding(
            embed,
            spec.vocab_size,
            spec.embedding_size,
            tied=spec.tie_word_embeddings and head != "",
            scale=spec.scales.embedding,
        )
        self.positions = None if make_positions is None else make_positions(spec, trunk)
        self.ropes = [builder.rope(rope, width) for rope, width in spec.rotations]
        pairs = [spec.rotation(layer) for layer in spec.layers]
        self.turned = [None if pair is None else spec.rotations.index(pair) for pair in pairs]
        self.layers = [
            make_layer(spec, trunk.at(layers).at(layer), layer) for layer in range(spec.num_layers)
        ]
        self.norm: Norm | None = None
        if make_norm is not None:
            self.norm = make_norm(spec, trunk)
        elif last:
            norm = trunk.rms_norm if spec.rms_norm else trunk.layer_norm
            self.norm = norm(last, spec.hidden_size, spec.norm_eps, scale=spec.scales.logits)
        self.lm_head: LinearLayer | None = None
        if head:
            self.lm_head = builder.lm_head(
                head, self.embed, bias=spec.head_bias, softcap=spec.scales.logits_cap
            )

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> hidden [tokens, hidden]."""
        x = self.enter(ids, ctx)
        inputs = self.token_inputs(ids, x, ctx)
        return self.leave(
            self.blocks(x, ctx if inputs is None else replace(ctx, token_inputs=inputs))
        )

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        x = self.embed(ids)
        return x if self.positions is None else self.positions.add(ctx.positions, x)

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        """Return additional inputs of the layers, computed from token ids; here None."""
        return None

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same after the last layer."""
        rotations = [rope.at(ctx.positions) for rope in self.ropes]
        for layer, rope in zip(self.layers[span], self.turned[span], strict=True):
            x = layer(x, None if rope is None else rotations[rope], ctx)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] after the last layer -> normalised, if there is a norm."""
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32; an encoder has none."""
        assert self.lm_head is not None
        return self.lm_head(hidden)


def beside_images(
    spec: ModelFacts,
    builder: LayerBuilder,
    make_layer: MakeLayer = LlamaLayer,
    make_norm: MakeNorm | None = None,
) -> Llama:
    """Return the text model of a checkpoint that also reads images."""
    for scope in ("vision_tower", "vision_model", "multi_modal_projector", "visual"):
        builder.skip(scope, f"model.{scope}")
    inner = builder.at("language_model", "")
    return Llama(spec, inner, make_layer, make_norm, ("model.language_model", "model"))


MAX_PREDICTORS = 8  # multi-token-prediction layers after the last one


def beside_predictors(spec: ModelFacts, builder: LayerBuilder, make_layer: MakeLayer) -> Llama:
    """Return the model of a checkpoint with multi-token-prediction layers, which are skipped."""
    for layer in range(spec.num_layers, spec.num_layers + MAX_PREDICTORS):
        builder.skip(f"model.layers.{layer}")
    return Llama(spec, builder, make_layer)


LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    "Llama 2, 3 and 3.x, and models of the same architecture",
    Llama,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    eos_token_ids=(2,),
    gguf="llama",
    gguf_pairs=True,
)
# Mistral (Jiang et al. 2023): layers attend to a sliding window of keys (section 2).
MISTRAL = Architecture(
    "MistralForCausalLM",
    "mistral",
    "Mistral 7B and its kin",
    Llama,
    layers=windowed_layers,
    eos_token_ids=(2,),
    gguf="llama",
    gguf_told=("attention.sliding_window", 1),
    gguf_pairs=True,
)
# Ministral 3 (Mistral AI 2025): in long contexts, queries are scaled up by their positions.
MINISTRAL3 = Architecture(
    "Ministral3ForCausalLM",
    "ministral3",
    "Ministral 3, text-only models",
    Llama,
    layers=partial(windowed_layers, scaled_queries=True),
    head_dim=128,
    eos_token_ids=(2,),
    gguf="mistral3",
    gguf_pairs=True,
    gguf_log_scale=1.0,
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
# Mistral Small 3.1 and later and Ministral 3 also read images; kvik runs their text model.
MISTRAL3_IMAGES = replace(
    MINISTRAL3,
    name="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    models="Mistral Small 3 and Ministral 3, text part of models that read images",
    make=beside_images,
    inside="text_config",
)
# Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v; some layers may have a window.
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    "Qwen 2 and 2.5",
    Llama,
    qkv_bias=True,
    layers=switched_layers,
    gguf="qwen2",
)


def mimo(spec: ModelFacts, builder: LayerBuilder) -> Llama:
    builder.skip("model.mtp_layers")  # multi-token prediction
    return Llama(spec, builder)


# MiMo (Xiaomi 2025, arXiv 2505.07608).
MIMO = replace(
    QWEN2, name="MiMoForCausalLM", model_type="mimo", models="MiMo 7B", make=mimo, gguf=None
)
# SmolLM3 (Bakouch et al. 2025): every fourth layer has no positions (NoPE).
SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM",
    "smollm3",
    "SmolLM3",
    Llama,
    layers=sometimes_turned_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    tied=True,
    eos_token_ids=(128001,),
    gguf="smollm3",
    gguf_pairs=True,
)
# Seed-OSS (ByteDance 2025).
SEED_OSS = Architecture(
    "SeedOssForCausalLM",
    "seed_oss",
    "Seed-OSS",
    Llama,
    defaults={"attention_bias": True},
    qkv_bias="attention_bias",
    o_bias="attention_out_bias",
    mlp_bias="mlp_bias",
    head_dim=128,
    eos_token_ids=(2,),
    gguf="seed_oss",
    gguf_names={"post_attention_norm": "post_attention_layernorm"},
)
