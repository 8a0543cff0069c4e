"""The parts of most decoders: grouped-query attention, an MLP or experts, layers that combine them
in five ways, and the language model.

Many models are this network with other names, another attention or other `ModelFacts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kvik.spec.declare import EXPERT_NAMES, GATE_UP, SINKS, ExpertNames, LayerBuilder
from kvik.spec.declared import Role
from kvik.spec.kv import StateSpec
from kvik.spec.layers import PredictorSpec
from kvik.spec.model import ModelFacts
from kvik.spec.network import ALL, FeedForward, ForwardContext, LinearLayer, Norm, PositionTable

if TYPE_CHECKING:
    from torch import Tensor

QKV = ("q_proj", "k_proj", "v_proj")
NAMES = ("embed_tokens", "layers", "norm", "lm_head")  # of the parts of a `Decoder`


class GroupedQueryAttention:
    """Grouped-query attention (Ainslie et al. 2023), with rotary positions, ALiBi or neither.

    Args:
        scope: of its names.
        qkv: names of the projections of queries, keys and values, or of one for all three.
        o: name of the output projection.
        norms: names of the RMSNorm on each head of q and of k, "" for one without a gain; (): none.
            They precede the rotation, unless `RopeSpec.then_normed`.
        offset: of the norms' gains.
        by_head, shards, gated, full_rows: as in `LayerBuilder.heads`.
        sinks: each head has a learned score in the softmax without a key or value.
        sink_name: of these scores.
        distances: biases of scores, as `LayerBuilder.distances` returns them; None: none.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        scope: str = "self_attn",
        qkv: tuple[str, ...] = QKV,
        o: str = "o_proj",
        norms: tuple[str, ...] = (),
        offset: float = 0.0,
        by_head: bool = False,
        shards: int = 0,
        gated: bool = False,
        full_rows: bool = False,
        sinks: bool = False,
        sink_name: str = SINKS,
        distances: Tensor | None = None,
    ) -> None:
        hidden, facts, inner = spec.hidden_size, spec.layers[layer], builder.at(scope)
        heads, (kv_heads, dim) = spec.query_heads(facts), spec.heads(facts)
        counts = (heads, kv_heads, kv_heads)
        self.qkv = inner.heads(
            qkv,
            hidden,
            counts,
            dim,
            bias=spec.qkv_bias,
            rope=facts.rope,
            by_head=by_head,
            shards=shards,
            gated=gated,
            full_rows=full_rows,
            value_dim=facts.value_dim,
            limit=spec.scales.qkv_limit,
        )
        norm = partial(inner.rms_norm, dim=dim, eps=spec.norm_eps, offset=offset, rope=facts.rope)
        made = [norm(name) if name else inner.plain_norm(dim, spec.norm_eps) for name in norms]
        scale = facts.query_scale
        self.scale = None if scale is None else inner.query_scale(scale)
        self.attend = inner.attention(
            layer,
            facts,
            dim,
            spec.scales.attention,
            norms=(made[0], made[1]) if made else None,
            softcap=spec.scales.attention_cap,
            sinks=heads if sinks else 0,
            sink_name=sink_name,
            distances=distances,
        )
        width = heads * spec.value_dim(facts)
        self.o = inner.linear(o, width, hidden, bias=spec.o_bias, role="o")
        # Some old checkpoints contain frequencies and causal masks.
        inner.ignore("rotary_emb.inv_freq", "bias", "masked_bias", "causal_mask")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] or None -> [tokens, hidden]."""
        attended = self.attend(*self.heads(x, ctx), ctx, rotation)
        return self.o(self.output(attended, x, ctx), ctx, residual)

    def heads(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] -> q, k and v, [tokens, heads or kv_heads, head_dim]."""
        q, k, v = self.qkv(x, ctx)
        return q if self.scale is None else self.scale(q, ctx), k, v

    def output(self, attended: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor:
        """attended [tokens, heads * value_dim], x [tokens, hidden] -> what `o` reads."""
        return attended


class GatedOutputAttention(GroupedQueryAttention):
    """Grouped-query attention with RMSNorm on each head of q and k; its output is multiplied by a
    function of a projection of the input (Qiu et al. 2025, arXiv 2505.06708).

    Args:
        each_head: it has one number for each head, else one for each channel.
        gate: name of the projection.
        by: the function, as in `LayerBuilder.gated`.
        offset: of the norms' gains.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        each_head: bool = False,
        gate: str = "gate_proj",
        by: str = "sigmoid",
        offset: float = 0.0,
    ) -> None:
        norms = "q_norm", "k_norm"
        super().__init__(spec, builder, layer, norms=norms, offset=offset, full_rows=True)
        facts, inner = spec.layers[layer], builder.at("self_attn")
        width = spec.query_heads(facts) * (1 if each_head else spec.heads(facts)[1])
        self.gate = inner.linear(gate, spec.hidden_size, width, bias=False, role="gates")
        self.gated = builder.gated(by)

    def output(self, attended: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor:
        return self.gated(attended, self.gate(x, ctx))


# x, residual [tokens, hidden] or None, rotation [tokens, head_dim] or None -> [tokens, hidden]
AttentionBlock: TypeAlias = (
    "Callable[[Tensor, Tensor | None, Tensor | None, ForwardContext], Tensor]"
)
# the residual stream x [tokens, hidden], rotation -> the stream one layer later
Layer: TypeAlias = "Callable[[Tensor, Tensor | None, ForwardContext], Tensor]"

# Each makes a part of the model in the scope of the builder.
MakeAttention = Callable[[ModelFacts, LayerBuilder, int], AttentionBlock]
MakeStateKeeper = Callable[[ModelFacts, LayerBuilder, int, StateSpec], AttentionBlock]
MakeFeedForward = Callable[[ModelFacts, LayerBuilder, int], FeedForward]
MakeLayer = Callable[[ModelFacts, LayerBuilder, int], Layer]
MakeNorm = Callable[[ModelFacts, LayerBuilder], Norm]
MakePositions = Callable[[ModelFacts, LayerBuilder], PositionTable]


def feed_forward(
    spec: ModelFacts,
    builder: LayerBuilder,
    layer: int,
    scope: str = "mlp",
    names: ExpertNames = EXPERT_NAMES,
    gate_up: tuple[str, ...] = GATE_UP,
    down: str = "down_proj",
    activation: str = "silu_and_mul",
    up_first: bool = False,
    down_bias: bool | None = None,
) -> FeedForward:
    """Return the MLP of a layer, or its routed experts.

    Args:
        scope: of the MLP or the experts.
        names: of the experts in it.
        gate_up, down, activation, up_first, down_bias: of the MLP, as in `LayerBuilder.gated_mlp`.
    """
    experts, inside = spec.layers[layer].experts, builder.at(scope)
    if experts is not None:
        return inside.experts(spec.hidden_size, experts, names)
    return inside.gated_mlp(
        spec.hidden_size,
        spec.inner(spec.layers[layer]),
        bias=spec.mlp_bias,
        names=gate_up,
        down=down,
        activation=activation,
        limit=spec.layers[layer].limit,
        up_first=up_first,
        down_bias=down_bias,
    )


def plain_mlp(
    spec: ModelFacts, builder: LayerBuilder, layer: int, up: str, down: str, scope: str = "mlp"
) -> FeedForward:
    """Return an MLP without a gate, by the names of its matrices and their scope."""
    hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    return builder.at(scope).mlp(up, down, hidden, inner, bias=bias, activation=spec.activation)


def layer_norms(
    spec: ModelFacts, builder: LayerBuilder, offset: float = 0.0, bias: bool = True
) -> Callable[..., Norm]:
    """Return a function that makes norms of the model's kind over the residual stream, by name.

    Args:
        offset: of the norms' gains.
        bias: LayerNorms have a bias.
    """
    make = builder.rms_norm if spec.rms_norm else partial(builder.layer_norm, bias=bias)
    return partial(make, dim=spec.hidden_size, eps=spec.norm_eps, offset=offset)


def plain_norm(spec: ModelFacts, builder: LayerBuilder) -> Norm:
    """Return a norm of the model's kind over the residual stream, without a gain."""
    return builder.plain_norm(spec.hidden_size, spec.norm_eps, centred=not spec.rms_norm)


def last_norm(
    spec: ModelFacts,
    builder: LayerBuilder,
    name: str = "norm",
    offset: float = 0.0,
    bias: bool = True,
) -> Norm:
    """Return the norm after the last layer, whose gain includes the scale of the logits.

    Args:
        offset, bias: as in `layer_norms`.
    """
    return layer_norms(spec, builder, offset, bias)(name, scale=spec.scales.logits)


def mixer(
    spec: ModelFacts,
    builder: LayerBuilder,
    layer: int,
    attention: MakeAttention,
    keeper: MakeStateKeeper,
    scope: str,
) -> AttentionBlock:
    """Return the attention of a layer, or what keeps its state, in a scope of its names."""
    state = spec.layers[layer].state
    if state is None:
        return attention(spec, builder, layer)
    return keeper(spec, builder.at(scope), layer, state)


class NormedLayer:
    """Attention, an MLP or experts, and norms; subclasses combine them.

    Args:
        norms: names of the norms, in the order in which they compute, "" for one without a gain;
            (): the usual ones.
        offset, norm_bias: as in `layer_norms`.
    """

    usual_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    before: tuple[Role, ...] = ("qkv", "gate_up")  # the only reader of each norm; "": several

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        attention: MakeAttention = GroupedQueryAttention,
        feed: MakeFeedForward = feed_forward,
        norms: tuple[str, ...] = (),
        offset: float = 0.0,
        norm_bias: bool = True,
    ) -> None:
        make = layer_norms(spec, builder, offset, norm_bias)
        up: Role = "gate_up" if spec.gated_mlp else "up"
        names = norms or self.usual_norms
        readers = self.before if len(names) > 1 else ("",)  # attention and MLP share one norm
        self.norms = [
            make(name, before=up if role == "gate_up" else role)
            if name
            else plain_norm(spec, builder)
            for name, role in zip(names, readers, strict=True)
        ]
        self.attention = attention(spec, builder, layer)
        self.mlp = feed(spec, builder, layer)


