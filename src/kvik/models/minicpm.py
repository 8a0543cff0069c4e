"""MiniCPM3 (OpenBMB 2024): the latent attention of DeepSeek-V2, and scales of embedding, residuals
and logits as in Granite."""

from __future__ import annotations

from functools import partial
from math import sqrt

from kvik.models.decoder import Decoder
from kvik.models.deepseek import DeepseekAttention
from kvik.models.granite import GraniteLayer
from kvik.spec.architecture import Architecture
from kvik.spec.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, latent_layers
from kvik.spec.model import ModelScales


def minicpm3_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Latent attention; a head's value has by default as many channels as in Llama."""
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    value = hidden // fields.integer("num_attention_heads", 1, MAX_HEADS)
    if "v_head_dim" not in fields:
        fields = fields.changed({"v_head_dim": value})
    return latent_layers(fields, layers, positions, interleaved=False)


def minicpm3_scales(fields: Fields) -> ModelScales:
    """Return the scales; null for depth or width means 1."""
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    depth = 1.0
    if not fields.is_null("scale_depth"):
        depth = fields.number("scale_depth", 1e-6, 1e6) / sqrt(layers)
    width = 1.0
    if not fields.is_null("dim_model_base"):
        width = fields.integer("dim_model_base", 1, MAX_WIDTH) / hidden
    return ModelScales(fields.number("scale_emb", 1e-6, 1e6), residual=depth, logits=width)


MINICPM3 = Architecture(
    "MiniCPM3ForCausalLM",
    "minicpm3",
    "MiniCPM3",
    partial(Decoder, make_layer=partial(GraniteLayer, attention=DeepseekAttention)),
    layers=minicpm3_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    tied=True,
    scales=minicpm3_scales,
    eos_token_ids=(2,),
    defaults={
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
)
