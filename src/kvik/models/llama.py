"""Llama 2, 3 and 3.x (Touvron et al. 2023, Grattafiori et al. 2024).

Many models are this network with another attention, or with other facts in the `ModelFacts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvik.spec.declare import (
    ALL,
    EXPERT_NAMES,
    Architecture,
    ExpertNames,
    FeedForward,
    ForwardContext,
    LayerBuilder,
    Norm,
)
from kvik.spec.layers import (
    sometimes_turned_layers,
    switched_layers,
    windowed_layers,
)
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


class LlamaAttention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions.

    Args:
        o: name of the projection of what the heads give.
    """

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, o: str = "o_proj"
    ) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = builder.heads(
            ("q_proj", "k_proj", "v_proj"),
            spec.hidden_size,
            (heads, kv_heads, kv_heads),
            dim,
            bias=spec.qkv_bias,
            rope=spec.layers[layer].rope,
        )
        self.attend = builder.attention(
            layer,
            dim,
            spec.scales.attention,
            softcap=spec.scales.attention_cap,
            rope=spec.layers[layer].rope,
        )
        self.o = builder.linear(o, heads * dim, spec.hidden_size, bias=spec.o_bias, role="o")
        builder.ignore("rotary_emb.inv_freq")

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


MakeAttention = Callable[[ModelFacts, LayerBuilder, int], AttentionBlock]
MakeFeedForward = Callable[[ModelFacts, LayerBuilder, int], FeedForward]
MakeLayer = Callable[[ModelFacts, LayerBuilder, int], Layer]
MakeNorm = Callable[[ModelFacts, LayerBuilder], Norm]


def feed_forward(
    spec: ModelFacts,
    builder: LayerBuilder,
    layer: int,
    scope: str = "mlp",
    names: ExpertNames = EXPERT_NAMES,
) -> FeedForward:
    """Return the MLP of a layer, or its routed experts.

    Args:
        scope: of either. names: of the experts in it.
    """
    experts, inside = spec.layers[layer].experts, builder.at(scope)
    if experts is not None:
        return inside.experts(spec.hidden_size, experts, names)
    inner = spec.inner(spec.layers[layer])
    return inside.gated_mlp(spec.hidden_size, inner, bias=spec.mlp_bias)


class LlamaLayer:
    """Attention and MLP, or experts; each reads the residual stream normalised and adds to it."""

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        attention: MakeAttention = LlamaAttention,
        feed: MakeFeedForward = feed_forward,
    ) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        norm = builder.rms_norm if spec.rms_norm else builder.layer_norm
        self.attention_norm = norm("input_layernorm", hidden, eps, before="qkv")
        self.attention = attention(spec, builder.at("self_attn"), layer)
        self.mlp_norm = norm("post_attention_layernorm", hidden, eps, before="gate_up")
        self.mlp = feed(spec, builder, layer)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attention(self.attention_norm(x), x, rotation, ctx)
        return self.mlp(self.mlp_norm(x), ctx, x)


class Llama:
    """The language model.

    Args:
        make_layer: makes a layer in the scope of its names.
        make_norm: makes the norm behind the last layer; None: as the model's others are.
        scopes: of all but the head; the first that a checkpoint has.
        names: of the embedding, the layers, the last norm and the head.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        make_layer: MakeLayer = LlamaLayer,
        make_norm: MakeNorm | None = None,
        scopes: tuple[str, ...] = ("model", ""),
        names: tuple[str, str, str, str] = ("embed_tokens", "layers", "norm", "lm_head"),
    ) -> None:
        embed, layers, last, head = names
        trunk = builder.at(*scopes)
        self.embed = trunk.token_embedding(
            embed,
            spec.vocab_size,
            spec.hidden_size,
            tied=spec.tie_word_embeddings,
            scale=spec.scales.embedding,
        )
        self.ropes = [builder.rope(rope, width) for rope, width in spec.rotations]
        pairs = [spec.rotation(layer) for layer in spec.layers]
        self.turned = [None if pair is None else spec.rotations.index(pair) for pair in pairs]
        self.layers = [
            make_layer(spec, trunk.at(layers).at(layer), layer) for layer in range(spec.num_layers)
        ]
        if make_norm is not None:
            self.norm = make_norm(spec, trunk)
        else:
            norm = trunk.rms_norm if spec.rms_norm else trunk.layer_norm
            self.norm = norm(last, spec.hidden_size, spec.norm_eps, scale=spec.scales.logits)
        self.lm_head = builder.lm_head(
            head, self.embed, bias=spec.head_bias, softcap=spec.scales.logits_cap
        )

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> hidden [tokens, hidden]."""
        return self.leave(self.blocks(self.enter(ids, ctx), ctx))

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        return self.embed(ids)

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> None:
        """Layers read nothing of tokens alone."""

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same behind the last layer."""
        rotations = [rope.at(ctx.positions) for rope in self.ropes]
        for layer, rope in zip(self.layers[span], self.turned[span], strict=True):
            x = layer(x, None if rope is None else rotations[rope], ctx)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] behind the last layer -> normalised."""
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32."""
        return self.lm_head(hidden)


def beside_images(
    spec: ModelFacts,
    builder: LayerBuilder,
    make_layer: MakeLayer = LlamaLayer,
    make_norm: MakeNorm | None = None,
) -> Llama:
    """Return the text model of a checkpoint that reads images too."""
    for scope in ("vision_tower", "vision_model", "multi_modal_projector", "visual"):
        builder.skip(scope, f"model.{scope}")
    inner = builder.at("language_model", "")
    return Llama(spec, inner, make_layer, make_norm, ("model.language_model", "model"))


LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    "Llama 2, 3 and 3.x, and models of the same form",
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
# Ministral 3 (Mistral AI 2025): long contexts make queries larger, by their positions.
MINISTRAL3 = Architecture(
    "Ministral3ForCausalLM",
    "ministral3",
    "Ministral 3, those of text alone",
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
# Mistral Small 3.1 and later and Ministral 3 read images too, of which kvik runs the text model.
MISTRAL3_IMAGES = replace(
    MINISTRAL3,
    name="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    models="Mistral Small 3 and Ministral 3, text of those that read images",
    make=beside_images,
    inside="text_config",
)
# Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v; some layers may see a window.
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
    builder.skip("model.mtp_layers")  # which predict further tokens
    return Llama(spec, builder)


# MiMo (Xiaomi 2025, arXiv 2505.07608).
MIMO = replace(
    QWEN2, name="MiMoForCausalLM", model_type="mimo", models="MiMo 7B", make=mimo, gguf=None
)
# SmolLM3 (Bakouch et al. 2025): every fourth layer knows no positions (NoPE).
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