class PreNormLayer(NormedLayer):
    """Attention, then MLP or experts; each reads the normalised residual stream and adds to it."""

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attention_norm, mlp_norm = self.norms
        x = self.attention(attention_norm(x), x, rotation, ctx)
        return self.mlp(mlp_norm(x), ctx, x)


class ParallelLayer(NormedLayer):
    """Attention and MLP in parallel; both read the residual stream, normalised by one norm for both
    or by one for each, and add to it."""

    usual_norms = ("input_layernorm",)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        normed, *second = (norm(x) for norm in self.norms)
        fed = second[0] if second else normed
        return self.mlp(fed, ctx, self.attention(normed, x, rotation, ctx))


class PostNormLayer(NormedLayer):
    """Attention, then MLP; each reads the residual stream, and its output is normalised and added
    to the stream."""

    usual_norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    before = ("", "")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attended_norm, fed_norm = self.norms
        x = attended_norm.add(self.attention(x, None, rotation, ctx), x)
        return fed_norm.add(self.mlp(x, ctx), x)


class NormedSumLayer(NormedLayer):
    """Attention, then MLP; each adds to the residual stream, and the sum is normalised (Vaswani et
    al. 2017, section 3.1)."""

    before = ("", "")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attended_norm, fed_norm = self.norms
        x = attended_norm(self.attention(x, x, rotation, ctx))
        return fed_norm(self.mlp(x, ctx, x))


