"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867): attention and MLP in parallel; q, k and v are
one matrix, stored KV head by KV head.

The 7B has one KV head and one LayerNorm. The 40B has several KV heads, and separate norms for
attention and MLP; Falcon 2 has several KV heads and one norm.
"""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, Layer, ParallelLayer
from kvik.models.gpt_neox import HEAD_BY_HEAD, NEOX_MLP
from kvik.spec.declare import SEPARATE, Architecture, FilePart, LayerBuilder
from kvik.spec.fields import MAX_HEADS, Fields
from kvik.spec.model import ModelFacts

TWO_NORMS = "two norms"
HAS_TWO = "has_two_norms"  # key of config.json that only GGUF files imply


def falcon_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    norms: tuple[str, ...] = ("ln_mlp" if spec.wiring == SEPARATE else "input_layernorm",)
    if spec.wiring == TWO_NORMS:
        norms = ("ln_attn", "ln_mlp")
    attention = partial(HEAD_BY_HEAD, scope="self_attention")
    return ParallelLayer(spec, builder, layer, attention, NEOX_MLP, norms)


def falcon_kv_heads(fields: Fields) -> int:
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    if fields.boolean("new_decoder_architecture", False):
        return fields.integer("num_kv_heads", 1, MAX_HEADS, heads)
    return 1 if fields.boolean("multi_query", True) else heads


def falcon_wiring(fields: Fields) -> str:
    """Return whether there are two norms; a single one has the name of the second in files."""
    if HAS_TWO in fields:
        return TWO_NORMS if fields.boolean(HAS_TWO, False) else SEPARATE
    norms = fields.integer("num_ln_in_parallel_attn", 1, 2, 2)
    return TWO_NORMS if fields.boolean("new_decoder_architecture", False) and norms == 2 else ""


FALCON = Architecture(
    "FalconForCausalLM",
    "falcon",
    "Falcon and Falcon 2, except models with ALiBi",
    partial(
        Decoder,
        make_layer=falcon_layer,
        scopes=("transformer", ""),
        names=("word_embeddings", "h", "ln_f", "lm_head"),
    ),
    qkv_bias="bias",
    o_bias="bias",
    mlp_bias="bias",
    kv_heads=falcon_kv_heads,
    wiring=falcon_wiring,
    activations=("gelu",),
    rms_norm=False,
    gated_mlp=False,
    tied=True,
    eos_token_ids=(11,),
    defaults={"max_position_embeddings": 2048},
    keys={
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    fixed={"alibi": False, "parallel_attn": True},
    gguf="falcon",
    gguf_names={
        "blk": "transformer.h",
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "attn_norm": "ln_mlp",
        "attn_norm_2": "ln_attn",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    gguf_parts=lambda spec: {"input_layernorm": (FilePart("ln_mlp"),)},
    gguf_present={"attn_norm_2": HAS_TWO},
    gguf_implied=lambda fields: {"new_decoder_architecture": True},
)
