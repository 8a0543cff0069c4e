"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): a Llama with LayerNorm, biases and a plain
MLP."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama, LlamaAttention
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, read_window
from kvik.spec.model import ModelFacts
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor


class Starcoder2Layer:
    """Attention and MLP; each reads the residual stream normalised and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.attention_norm = builder.layer_norm("input_layernorm", hidden, eps, before="qkv")
        self.attention = LlamaAttention(spec, builder.at("self_attn"), layer)
        self.mlp_norm = builder.layer_norm("post_attention_layernorm", hidden, eps, before="up")
        self.mlp = builder.at("mlp").mlp(
            "c_fc",
            "c_proj",
            hidden,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            activation=spec.activation,
        )

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attention(self.attention_norm(x), x, rotation, ctx)
        return self.mlp(self.mlp_norm(x), ctx, x)


def starcoder2_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer has the window of the file, if it has one."""
    window = read_window(fields) if "sliding_window" in fields else None
    return (LayerSpec(window, read_rope(fields, positions)),) * layers


STARCODER2 = Architecture(
    "Starcoder2ForCausalLM",
    "starcoder2",
    "StarCoder 2",
    partial(Llama, make_layer=Starcoder2Layer),
    layers=starcoder2_layers,
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    activations=("gelu_pytorch_tanh", "gelu_new", "gelu"),
    rms_norm=False,
    gated_mlp=False,
    tied=True,
    eos_token_ids=(50256,),
    defaults={"use_bias": True},
    keys={"rms_norm_eps": "norm_epsilon"},
    gguf="starcoder2",
    gguf_names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
)
