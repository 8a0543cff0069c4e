"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): a Llama with LayerNorm, biases and a plain
MLP."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, PreNormLayer, plain_mlp
from kvik.spec.declare import Architecture
from kvik.spec.layers import windowed_layers

STARCODER2 = Architecture(
    "Starcoder2ForCausalLM",
    "starcoder2",
    "StarCoder 2",
    partial(
        Decoder,
        make_layer=partial(PreNormLayer, feed=partial(plain_mlp, up="c_fc", down="c_proj")),
    ),
    layers=windowed_layers,
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    activations=("gelu_pytorch_tanh", "gelu_new", "gelu"),
    rms_norm=False,
    gated_mlp=False,
    tied=True,
    eos_token_ids=(50256,),
    defaults={"use_bias": True, "num_key_value_heads": 2, "sliding_window": None},
    keys={"rms_norm_eps": "norm_epsilon"},
    gguf="starcoder2",
    gguf_names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
)
