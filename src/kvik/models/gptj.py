"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side behind one LayerNorm, and a
part of each head turns, in pairs of neighbours."""

from __future__ import annotations

from functools import partial

from kvik.models.llama import Llama, LlamaAttention, ParallelLayer, plain_mlp
from kvik.spec.declare import Architecture
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, turned_layers
from kvik.spec.model import MAX_HEADS, MAX_WIDTH

GPTJLayer = partial(
    ParallelLayer,
    attention=partial(LlamaAttention, scope="attn", o="out_proj"),
    feed=partial(plain_mlp, up="fc_in", down="fc_out"),
    norms=("ln_1",),
)


def gptj_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Of each head the first `rotary_dim` channels turn."""
    hidden = fields.integer("n_embd", 1, MAX_WIDTH)
    head_dim = max(1, hidden // fields.integer("n_head", 1, MAX_HEADS))
    fraction = fields.integer("rotary_dim", 1, head_dim, min(64, head_dim)) / head_dim
    return turned_layers(fields, layers, positions, fraction=fraction, interleaved=True)


GPTJ = Architecture(
    "GPTJForCausalLM",
    "gptj",
    "GPT-J",
    partial(
        Llama,
        make_layer=GPTJLayer,
        scopes=("transformer", ""),
        names=("wte", "h", "ln_f", "lm_head"),
    ),
    layers=gptj_layers,
    mlp_bias=True,
    head_bias=True,
    activations=("gelu_new", "gelu_pytorch_tanh", "gelu"),
    rms_norm=False,
    gated_mlp=False,
    eos_token_ids=(50256,),
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
)
