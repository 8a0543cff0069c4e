"""Phi-1.5 and Phi-2 (Li et al. 2023, arXiv 2309.05463): attention and MLP side by side behind one
LayerNorm, biases everywhere, and a part of each head turns."""

from __future__ import annotations

from functools import partial

from kvik.models.llama import Llama, LlamaAttention, ParallelLayer, plain_mlp
from kvik.spec.declare import Architecture
from kvik.spec.layers import turned_layers

PhiLayer = partial(
    ParallelLayer,
    attention=partial(LlamaAttention, o="dense"),
    feed=partial(plain_mlp, up="fc1", down="fc2"),
)
PHI = Architecture(
    "PhiForCausalLM",
    "phi",
    "Phi-1.5 and Phi-2",
    partial(
        Llama,
        make_layer=PhiLayer,
        names=("embed_tokens", "layers", "final_layernorm", "lm_head"),
    ),
    layers=partial(turned_layers, fraction=0.5),
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
