"""BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764; the 2B model, arXiv 2504.12285): norms before the
second matrices of attention and MLP, which gates by squared ReLU. Published checkpoints store
weights of -1, 0 and 1."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer
from kvik.spec.architecture import Architecture
from kvik.spec.declare import RELU2, LayerBuilder
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext

if TYPE_CHECKING:
    from torch import Tensor


class BitNetAttention(GroupedQueryAttention):
    """Grouped-query attention, whose output is normalised."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        super().__init__(spec, builder, layer, full_rows=True)
        inner, width = builder.at("self_attn"), spec.num_heads * spec.head_dim
        self.norm = inner.rms_norm("attn_sub_norm", width, spec.norm_eps, before="o")

    def output(self, attended: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor:
        return self.norm(attended)


class BitNetMLP:
    """down(norm(relu(gate(x))^2 * up(x))) + residual."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        mlp, hidden, width = builder.at("mlp"), spec.hidden_size, spec.intermediate_size
        linear = partial(mlp.linear, bias=False)
        self.gate = linear("gate_proj", hidden, width, role="up", activation="relu_squared")
        self.up = linear("up_proj", hidden, width, role="up")
        self.gated = mlp.gated()
        self.norm = mlp.rms_norm("ffn_sub_norm", width, spec.norm_eps, before="down")
        self.down = linear("down_proj", width, hidden, role="down")

    def __call__(
        self, x: Tensor, ctx: ForwardContext | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        product = self.gated(self.up(x, ctx), self.gate(x, ctx))
        return self.down(self.norm(product), ctx, residual)


BITNET = Architecture(
    "BitNetForCausalLM",
    "bitnet",
    "BitNet b1.58",
    partial(Decoder, make_layer=partial(PreNormLayer, attention=BitNetAttention, feed=BitNetMLP)),
    activations=(RELU2,),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    eos_token_ids=(128_001,),
    defaults={
        "vocab_size": 128_256,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 30,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    },
)
