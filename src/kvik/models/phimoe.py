"""Phi-3.5-MoE (Abdin et al. 2024, arXiv 2404.14219; its router is that of GRIN, arXiv 2409.12136):
a Mixtral with biases and LayerNorm, whose second expert is weighed without the first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.mixtral import MIXTRAL
from kvik.spec.experts import Router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, windowed_layers

MIXED = 2  # experts of a token
MAX_MSCALE = 1e6


def phimoe_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer has the window of the file; LongRoPE says itself what q and k are multiplied
    with."""
    found = windowed_layers(fields, layers, positions)
    key = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    scaling, rope = fields.inside(key), found[0].rope
    if rope is None or "long_mscale" not in scaling:
        return found
    long, short = (
        scaling.number(f"{length}_mscale", 0.0, MAX_MSCALE) for length in ("long", "short")
    )
    if short != long:
        raise scaling.error("short_mscale", f"must be long_mscale, {long:g}, not {short:g}")
    return (replace(found[0], rope=replace(rope, attention_factor=long)),) * layers


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
        "sliding_window": None,
        "rope_theta": 1e6,
    },
    gguf=None,
    gguf_names={},
    gguf_pairs=False,
)
# As the authors' files call it.
PHIMOE_ORIGINAL = replace(PHIMOE, name="PhiMoEForCausalLM")
