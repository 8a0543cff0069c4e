"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a head that drafts from the residual streams of a
model at three depths, and then from its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvik.models.decoder import QKV, layer_norms
from kvik.spec.declare import ALL, DeclaredTable, ForwardContext, LayerBuilder
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

# Variants of a Llama of one layer, by the residual of its attention: the hidden state, plain or
# normalised.
PLAIN, NORMED = WIRINGS = ("EAGLE-3", "EAGLE-3, norm before residual")
TAPS = 3  # residual streams of the model


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The shape of a head without an embedding, for `LayerBuilder.lm_head`."""

    table: DeclaredTable

    @property
    def shape(self) -> tuple[int, int]:
        return self.table.rows, self.table.width


class Eagle3Head:
    """The head as a network: its tokens are those that it drafts, and its hidden states are not
    normalised.

    A forward reads `inputs` and `residual`, because no operation joins two tensors.

    Attributes:
        inputs: [most tokens of a step, 2 * hidden], which the worker allocates.
        residual: [most tokens of a step, hidden], likewise.
        embed: ids [tokens] -> [tokens, hidden], of the model.
    """

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        hidden, heads, dim = spec.hidden_size, spec.num_heads, spec.head_dim
        (layer,), kv_heads = spec.layers, spec.num_kv_heads
        self.join = builder.linear("fc", TAPS * hidden, hidden, bias=False)
        block = builder.at("midlayer", "layers.0")
        norm = layer_norms(spec, block)
        self.norms = norm("input_layernorm"), norm("hidden_norm")
        inner, counts = block.at("self_attn"), (heads, kv_heads, kv_heads)
        self.qkv = inner.heads(
            QKV, 2 * hidden, counts, dim, bias=spec.qkv_bias, rope=layer.rope, full_rows=True
        )
        self.attend = inner.attention(0, dim, rope=layer.rope)
        self.o = inner.linear("o_proj", heads * dim, hidden, bias=spec.o_bias, role="o")
        self.mlp_norm = norm("post_attention_layernorm")
        self.mlp = block.at("mlp").gated_mlp(hidden, spec.inner(layer), bias=spec.mlp_bias)
        self.norm = builder.rms_norm("norm", hidden, spec.norm_eps)
        table = DeclaredTable("embedding", "", spec.vocab_size, hidden)
        self.lm_head = builder.lm_head("lm_head", _Outputs(table))
        self.ropes = [builder.rope(rope, width) for rope, width in spec.rotations]
        builder.ignore("embed_tokens.weight", "d2t", "t2d")
        self.normed = spec.wiring == NORMED
        self.inputs: Tensor | None = None
        self.residual: Tensor | None = None
        self.embed: Callable[[Tensor], Tensor] | None = None

    def read(self, ids: Tensor, hidden: Tensor) -> None:
        """Set the inputs of the next forward.

        Args:
            ids: [tokens]. hidden: [tokens, 3 * hidden], residual streams of the tokens before them,
                or [tokens, hidden], its own.
        """
        assert self.inputs is not None and self.residual is not None and self.embed is not None
        count, width = len(ids), self.residual.shape[1]
        stream = hidden if hidden.shape[1] == width else self.join(hidden)
        normed = self.norms[1](stream)
        self.inputs[:count, :width].copy_(self.norms[0](self.embed(ids)))
        self.inputs[:count, width:].copy_(normed)
        self.residual[:count].copy_(normed if self.normed else stream)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens], which only give their number -> hidden [tokens, hidden]."""
        return self.leave(self.blocks(self.enter(ids, ctx), ctx))

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        assert self.residual is not None
        return self.residual[: len(ids)]

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        return None

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Take x [tokens, hidden] through the layer."""
        assert self.inputs is not None
        q, k, v = self.qkv(self.inputs[: len(x)], ctx)
        rotation = self.ropes[0].at(ctx.positions) if self.ropes else None
        x = self.o(self.attend(q, k, v, ctx, rotation), ctx, x)
        return self.mlp(self.mlp_norm(x), ctx, x)

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] after the layer -> itself."""
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, tokens that it drafts] fp32."""
        return self.lm_head(self.norm(hidden))
