"""GPT-Neo, GPT-J and GPT-NeoX of EleutherAI, and CodeGen.

GPT-NeoX and Pythia (Black et al. 2022, arXiv 2204.06745): attention and MLP in parallel, each after
its own LayerNorm; q, k and v are one matrix, stored head by head, and a quarter of each head is
rotated.

GPT-J (Wang and Komatsuzaki 2021): attention and MLP in parallel after one LayerNorm; a part of each
head is rotated, in pairs of neighbours. CodeGen (Nijkamp et al. 2022, arXiv 2203.13474) is a GPT-J
whose q, k and v are one matrix, stored in four parts.

GPT-Neo (Black et al. 2021): a GPT-2 with unscaled scores, in which every second layer has a window.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    ParallelLayer,
    PreNormLayer,
    plain_mlp,
)
from kvik.models.gpt2 import GPT2, KEYS, NORMS
from kvik.spec.architecture import Architecture
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, rotary_layers
from kvik.spec.model import ModelScales
from kvik.spec.rope import MAX_POSITIONS
from kvik.spec.visible_keys import Window

# The matrices of BLOOM and Falcon have the same names.
HEAD_BY_HEAD = partial(GroupedQueryAttention, qkv=("query_key_value",), o="dense", by_head=True)
NEOX_MLP = partial(plain_mlp, up="dense_h_to_4h", down="dense_4h_to_h")
NeoXLayer = partial(
    ParallelLayer,
    attention=partial(HEAD_BY_HEAD, scope="attention"),
    feed=NEOX_MLP,
    norms=("input_layernorm", "post_attention_layernorm"),
)


GPT_NEOX = Architecture(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    "GPT-NeoX and Pythia",
    partial(
        Decoder,
        make_layer=NeoXLayer,
        scopes=("gpt_neox", ""),
        names=("embed_in", "layers", "final_layer_norm", "embed_out"),
    ),
    layers=partial(rotary_layers, fraction=0.25),
    older={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias=True,
    defaults={"attention_bias": True},
    activations=("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh"),
    rms_norm=False,
    gated_mlp=False,
    eos_token_ids=(2,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    fixed={"use_parallel_residual": True},
    gguf="gptneox",
    gguf_names={
        "blk": "gpt_neox.layers",
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)


GPTJLayer = partial(
    ParallelLayer,
    attention=partial(GroupedQueryAttention, scope="attn", o="out_proj"),
    feed=partial(plain_mlp, up="fc_in", down="fc_out"),
    norms=("ln_1",),
)


def gptj_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """The first `rotary_dim` channels of each head are rotated."""
    hidden = fields.integer("n_embd", 1, MAX_WIDTH)
    head_dim = max(1, hidden // fields.integer("n_head", 1, MAX_HEADS))
    fraction = fields.integer("rotary_dim", 1, head_dim, min(64, head_dim)) / head_dim
    return rotary_layers(fields, layers, positions, fraction=fraction, interleaved=True)


GPTJ = Architecture(
    "GPTJForCausalLM",
    "gptj",
    "GPT-J",
    partial(GPT2, make_layer=GPTJLayer, make_positions=None),
    layers=gptj_layers,
    mlp_bias=True,
    head_bias=True,
    activations=("gelu_new", "gelu_pytorch_tanh", "gelu"),
    rms_norm=False,
    gated_mlp=False,
    eos_token_ids=(50256,),
    keys=KEYS,
)


SHARDS = 4  # processes that trained the model


def codegen_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """As in GPT-J; heads were divided among processes."""
    heads = fields.integer("n_head", 1, MAX_HEADS)
    if heads % SHARDS:
        raise fields.error("n_head", f"must be a multiple of {SHARDS}, not {heads}")
    return gptj_layers(fields, layers, positions)


CodeGenLayer = partial(
    GPTJLayer,
    attention=partial(
        GroupedQueryAttention, scope="attn", qkv=("qkv_proj",), o="out_proj", shards=SHARDS
    ),
)
CODEGEN = replace(
    GPTJ,
    name="CodeGenForCausalLM",
    model_type="codegen",
    models="CodeGen",
    make=partial(GPT2, make_layer=CodeGenLayer, make_positions=None),
    layers=codegen_layers,
)


GLOBAL, LOCAL = "global", "local"


GPTNeoLayer = partial(
    PreNormLayer,
    attention=partial(GroupedQueryAttention, scope="attn.attention", o="out_proj"),
    feed=partial(plain_mlp, up="c_fc", down="c_proj"),
    norms=NORMS,
)


def neo_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Local layers have the window that the file gives."""
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
