"""LongCat-Flash (Meituan 2025, arXiv 2509.01322): latent attention and an MLP, twice in each of its
blocks; between them a shortcut leads past the second pair, through experts of which some return
their input. Here each pair is a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.decoder import Decoder, layer_norms
from kvik.models.deepseek import DeepseekAttention
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import MAX_EXPERTS, ExpertsSpec, Router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, latent_layers
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext

if TYPE_CHECKING:
    from torch import Tensor

PAIRS = 2  # of attention and an MLP in a block
NAMES = ExpertNames(router="router.classifier", correction="router.e_score_correction_bias")
ZERO, ZERO_KIND = "zero_expert_num", "zero_expert_type"


class LongcatLayer:
    """Latent attention, then an MLP; each reads the normalised residual stream and adds to it. The
    experts of a block read what the first MLP does, and their output is added after the second."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        facts, hidden, half = spec.layers[layer], spec.hidden_size, layer % PAIRS
        latent, experts, norm = facts.latent, facts.experts, layer_norms(spec, builder)
        assert latent is not None and latent.q_rank is not None
        self.norms = (
            norm(f"input_layernorm.{half}"),
            norm(f"post_attention_layernorm.{half}", before="" if experts else "gate_up"),
        )
        factors = (hidden / latent.q_rank) ** 0.5, (hidden / latent.rank) ** 0.5
        scope = f"self_attn.{half}"
        self.attention = DeepseekAttention(spec, builder, layer, scope=scope, factors=factors)
        self.mlp = builder.at(f"mlps.{half}").gated_mlp(hidden, spec.inner(facts), bias=False)
        self.add, self.experts = builder.scaled_sum(1.0), None
        if experts is not None:
            inside = builder.at("mlp")
            self.experts = inside.experts(hidden, experts, NAMES)
            # transformers also stores matrices of experts that return their input.
            first = experts.router.experts
            inside.skip(*(f"experts.{first + i}" for i in range(experts.router.zero)))

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attention_norm, mlp_norm = self.norms
        x = self.attention(attention_norm(x), x, rotation, ctx)
        normed = mlp_norm(x)
        if self.experts is not None:
            ctx.waiting.append(self.experts(normed, ctx))
            return self.mlp(normed, ctx, x)
        return self.add(ctx.waiting.pop(), self.mlp(normed, ctx, x))


def longcat(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    """Return the language model; what predicts several tokens is not read."""
    builder.at("model").skip("mtp")
    return Decoder(spec, builder, LongcatLayer, halves=PAIRS)


def longcat_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer has latent attention over all tokens."""
    if fields.is_null("q_lora_rank"):
        raise fields.error("q_lora_rank", "must be a number: queries have narrow vectors")
    layer, *_ = latent_layers(fields, 1, positions)
    return (replace(layer, shortcut=True), layer) * layers


def longcat_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Every other layer has experts."""
    fields.choice(ZERO_KIND, ("identity",), "identity")
    read = read_experts(
        fields, layers, inner="expert_ffn_hidden_size", active="moe_topk", router=longcat_router
    )
    return tuple(experts for block in read for experts in (block, None))


def longcat_router(fields: Fields, experts: int, active: int) -> Router:
    """Return a router of softmax scores with a correction, also of experts that return their
    input."""
    zero = fields.integer(ZERO, 0, MAX_EXPERTS, 256)
    if experts + zero > MAX_EXPERTS:
        reason = f"must be at most {MAX_EXPERTS} with the {experts} others, not {shown(zero)}"
        raise fields.error(ZERO, reason)
    return Router(
        experts,
        active,
        corrected=True,
        normalised=False,
        scale=fields.number("routed_scaling_factor", 0.0, 1e6, 6.0),
        zero=zero,
    )


LONGCAT = Architecture(
    "LongcatFlashForCausalLM",
    "longcat_flash",
    "LongCat-Flash",
    longcat,
    layers=longcat_layers,
    experts=longcat_experts,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    eos_token_ids=(2,),
    keys={"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"},
    fixed={
        **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
        **{"router_bias": False, "norm_topk_prob": False},
    },
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 6144,
        "num_layers": 28,
        "num_attention_heads": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "ffn_hidden_size": 12_288,
        "n_routed_experts": 512,
        "moe_topk": 12,
        "expert_ffn_hidden_size": 2048,
    },
)