class SandwichLayer(NormedLayer):
    """Attention, then MLP; each reads the normalised residual stream, and its output is normalised
    and added to the stream."""

    usual_norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    before = ("qkv", "", "gate_up", "")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attention_norm, attended_norm, mlp_norm, fed_norm = self.norms
        x = attended_norm.add(self.attention(attention_norm(x), None, rotation, ctx), x)
        return fed_norm.add(self.mlp(mlp_norm(x), ctx), x)


class Decoder:
    """The language model.

    Args:
        make_layer: makes a layer in the scope of its names.
        make_norm: makes the norm after the last layer; None: like the model's other norms.
        scopes: of all but the head; the first one in the checkpoint is taken.
        names: of the embedding, the layers, the last norm and the head; "": no such norm or head.
        make_positions: makes the table of learned positions; None: none.
        embed_norm: name of the norm of embeddings; "": none.
        types: name of a table of token types, of which the first is added to embeddings; "": none.
        halves: number of layers that have one number in the checkpoint.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        make_layer: MakeLayer = PreNormLayer,
        make_norm: MakeNorm | None = None,
        scopes: tuple[str, ...] = ("model", ""),
        names: tuple[str, str, str, str] = NAMES,
        make_positions: MakePositions | None = None,
        embed_norm: str = "",
        types: str = "",
        halves: int = 1,
    ) -> None:
        embed, layers, last, head = names
        trunk = builder.at(*scopes)
        self.embed = trunk.token_embedding(
            embed,
            spec.vocab_size,
            spec.embedding_size,
            tied=spec.tie_word_embeddings and head != "",
            bias=spec.head_bias,
            scale=spec.scales.embedding,
            types=(types, spec.token_types),
        )
        self.positions = None if make_positions is None else make_positions(spec, trunk)
        self.embed_norm = layer_norms(spec, trunk)(embed_norm) if embed_norm else None
        self.ropes = [builder.rope(rope, width) for rope, width in spec.rotations]
        pairs = [spec.rotation(layer) for layer in spec.layers]
        self.turned = [None if pair is None else spec.rotations.index(pair) for pair in pairs]
        self.layers = [
            make_layer(spec, trunk.at(layers).at(layer // halves, layer=layer), layer)
            for layer in range(spec.num_layers)
        ]
        self.norm: Norm | None = None
        if make_norm is not None:
            self.norm = make_norm(spec, trunk)
        elif last:
            self.norm = last_norm(spec, trunk, last)
        self.lm_head: LinearLayer | None = None
        if head:
            self.lm_head = builder.lm_head(
                head, self.embed, bias=spec.head_bias, softcap=spec.scales.logits_cap
            )
        self.predictor: Predictor | None = None
        if spec.predictor is not None:
            self.predictor = Predictor(spec, builder, spec.predictor, self, make_layer)

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        x = self.embed(ids)
        if self.positions is not None:
            x = self.positions.add(ctx.positions, x)
        return x if self.embed_norm is None else self.embed_norm(x)

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        """Return additional inputs of the layers, computed from token ids; here None."""
        return None

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Take the residual stream x [tokens, hidden] through the layers of `span`."""
        rotations = [rope.at(ctx.positions) for rope in self.ropes]
        numbers = range(len(self.layers))[span]
        for number, layer, rope in zip(numbers, self.layers[span], self.turned[span], strict=True):
            if ctx.taps is not None:
                ctx.taps.see(number, x)
            x = layer(x, None if rope is None else rotations[rope], ctx)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] after the last layer -> normalised, if there is a norm."""
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32; an encoder has none."""
        assert self.lm_head is not None
        return self.lm_head(hidden)


