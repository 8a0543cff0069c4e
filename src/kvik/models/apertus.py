"""Apertus (Swiss AI Initiative 2025, arXiv 2509.14233): norms of the heads of q and k, and MLPs
with xIELU and no gate."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, PreNormLayer, plain_mlp
from kvik.models.qwen3 import Qwen3Attention
from kvik.spec.architecture import Architecture
from kvik.spec.declare import XIELU

APERTUS = Architecture(
    "ApertusForCausalLM",
    "apertus",
    "Apertus",
    partial(
        Decoder,
        make_layer=partial(
            PreNormLayer,
            attention=Qwen3Attention,
            feed=partial(plain_mlp, up="up_proj", down="down_proj"),
            norms=("attention_layernorm", "feedforward_layernorm"),
        ),
    ),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    activations=(XIELU,),
    gated_mlp=False,
    eos_token_ids=(2,),
    gguf="apertus",
    gguf_names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    gguf_numbers={
        f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")
    },
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
)
