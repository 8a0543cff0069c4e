"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867): attention and MLP in parallel; q, k and v are
one matrix, stored KV head by KV head.

The 7B has one KV head and one LayerNorm. The 40B has several KV heads, and separate norms for
attention and MLP; Falcon 2 has several KV heads and one norm. Falcon RW is a BLOOM without a norm
of the embeddings, and scales slopes like scores.
"""

from __future__ import annotations

from functools import partial

from kvik.models.bloom import ATTENTION, MATRICES, NAMES, SCOPES, BloomLayer
from kvik.models.decoder import Decoder, Layer, ParallelLayer
from kvik.models.gpt_neox import NEOX_MLP
from kvik.spec.architecture import SEPARATE, Architecture, FilePart
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, alibi_slopes, rotary_layers
from kvik.spec.model import ModelFacts

TWO_NORMS, SEQUENTIAL = "two norms", "MLP after attention"
HAS_TWO = "has_two_norms"  # key of config.json that only GGUF files imply


def falcon_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    if spec.wiring == SEQUENTIAL:
        return BloomLayer(spec, builder, layer)
    norms: tuple[str, ...] = ("ln_mlp" if spec.wiring == SEPARATE else "input_layernorm",)
    if spec.wiring == TWO_NORMS:
        norms = ("ln_attn", "ln_mlp")
    return ParallelLayer(spec, builder, layer, ATTENTION, NEOX_MLP, norms)


def falcon_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    if not fields.boolean("alibi", False):
        return rotary_layers(fields, layers, positions)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    head_dim = max(1, fields.integer("hidden_size", 1, MAX_WIDTH) // heads)
    return (LayerSpec(slopes=alibi_slopes(heads, factor=head_dim**-0.5)),) * layers


def falcon_kv_heads(fields: Fields) -> int:
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    if fields.boolean("new_decoder_architecture", False):
        return fields.integer("num_kv_heads", 1, MAX_HEADS, heads)
    return 1 if fields.boolean("multi_query", True) else heads


def falcon_wiring(fields: Fields) -> str:
    """Return whether attention and MLP are in parallel, and then whether there are two norms; a
    single one has the name of the second in files."""
    if not fields.boolean("parallel_attn", True):
        grouped = fields.boolean("new_decoder_architecture", False)
        if grouped or not fields.boolean("alibi", False):
            reason = "must be true with rotary positions or new_decoder_architecture"
            raise fields.error("parallel_attn", reason)
        return SEQUENTIAL
    if HAS_TWO in fields:
        return TWO_NORMS if fields.boolean(HAS_TWO, False) else SEPARATE
    norms = fields.integer("num_ln_in_parallel_attn", 1, 2, 2)
    return TWO_NORMS if fields.boolean("new_decoder_architecture", False) and norms == 2 else ""


FALCON = Architecture(
    "FalconForCausalLM",
    "falcon",
    "Falcon, Falcon RW and Falcon 2",
    partial(
        Decoder,
        make_layer=falcon_layer,
        scopes=SCOPES,
        names=NAMES,
    ),
    layers=falcon_layers,
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
    gguf="falcon",
    gguf_names={
        "blk": "transformer.h",
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "attn_norm": "ln_mlp",
        "attn_norm_2": "ln_attn",
        **MATRICES,
    },
    gguf_parts=lambda spec: {"input_layernorm": (FilePart("ln_mlp"),)},
    gguf_present={"attn_norm_2": HAS_TWO},
    gguf_implied=lambda fields: {"new_decoder_architecture": True},
)
