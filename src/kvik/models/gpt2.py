"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases everywhere, a plain MLP.

Its checkpoints store matrices as [inputs, outputs], and q, k and v as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvik.spec.declare import (
    ALL,
    APART,
    Architecture,
    FilePart,
    ForwardContext,
    LayerBuilder,
    apart_wiring,
)
from kvik.spec.layers import unturned_layers
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


class GPT2Attention:
    """Multi-head attention; positions are already in the hidden state."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden = spec.hidden_size
        self.heads, transposed = (3, spec.num_heads, spec.head_dim), spec.wiring != APART
        self.qkv = builder.linear(
            "c_attn", hidden, 3 * hidden, bias=spec.qkv_bias, role="qkv", transposed=transposed
        )
        self.attend = builder.attention(layer, spec.head_dim)
        self.o = builder.linear(
            "c_proj", hidden, hidden, bias=spec.o_bias, role="o", transposed=transposed
        )
        builder.ignore("bias", "masked_bias")  # causal masks that old checkpoints carry

    def __call__(self, x: Tensor, residual: Tensor, ctx: ForwardContext) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx).view(-1, *self.heads).unbind(1)  # [tokens, heads, head_dim] each
        return self.o(self.attend(q, k, v, ctx), ctx, residual)


class GPT2Layer:
    """Attention and MLP; each reads the residual stream normalised and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.attention_norm = builder.layer_norm("ln_1", hidden, eps, before="qkv")
        self.attention = GPT2Attention(spec, builder.at("attn"), layer)
        self.mlp_norm = builder.layer_norm("ln_2", hidden, eps, before="up")
        self.mlp = builder.at("mlp").mlp(
            "c_fc",
            "c_proj",
            hidden,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            transposed=spec.wiring != APART,
        )

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attention(self.attention_norm(x), x, ctx)
        return self.mlp(self.mlp_norm(x), ctx, x)


class GPT2:
    """The language model.

    Args:
        make_layer: makes a layer in the scope of its names.
        scopes: of all but the head; the first that a checkpoint has.
        names: of the embeddings of tokens and positions, the layers, and the last norm.
        skipped: rows of the embedding of positions before the one of the first.
        last_norm: there is a norm behind the last layer.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        make_layer: Callable[
            [ModelFacts, LayerBuilder, int], Callable[[Tensor, ForwardContext], Tensor]
        ] = GPT2Layer,
        scopes: tuple[str, ...] = ("transformer", ""),
        names: tuple[str, str, str, str] = ("wte", "wpe", "h", "ln_f"),
        skipped: int = 0,
        last_norm: bool = True,
    ) -> None:
        embed, positions, layers, last = names
        trunk = builder.at(*scopes)
        self.embed = trunk.token_embedding(
            embed, spec.vocab_size, spec.embedding_size, tied=spec.tie_word_embeddings
        )
        self.embed_position = trunk.embedding(
            positions, spec.max_position_embeddings, spec.hidden_size, skipped=skipped
        )
        self.layers = [
            make_layer(spec, trunk.at(layers).at(layer), layer) for layer in range(spec.num_layers)
        ]
        self.norm = None
        if last_norm:
            self.norm = trunk.layer_norm(last, spec.hidden_size, spec.norm_eps)
        self.lm_head = builder.lm_head("lm_head", self.embed)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> hidden [tokens, hidden]."""
        return self.leave(self.blocks(self.enter(ids, ctx), ctx))

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        return self.embed_position.add(ctx.positions, self.embed(ids))

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> None:
        """Layers read nothing of tokens alone."""

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same behind the last layer."""
        for layer in self.layers[span]:
            x = layer(x, ctx)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] behind the last layer -> normalised, where there is a norm."""
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32."""
        return self.lm_head(hidden)


MATRICES = {
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def file_parts(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return what files do not have transposed."""
    if spec.wiring == APART:
        return {}
    return {name: (FilePart(name, transposed=True),) for name in MATRICES.values()}


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
    wiring=apart_wiring,
    rotary=False,
    tied=True,
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
    gguf_implied=lambda fields: {APART: True},
)
