"""BLOOM (BigScience 2022, arXiv 2211.05100): ALiBi, and a norm of the embeddings; q, k and v are
one matrix, stored head by head."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, PreNormLayer
from kvik.models.gpt_neox import HEAD_BY_HEAD, NEOX_MLP
from kvik.spec.architecture import Architecture
from kvik.spec.fields import MAX_HEADS, Fields
from kvik.spec.layers import LayerSpec, alibi_slopes

EMBED_NORM = "word_embeddings_layernorm"
# Also those of Falcon.
MATRICES = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
ATTENTION = partial(HEAD_BY_HEAD, scope="self_attention")
BloomLayer = partial(PreNormLayer, attention=ATTENTION, feed=NEOX_MLP)
SCOPES = ("transformer", "")
NAMES = ("word_embeddings", "h", "ln_f", "lm_head")


def bloom_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    heads = fields.integer("n_head", 1, MAX_HEADS)
    return (LayerSpec(slopes=alibi_slopes(heads)),) * layers


BLOOM = Architecture(
    "BloomForCausalLM",
    "bloom",
    "BLOOM and BLOOMZ",
    partial(
        Decoder,
        make_layer=BloomLayer,
        scopes=SCOPES,
        names=NAMES,
        embed_norm=EMBED_NORM,
    ),
    layers=bloom_layers,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    activations=("gelu_pytorch_tanh",),
    rms_norm=False,
    gated_mlp=False,
    rotary=False,
    tied=True,
    eos_token_ids=(2,),
    defaults={"seq_length": 2048},
    keys={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    older={"n_embed": "hidden_size", "num_attention_heads": "n_head"},
    fixed={"apply_residual_connection_post_layernorm": False},
    gguf="bloom",
    gguf_names={
        "blk": "transformer.h",
        "token_embd": f"transformer.{NAMES[0]}",
        "token_embd_norm": f"transformer.{EMBED_NORM}",
        "output_norm": "transformer.ln_f",
        **MATRICES,
    },
)
