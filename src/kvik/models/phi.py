"""Phi-1.5 and Phi-2 (Li et al. 2023, arXiv 2309.05463): attention and MLP side by side behind one
LayerNorm, biases everywhere, and a part of each head turns."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama, LlamaAttention
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.layers import turned_layers
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


class PhiLayer:
    """Attention and MLP; both read the same normalised residual stream and add to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden = spec.hidden_size
        self.norm = builder.layer_norm("input_layernorm", hidden, spec.norm_eps)
        self.attention = LlamaAttention(spec, builder.at("self_attn"), layer, o="dense")
        self.mlp = builder.at("mlp").mlp(
            "fc1",
            "fc2",
            hidden,
            spec.intermediate_size,
            bias=True,
            activation=spec.activation,
        )

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        normalised = self.norm(x)
        return self.mlp(normalised, ctx, self.attention(normalised, x, rotation, ctx))


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
