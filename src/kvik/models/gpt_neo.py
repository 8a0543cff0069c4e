"""GPT-Neo (Black et al. 2021): a GPT-2 whose scores are not scaled, and in which every second layer
sees a window."""

from __future__ import annotations

from functools import partial

from kvik.models.gpt2 import GPT2, NORMS
from kvik.models.llama import LlamaAttention, LlamaLayer, plain_mlp
from kvik.spec.declare import Architecture
from kvik.spec.fields import Fields
from kvik.spec.kv import Window
from kvik.spec.layers import LayerSpec
from kvik.spec.model import ModelScales
from kvik.spec.rope import MAX_POSITIONS

GLOBAL, LOCAL = "global", "local"


GPTNeoLayer = partial(
    LlamaLayer,
    attention=partial(LlamaAttention, scope="attn.attention", o="out_proj"),
    feed=partial(plain_mlp, up="c_fc", down="c_proj"),
    norms=NORMS,
)


def neo_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Local layers have the window of the file."""
    types = fields.strings("attention_layers")
    if len(types) != layers or set(types) - {GLOBAL, LOCAL}:
        reason = f"must have {layers} entries, each {GLOBAL} or {LOCAL}"
        raise fields.error("attention_layers", reason)
    window = Window(fields.integer("window_size", 1, MAX_POSITIONS, 256))
    return tuple(LayerSpec(window if kind == LOCAL else None) for kind in types)


GPT_NEO = Architecture(
    "GPTNeoForCausalLM",
    "gpt_neo",
    "GPT-Neo and TinyStories",
    partial(GPT2, make_layer=GPTNeoLayer),
    layers=neo_layers,
    scales=lambda fields: ModelScales(attention=1.0),
    o_bias=True,
    mlp_bias=True,
    activations=("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"),
    rms_norm=False,
    gated_mlp=False,
    rotary=False,
    tied=True,
    eos_token_ids=(50256,),
    keys={
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
)
