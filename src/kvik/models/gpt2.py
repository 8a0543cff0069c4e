"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases everywhere, a plain MLP.

Its checkpoints store matrices as [inputs, outputs], and q, k and v as one matrix. In the first GPT
(Radford et al. 2018) a norm follows each sum.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, NormedSumLayer, PreNormLayer
from kvik.spec.architecture import SEPARATE, Architecture, FilePart, separate_wiring
from kvik.spec.declare import LayerBuilder
from kvik.spec.layers import unturned_layers
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward, ForwardContext, PositionTable

if TYPE_CHECKING:
    from torch import Tensor


class GPT2Attention:
    """Multi-head attention; positions are already in the hidden state."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, inner = spec.hidden_size, builder.at("attn")
        self.heads, transposed = (3, spec.num_heads, spec.head_dim), spec.wiring != SEPARATE
        self.qkv = inner.linear(
            "c_attn", hidden, 3 * hidden, bias=spec.qkv_bias, role="qkv", transposed=transposed
        )
        self.attend = inner.attention(layer, spec.layers[layer], spec.head_dim)
        self.o = inner.linear(
            "c_proj", hidden, hidden, bias=spec.o_bias, role="o", transposed=transposed
        )
        inner.ignore("bias", "masked_bias")  # causal masks in old checkpoints

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx).view(-1, *self.heads).unbind(1)  # [tokens, heads, head_dim] each
        return self.o(self.attend(q, k, v, ctx), ctx, residual)


def gpt2_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    hidden, inner, transposed = spec.hidden_size, spec.intermediate_size, spec.wiring != SEPARATE
    mlp = builder.at("mlp")
    return mlp.mlp("c_fc", "c_proj", hidden, inner, bias=spec.mlp_bias, transposed=transposed)


def learned_positions(
    spec: ModelFacts, builder: LayerBuilder, name: str = "wpe", skipped: int = 0
) -> PositionTable:
    """Return the table of learned positions.

    Args:
        skipped: number of rows before the first position.
    """
    return builder.embedding(name, spec.max_position_embeddings, spec.hidden_size, skipped=skipped)


NORMS = ("ln_1", "ln_2")
GPT2 = partial(
    Decoder,
    make_layer=partial(PreNormLayer, attention=GPT2Attention, feed=gpt2_feed, norms=NORMS),
    scopes=("transformer", ""),
    names=("wte", "h", "ln_f", "lm_head"),
    make_positions=learned_positions,
)


MATRICES = {
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def file_parts(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the matrices that checkpoints store transposed and files do not."""
    return {name: (FilePart(name, transposed=True),) for name in MATRICES.values()}


KEYS = {  # also of GPT-J
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
GPT2_MODEL = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    "GPT-2",
    GPT2,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    activations=("gelu_new", "gelu_pytorch_tanh"),
    rms_norm=False,
    gated_mlp=False,
    layers=unturned_layers,
    wiring=separate_wiring,
    rotary=False,
    tied=True,
    eos_token_ids=(50256,),
    keys=KEYS,
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    gguf="gpt2",
    gguf_names={
        "blk": "transformer.h",
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "attn_norm": "ln_1",
        "ffn_norm": "ln_2",
        **MATRICES,
    },
    gguf_parts=file_parts,
    gguf_implied=lambda fields: {SEPARATE: True},
)
# Its files call GPT-2's activation "gelu".
GPT = replace(
    GPT2_MODEL,
    name="OpenAIGPTLMHeadModel",
    model_type="openai-gpt",
    models="GPT",
    make=partial(
        Decoder,
        make_layer=partial(NormedSumLayer, attention=GPT2Attention, feed=gpt2_feed, norms=NORMS),
        scopes=("transformer", ""),
        names=("tokens_embed", "h", "", "lm_head"),
        make_positions=partial(learned_positions, name="positions_embed"),
    ),
    activations=("gelu",),
    wiring=None,
    eos_token_ids=(),
    keys={**KEYS, "hidden_act": "afn"},
    fixed={},
    gguf=None,
)
