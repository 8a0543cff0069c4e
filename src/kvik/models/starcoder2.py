"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): a Llama with LayerNorm, biases and a plain
MLP; and StarCoder and SantaCoder (Li et al. 2023, arXiv 2305.06161), GPT-2 with one KV head."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer, plain_mlp
from kvik.models.gpt2 import GPT2, KEYS, NORMS
from kvik.spec.architecture import Architecture
from kvik.spec.fields import MAX_HEADS, Fields
from kvik.spec.layers import unturned_layers, windowed_layers

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new", "gelu")
MLP = partial(plain_mlp, up="c_fc", down="c_proj")

STARCODER2 = Architecture(
    "Starcoder2ForCausalLM",
    "starcoder2",
    "StarCoder 2",
    partial(Decoder, make_layer=partial(PreNormLayer, feed=MLP)),
    layers=windowed_layers,
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    activations=ACTIVATIONS,
    rms_norm=False,
    gated_mlp=False,
    tied=True,
    eos_token_ids=(50256,),
    defaults={"use_bias": True, "num_key_value_heads": 2, "sliding_window": None},
    keys={"rms_norm_eps": "norm_epsilon"},
    gguf="starcoder2",
    gguf_names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
)


def bigcode_kv_heads(fields: Fields) -> int:
    heads = fields.integer(KEYS["num_attention_heads"], 1, MAX_HEADS)
    return 1 if fields.boolean("multi_query", True) else heads


STARCODER = Architecture(
    "GPTBigCodeForCausalLM",
    "gpt_bigcode",
    "StarCoder and SantaCoder",
    partial(
        GPT2,
        make_layer=partial(
            PreNormLayer,
            attention=partial(
                GroupedQueryAttention, scope="attn", qkv=("c_attn",), o="c_proj", by_head=True
            ),
            feed=MLP,
            norms=NORMS,
        ),
    ),
    layers=unturned_layers,
    kv_heads=bigcode_kv_heads,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    activations=ACTIVATIONS,
    rms_norm=False,
    gated_mlp=False,
    rotary=False,
    tied=True,
    eos_token_ids=(50256,),
    keys=KEYS,
    fixed={"scale_attn_weights": True, "add_cross_attention": False},
)
