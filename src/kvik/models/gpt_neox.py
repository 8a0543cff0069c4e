"""GPT-NeoX and Pythia (Black et al. 2022, arXiv 2204.06745): attention and MLP side by side, each
behind a LayerNorm of its own; q, k and v stand head by head in one matrix, and a quarter of each
head turns."""

from __future__ import annotations

from functools import partial

from kvik.models.llama import Llama, LlamaAttention, ParallelLayer, plain_mlp
from kvik.spec.declare import Architecture
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec
from kvik.spec.rope import read_rope

# Falcon names matrices alike.
HEAD_BY_HEAD = partial(LlamaAttention, qkv=("query_key_value",), o="dense", by_head=True)
NEOX_MLP = partial(plain_mlp, up="dense_h_to_4h", down="dense_4h_to_h")
NeoXLayer = partial(
    ParallelLayer,
    attention=partial(HEAD_BY_HEAD, scope="attention"),
    feed=NEOX_MLP,
    norms=("input_layernorm", "post_attention_layernorm"),
)


def neox_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer sees all keys; files have names of their own for the rotary positions."""
    older = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    named = {key: fields.raw(old) for key, old in older.items() if old in fields}
    rope = read_rope(fields.changed(named), positions, fraction=0.25)
    return (LayerSpec(None, rope),) * layers


GPT_NEOX = Architecture(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    "GPT-NeoX and Pythia",
    partial(
        Llama,
        make_layer=NeoXLayer,
        scopes=("gpt_neox", ""),
        names=("embed_in", "layers", "final_layer_norm", "embed_out"),
    ),
    layers=neox_layers,
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