class Predictor:
    """The head of a model that predicts the token after the next one; see `PredictorSpec`.

    A forward reads the hidden states of the tokens before its tokens from `hidden`; its own hidden
    state may take the place of the model's to predict one more token.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        names: PredictorSpec,
        model: Decoder,
        make_layer: MakeLayer,
    ) -> None:
        inner, hidden = builder.at(names.scope.format(spec.num_layers)), spec.hidden_size
        norm = layer_norms(spec, inner, names.offset)
        self.norms = norm(names.embedding), norm(names.hidden)
        self.joined = inner.joined()
        self.join = inner.linear(names.join, 2 * hidden, hidden, bias=False)
        block = inner.at(names.layer) if names.layer else inner
        self.layer = make_layer(
            replace(spec, layers=spec.cached_layers, predictor=None), block, spec.num_layers
        )
        self.norm = norm(names.norm)
        self.hidden_first = names.hidden_first
        self.model = model
        self.turned = model.turned[spec.last_attending]
        # [most tokens of a step, hidden], which the worker allocates.
        self.hidden: Tensor | None = None

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> their embeddings and `hidden`, joined, [tokens, hidden]."""
        assert self.hidden is not None
        embedded = self.norms[0](self.model.embed(ids))
        hidden = self.norms[1](self.hidden[: len(ids)])
        pair = (hidden, embedded) if self.hidden_first else (embedded, hidden)
        return self.join(self.joined(*pair), ctx)

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        return None

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Take x [tokens, hidden] through the layer."""
        rope = None if self.turned is None else self.model.ropes[self.turned].at(ctx.positions)
        return self.layer(x, rope, ctx)

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] after the layer -> normalised."""
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32, by the model's head."""
        return self.model.logits(hidden)


MAX_PREDICTORS = 8  # multi-token-prediction layers after the last one


def skip_predictors(spec: ModelFacts, builder: LayerBuilder) -> None:
    trunk = builder.at("model")
    for layer in range(spec.num_layers, spec.num_layers + MAX_PREDICTORS):
        trunk.skip(f"layers.{layer}")


def without_predictors(
    spec: ModelFacts,
    builder: LayerBuilder,
    make_layer: MakeLayer,
    names: tuple[str, str, str, str] = NAMES,
) -> Decoder:
    """Return the model of a checkpoint with multi-token-prediction layers, which are skipped.

    Args:
        names: as in `Decoder`.
    """
    skip_predictors(spec, builder)
    return Decoder(spec, builder, make_layer, names=names)
