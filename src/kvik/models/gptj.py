"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side behind one LayerNorm, and a
part of each head turns, in pairs of neighbours."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama, LlamaAttention
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, turned_layers
from kvik.spec.model import MAX_HEADS, MAX_WIDTH, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


class GPTJLayer:
    """Attention and MLP; both read the same normalised residual stream and add to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.norm = builder.layer_norm("ln_1", hidden, spec.norm_eps)
        attention = builder.at("attn")
        attention.ignore("bias", "masked_bias")  # causal masks that old checkpoints carry
        self.attention = LlamaAttention(spec, attention, layer, o="out_proj")
        self.mlp = builder.at("mlp").mlp(
            "fc_in", "fc_out", hidden, inner, bias=True, activation=spec.activation
        )

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        normalised = self.norm(x)
        return self.mlp(normalised, ctx, self.attention(normalised, x, rotation, ctx))


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
