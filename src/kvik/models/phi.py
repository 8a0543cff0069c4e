"""The Phi family.

Phi-1.5 and Phi-2 (Li et al. 2023, arXiv 2309.05463): attention and MLP in parallel after one
LayerNorm, biases everywhere, and a part of each head is rotated.

Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose checkpoints store q, k and v as one matrix, and
gate and up as another. Variants with a long context use LongRoPE.

Phi-3.5-MoE (Abdin et al. 2024, arXiv 2404.14219; with GRIN's router, arXiv 2409.12136): a Mixtral
with biases and LayerNorm, in which the weight of the second expert does not depend on the first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    ParallelLayer,
    PreNormLayer,
    feed_forward,
    plain_mlp,
)
from kvik.models.mixtral import MIXTRAL
from kvik.spec.architecture import Architecture
from kvik.spec.experts import Router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, rotary_layers, windowed_layers

PhiLayer = partial(
    ParallelLayer,
    attention=partial(GroupedQueryAttention, o="dense"),
    feed=partial(plain_mlp, up="fc1", down="fc2"),
)
PHI = Architecture(
    "PhiForCausalLM",
    "phi",
    "Phi-1.5 and Phi-2",
    partial(
        Decoder, make_layer=PhiLayer, names=("embed_tokens", "layers", "final_layernorm", "lm_head")
    ),
    layers=partial(rotary_layers, fraction=0.5),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    head_bias=True,
    activations=("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu"),
    rms_norm=False,
    gated_mlp=False,
    eos_token_ids=(2,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    fixed={"qk_layernorm": False},
    gguf="phi2",
    gguf_names={
        "output_norm": "model.final_layernorm",
        "attn_output": "self_attn.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
)


Phi3Layer = partial(
    PreNormLayer,
    attention=partial(GroupedQueryAttention, qkv=("qkv_proj",)),
    feed=partial(feed_forward, gate_up=("gate_up_proj",)),
)


PHI3 = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    "Phi-3 and 3.5 mini, Phi-4 and 4-mini",
    partial(Decoder, make_layer=Phi3Layer),
    layers=partial(windowed_layers, fraction=1.0),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
    eos_token_ids=(32000,),
    gguf="phi3",
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)


MIXED = 2  # experts per token
MAX_MSCALE = 1e6


def phimoe_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer has the window of the file; the file gives the factor of q and k for LongRoPE."""
    specs = windowed_layers(fields, layers, positions)
    key = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    scaling, rope = fields.inside(key), specs[0].rope
    if rope is None or "long_mscale" not in scaling:
        return specs
    long, short = (
        scaling.number(f"{length}_mscale", 0.0, MAX_MSCALE) for length in ("long", "short")
    )
    if short != long:
        raise scaling.error("short_mscale", f"must be long_mscale, {long:g}, not {short:g}")
    return (replace(specs[0], rope=replace(rope, attention_factor=long)),) * layers


def sparsemixer(fields: Fields, experts: int, active: int) -> Router:
    if active != MIXED:
        raise fields.error("num_experts_per_tok", f"must be {MIXED}, not {active}")
    jitter = fields.number("router_jitter_noise", 0.0, 1.0, 0.01)
    return Router(experts, active, "sparsemixer", normalised=False, jitter=jitter)


PHIMOE = replace(
    MIXTRAL,
    name="PhimoeForCausalLM",
    model_type="phimoe",
    models="Phi-3.5-MoE, Phi-mini-MoE and Phi-tiny-MoE",
    layers=phimoe_layers,
    experts=partial(read_experts, inner="intermediate_size", router=sparsemixer),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    head_bias="lm_head_bias",
    rms_norm=False,
    defaults={
        "num_local_experts": 16,
        "num_experts_per_tok": MIXED,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "rope_theta": 1e6,
    },
    gguf=None,
)
# The name in the authors' files.
PHIMOE_ORIGINAL = replace(PHIMOE, name="PhiMoEForCausalLM")
