"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a head that drafts from the residual streams of a
model at three depths, and then from its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from kvik.models.decoder import QKV, layer_norms
from kvik.spec.declare import LayerBuilder, ListedLayer
from kvik.spec.declared import DeclaredTable
from kvik.spec.model import ModelFacts
from kvik.spec.network import ALL, ForwardContext

if TYPE_CHECKING:
    from torch import Tensor

# Variants of a Llama of one layer, by the residual of its attention: the hidden state, plain or
# normalised.
PLAIN, NORMED = WIRINGS = ("EAGLE-3", "EAGLE-3, norm before residual")
TAPS = 3  # residual streams of the model


class Eagle3Head:
    """The head as a network: its tokens are those that it drafts, and its hidden states are not
    normalised.

    A forward reads `hidden`: the model's residual streams of the tokens before, as `onward` joins
    them, or the head's own.
    """

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        hidden, heads, dim = spec.hidden_size, spec.num_heads, spec.head_dim
        (layer,), kv_heads = spec.layers, spec.num_kv_heads
        self.joined = builder.joined()
        self.join = builder.linear("fc", TAPS * hidden, hidden, bias=False)
        block = builder.at("midlayer", "layers.0")
        norm = layer_norms(spec, block)
        self.norms = norm("input_layernorm"), norm("hidden_norm")
        inner, counts = block.at("self_attn"), (heads, kv_heads, kv_heads)
        self.qkv = inner.heads(
            QKV, 2 * hidden, counts, dim, bias=spec.qkv_bias, rope=layer.rope, full_rows=True
        )
        self.attend = inner.attention(0, layer, dim)
        self.o = inner.linear("o_proj", heads * dim, hidden, bias=spec.o_bias, role="o")
        self.mlp_norm = norm("post_attention_layernorm")
        self.mlp = block.at("mlp").gated_mlp(hidden, spec.inner(layer), bias=spec.mlp_bias)
        self.norm = builder.rms_norm("norm", hidden, spec.norm_eps)
        table = DeclaredTable("embedding", "", spec.vocab_size, hidden)
        self.lm_head = builder.lm_head("lm_head", ListedLayer(table))
        self.ropes = [builder.rope(rope, width) for rope, width in spec.rotations]
        builder.ignore("embed_tokens.weight", "d2t", "t2d")
        self.normed = spec.wiring == NORMED
        # [most tokens of a step, hidden], which the worker allocates.
        self.hidden: Tensor | None = None
        # ids [tokens] -> [tokens, hidden], of the model.
        self.embed_target: Callable[[Tensor], Tensor] | None = None

    def onward(self, hidden: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """taps, residual streams of the model [tokens, hidden] each -> what the head reads of
        them, [tokens, hidden]."""
        return self.join(reduce(self.joined, taps))

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> their embeddings, normalised, [tokens, hidden]."""
        assert self.embed_target is not None
        return self.norms[0](self.embed_target(ids))

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        return None

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Take embeddings x [tokens, hidden] and `hidden` through the layer."""
        assert self.hidden is not None
        stream = self.hidden[: len(x)]
        normed = self.norms[1](stream)
        q, k, v = self.qkv(self.joined(x, normed), ctx)
        rotation = self.ropes[0].at(ctx.positions) if self.ropes else None
        residual = normed if self.normed else stream
        x = self.o(self.attend(q, k, v, ctx, rotation), ctx, residual)
        return self.mlp(self.mlp_norm(x), ctx, x)

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] after the layer -> itself."""
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, tokens that it drafts] fp32."""
        return self.lm_head(self.norm(hidden))
