"""MiniMax-Text-01 and MiniMax-M1 (MiniMax 2025, arXiv 2501.08313 and 2506.13585): lightning
attention in most layers, full attention in the others, and routed experts. What blocks add to is
the normalised residual stream, which is also what they read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.decoder import Decoder, GroupedQueryAttention, NormedLayer, mixer
from kvik.models.mixtral import experts
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.experts import normalised_router, read_experts
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.kv import StateSpec
from kvik.spec.layers import FULL, LINEAR, LayerSpec, layer_types, layers_with_states
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext, Scale, Sum
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6  # of the norm of lightning attention
KINDS = "attn_type_list"  # in published files, in place of `layer_types`
# Their names of the factors.
OLDER = {
    f"layernorm_{name}_{letter}": f"{key}_{letter}_factor"
    for name, key in (
        ("full_attention", "full_attn"),
        ("linear_attention", "linear_attn"),
        ("mlp", "mlp"),
    )
    for letter in ("alpha", "beta")
}


class LightningAttention:
    """Linear attention (Qin et al. 2024, arXiv 2401.04658): a state space in which each head has a
    constant decay. Queries, keys and values go through SiLU; the output of all heads is normalised
    and gated."""

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, state: StateSpec
    ) -> None:
        hidden, heads, dim = spec.hidden_size, state.value_heads, state.key_dim
        # Checkpoints have queries, keys and values of each head together; the state space reads
        # values, keys and queries of all heads.
        parts = [(3 * head + part) * dim for part in (2, 1, 0) for head in range(heads)]
        order = [first + i for first in parts for i in range(dim)]
        linear = partial(builder.linear, bias=False)
        self.qkv = linear("qkv_proj", hidden, 3 * state.values, role="qkv", order=order)
        self.gate = linear("output_gate", hidden, state.values, role="gates")
        self.gated = builder.gated("sigmoid")
        self.space = builder.decaying(layer, state)
        self.norm = builder.rms_norm("norm", state.values, EPS, before="o")
        self.out = linear("out_proj", state.values, hidden, role="o")
        # What transformers computes from the rates.
        builder.ignore("slope_rate", "query_decay", "key_decay", "diagonal_decay")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        qkv = self.qkv(x, ctx)
        y = self.norm(self.space(self.gated(qkv, qkv), ctx))
        return self.out(self.gated(y, self.gate(x, ctx)), ctx, residual)


def decay_rates(layers: int, layer: int, heads: int) -> tuple[float, ...]:
    """Return how fast the heads of a layer forget (`StateSpec.rates`): later layers forget less."""
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return tuple(factor * 2.0 ** (-8 * (head + 1) / heads) for head in range(heads))


class MiniMaxLayer(NormedLayer):
    """Attention, then experts; each reads the residual stream, normalised, and the next stream is
    a sum of what it read and of its output, each times a factor."""

    before = ("", "")

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        attention = partial(
            mixer, attention=GroupedQueryAttention, keeper=LightningAttention, scope="self_attn"
        )
        super().__init__(spec, builder, layer, attention, experts)
        kept, added, kept_of_mlp, added_of_mlp = spec.layers[layer].factors
        pairs = (kept, added), (kept_of_mlp, added_of_mlp)
        self.sums: list[tuple[Sum, Scale | None]] = [
            (
                builder.scaled_sum(alpha),
                None if beta == 1.0 else builder.scaled_columns([(spec.hidden_size, beta)]),
            )
            for alpha, beta in pairs
        ]

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attention_norm, mlp_norm = self.norms
        x = attention_norm(x)
        x = self._joined(0, x, self.attention(x, None, rotation, ctx))
        x = mlp_norm(x)
        return self._joined(1, x, self.mlp(x, ctx))

    def _joined(self, block: int, x: Tensor, y: Tensor) -> Tensor:
        """x, y [tokens, hidden] -> their sum, times the factors of a block."""
        add, scaled = self.sums[block]
        return add(x, y if scaled is None else scaled(y))


def minimax_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Lightning and full attention, by `layer_types` or by the numbers of published files."""

    def factors(kind: str) -> tuple[float, ...]:
        return tuple(
            fields.number(f"{name}_{letter}_factor", 1e-6, 1e6, 1.0)
            for name in (f"{kind}_attn", "mlp")
            for letter in ("alpha", "beta")
        )

    if fields.raw("shared_intermediate_size") not in (None, 0):
        raise fields.error("shared_intermediate_size", "must be 0: no expert is shared")
    if "layer_types" not in fields and KINDS in fields:
        kinds = fields.numbers(KINDS, 0, 1)
        if len(kinds) != layers or not any(kinds):
            reason = f"must have {layers} entries, not all of them 0, not {shown(list(kinds))}"
            raise fields.error(KINDS, reason)
        types = tuple(FULL if kind else LINEAR for kind in kinds)
    else:
        types = layer_types(fields, layers, 2, LINEAR, first=True)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    dim = fields.integer("head_dim", 1, MAX_WIDTH, max(1, hidden // heads))
    rotated = fields.integer("rotary_dim", 2, dim, dim)
    rope = read_rope(fields, positions, fraction=rotated / dim)
    attends = LayerSpec(None, rope, factors=factors("full"))
    keeps = LayerSpec(factors=factors("linear"))
    made = layers_with_states(fields, attends, LINEAR, keeps, types)
    state = StateSpec(0, 1, False, heads, heads, dim, dim, gates=1)
    return tuple(
        layer
        if layer is attends
        else replace(layer, state=replace(state, rates=decay_rates(layers, i, heads)))
        for i, layer in enumerate(made)
    )


MINIMAX = Architecture(
    "MiniMaxForCausalLM",
    "minimax",
    "MiniMax-Text-01, as transformers stores it",
    partial(Decoder, make_layer=MiniMaxLayer),
    layers=minimax_layers,
    experts=partial(read_experts, inner="intermediate_size", router=normalised_router),
    fixed={"postnorm": True},
    older=OLDER,
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    eos_token_ids=(2,),
)
MINIMAX_TEXT_01 = replace(
    MINIMAX,
    name="MiniMaxText01ForCausalLM",
    model_type="minimax_text_01",
    models="MiniMax-Text-01",
    eos_token_ids=(),
)
MINIMAX_M1 = replace(
    MINIMAX_TEXT_01, name="MiniMaxM1ForCausalLM", model_type="minimax_m1", models="MiniMax-M1"
)
