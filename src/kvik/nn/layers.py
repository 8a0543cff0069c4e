"""The layers that a model is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.attention.base import Attend, AttendLatent, AttentionBackend, AttentionSpec, LatentUp
from kvik.attention.compressed import AttendCompressed, EntryMaker
from kvik.attention.indexed import Indexed
from kvik.kernels.ops import Ops, StateHeads
from kvik.kernels.weights import XIELU_SLOPE, Activation, ExpertSet, Matrix
from kvik.nn.rope import Rope
from kvik.spec.experts import Router
from kvik.spec.kv import CompressedSpec, IndexSpec
from kvik.spec.network import ForwardContext
from kvik.spec.pooling import PooledLayer

# Embeddings at the bottom of a model.


@dataclass(frozen=True, slots=True)
class Embedding:
    """A table of vectors: of tokens, or of positions."""

    ops: Ops
    table: Tensor  # [rows, hidden]
    scale: float = 1.0  # of the vectors

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        rows, width = self.table.shape
        return rows, width

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        rows = self.ops.gather_rows(self.table, ids)
        return rows if self.scale == 1.0 else self.ops.scaled(rows, self.scale)

    def add(self, ids: Tensor, x: Tensor) -> Tensor:
        """x [tokens, hidden] and the vectors of ids [tokens] -> their sum."""
        return self.ops.add(x, self(ids))


@dataclass(frozen=True, slots=True)
class MatrixEmbedding:
    """A token embedding whose vectors are rows of a matrix: it is shared with the head (Press and
    Wolf 2017), or stored in a format that kernels unpack."""

    ops: Ops
    matrix: Matrix
    dtype: torch.dtype  # of the vectors
    tied: bool  # the matrix is the head's
    scale: float = 1.0  # of the vectors
    row_of: Tensor | None = None  # [tokens, 1] int64, the row of each token; None: its id

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        return self.matrix.spec.rows, self.matrix.spec.inputs

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        if self.row_of is not None:
            ids = self.ops.gather_rows(self.row_of, ids)[:, 0]
        rows = self.ops.matrix_rows(self.matrix, ids, self.dtype)
        return rows if self.scale == 1.0 else self.ops.scaled(rows, self.scale)


@dataclass(frozen=True, slots=True)
class TypedEmbedding:
    """A token embedding with the vector of the only token type added."""

    ops: Ops
    embedding: Callable[[Tensor], Tensor]
    kind: Tensor  # [1, hidden]

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        x = self.embedding(ids)
        return self.ops.add(x, self.kind.expand_as(x))


# Normalisation layers.


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """RMSNorm, x / rms(x) * weight (Zhang and Sennrich 2019), over the last axis."""

    ops: Ops
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [..., dim], residual [tokens, the rest flattened] -> residual + norm(x)."""
        return self.ops.add(residual, self(x).view_as(residual))


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / std * weight + bias (Ba et al. 2016), over the last axis."""

    ops: Ops
    weight: Tensor  # [dim], or [heads, dim] if each head has its own
    bias: Tensor  # likewise
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [tokens, dim] -> residual + norm(x)."""
        return self.ops.add(residual, self(x))


# Attention over the paged cache.


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(q k^T * scale) v of one layer, over the keys that each query sees."""

    backend: AttentionBackend
    position: int  # of the layer that stores its keys, among layers that store any
    group: int  # KV group of that layer
    spec: AttentionSpec
    q_rope: Rope | None = None  # rotation of q, if it differs from k's
    sink_rope: Rope | None = None  # rotation of q for sinks, if the window has any
    index: IndexSpec | None = None  # KV heads choose blocks of keys; None: all keys are read

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        ctx: ForwardContext,
        rotation: Tensor | None = None,
        indexed: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Normalise and rotate q and k, store k and v, attend; see `AttentionLayer`.

        Args:
            rotation: [tokens, head_dim] fp32, from `Rope.at`; None: no rotary positions.
        """
        kv, metadata = ctx.kv[self.position], ctx.metadata[self.group]
        q_rotation = None if self.q_rope is None else ctx.once(self.q_rope.at)
        for_sinks = None
        if self.sink_rope is not None and rotation is not None:
            for_sinks = ctx.once(self.sink_rope.after_keys)
        attend = Attend(q, k, v, kv, metadata, self.spec, rotation, q_rotation, for_sinks)
        if self.index is not None and indexed is not None and rotation is not None:
            of = Indexed(self.index, *indexed, None, rotation)
            if choice := self.backend.choose(of, kv, metadata.layout):
                return self.backend.run_by_head(attend, choice).flatten(1)
        return self.backend.run(attend).flatten(1)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention of one layer over latent vectors, causal, over everything cached (`LatentSpec`)."""

    backend: AttentionBackend
    position: int
    group: int  # KV group of the layer
    spec: AttentionSpec
    up: LatentUp
    index: IndexSpec | None = None
    pool_bias: Tensor | None = None  # as in `Indexed`

    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        ctx: ForwardContext,
        rotation: Tensor | None,
        indexed: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Rotate q_rope and k_rope, store latent and k_rope, attend; see `LatentAttentionLayer`."""
        kv, metadata = ctx.kv[self.position], ctx.metadata[self.group]
        attend = AttendLatent(q, q_rope, latent, k_rope, self.up, kv, metadata, self.spec, rotation)
        if self.index is not None:
            if indexed is not None:
                of = Indexed(self.index, *indexed, rotation, self.pool_bias)
                ctx.chosen[:] = self.backend.choose(of, kv, metadata.layout)
            attend = replace(attend, choice=ctx.chosen or None)
        return self.backend.run_latent(attend).flatten(1)


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention of one layer over a window and over entries (`CompressedSpec`)."""

    backend: AttentionBackend
    places: tuple[tuple[int, int], ...]  # position and KV group of each of its caches
    spec: CompressedSpec
    makers: tuple[EntryMaker, ...]
    window: int
    scale: float
    sinks: Tensor
    down: Matrix
    local_heads: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        inputs: Tensor | None,
        indexed: tuple[Tensor, Tensor] | None,
        rotation: Tensor,
        ctx: ForwardContext,
    ) -> Tensor:
        """See `CompressedAttentionLayer`."""
        caches = tuple(ctx.kv[position].k for position, _ in self.places)
        layouts = tuple(ctx.metadata[group].layout for _, group in self.places)
        facts = self.window, self.scale, self.sinks, self.down, self.local_heads
        of = self.spec, self.makers, caches, layouts, *facts
        attend = AttendCompressed(q, k, inputs, indexed, rotation, *of)
        return self.backend.run_compressed(attend).flatten(1)


# Layers that keep a state of each request.


@dataclass(frozen=True, slots=True)
class CausalConv:
    """A convolution of each channel over the last tokens of a sequence."""

    ops: Ops
    weight: Tensor  # [width, channels]
    bias: Tensor | None
    position: int  # among the layers that keep a state
    silu: bool

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [tokens, channels] -> [tokens, channels]."""
        states, sequences = ctx.states[self.position], ctx.metadata[0].layout.sequences
        return self.ops.causal_conv(
            x, self.weight, self.bias, states.convolved, sequences, self.silu
        )


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The gated delta rule (Yang et al. 2024) or a state space (Gu and Dao 2023, Dao and Gu 2024)
    of one layer."""

    ops: Ops
    heads: StateHeads
    position: int  # among the layers that keep a state

    def __call__(self, x: Tensor, gates: Tensor, ctx: ForwardContext) -> Tensor:
        """x [tokens, inputs], gates [tokens, numbers of a head * value_heads] -> [tokens,
        value_heads * value_dim]."""
        states, sequences = ctx.states[self.position], ctx.metadata[0].layout.sequences
        return self.ops.recurrence(x, gates, self.heads, states.matrices, states.log, sequences)


# Queries, keys and values: projections of one input, cut into heads.


@dataclass(frozen=True, slots=True)
class Heads:
    """Several projections of x. Consecutive projections with the same storage format form one
    matrix."""

    linears: Sequence[Linear]
    # Number of heads of each projection, and their dimension, for each of `linears`.
    heads: Sequence[tuple[tuple[int, int], ...]]
    clip: Callable[[Tensor], Tensor] | None = None  # of all projections; None: nothing

    def __call__(self, x: Tensor, ctx: ForwardContext | None) -> list[Tensor]:
        """x [tokens, inputs] -> [tokens, heads, dimension] of each projection."""
        projections: list[Tensor] = []
        for linear, sizes in zip(self.linears, self.heads, strict=True):
            fused = linear(x, ctx)
            fused = fused if self.clip is None else self.clip(fused)
            parts = fused.split_with_sizes([heads * dim for heads, dim in sizes], 1)
            projections += [
                part.unflatten(1, size) for part, size in zip(parts, sizes, strict=True)
            ]
        return projections


# Feed-forward blocks.


@dataclass(slots=True)
class Xielu:
    """xIELU (Huang and Schlag 2024), whose two factors are learned."""

    ops: Ops
    # [2] fp32, above and below 0; on the host `positive` and `negative`, once loaded.
    factors: Tensor
    positive: float = 0.0
    negative: float = 0.0

    def fill(self, place: int, first: int, values: Tensor) -> None:
        """Take a factor from its stored form: softplus(values [1]), below 0 plus the slope at 0."""
        self.factors[place] = F.softplus(values.float())[0] + XIELU_SLOPE * place
        self.on_host()

    def on_host(self) -> None:
        self.positive, self.negative = self.factors.tolist()

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, dim] -> [tokens, dim]."""
        return self.ops.xielu(x, self.positive, self.negative)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(activation(up(x))) + residual. With a gate (SwiGLU and GEGLU, Shazeer 2020) `up` has the
    rows of both gate and up."""

    up: Linear
    down: Linear
    # In place of the activation of `up`.
    between: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self, x: Tensor, ctx: ForwardContext | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        made = self.up(x, ctx)
        return self.down(made if self.between is None else self.between(made), ctx, residual)


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """Routed experts of which each request chooses changes, or none.

    Each pair of a token and an expert is a row. The two matrices of an expert are multiplied
    separately, since products of adapters come in between: each is an MLP whose other matrix is the
    identity, which changes no value. The number of a pair of A and B is that of the adapter times
    the number of experts, plus that of the expert."""

    ops: Ops
    # up, down: the first matrix of each expert and its second one.
    up: ExpertSet
    down: ExpertSet
    # up_pairs, down_pairs: what adapters add to them; None: nothing.
    up_pairs: Adapters | None
    down_pairs: Adapters | None
    activation: Activation  # between the two
    weigh_inputs: bool  # see `ExpertSet`

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        residual: Tensor | None,
        ctx: ForwardContext | None,
    ) -> Tensor:
        """x, residual [tokens, hidden], ids, weights [tokens, active] as `Ops.route` returns them
        -> [tokens, hidden]."""
        (tokens, active), of_pairs = ids.shape, ids.view(-1, 1)
        rows = x.repeat_interleave(active, 0)
        if self.weigh_inputs:
            rows = (rows * weights.view(-1, 1)).to(x.dtype)
        chosen = None if ctx is None else ctx.metadata[0].layout.adapters
        if chosen is not None:
            numbers = chosen[:, None] * len(self.up.up) + ids
            chosen = numbers.masked_fill((chosen[:, None] < 0) | (ids < 0), -1).view(-1)
        inner = self.ops.experts(rows, of_pairs, None, self.up, None)
        if self.up_pairs is not None:
            inner = self.up_pairs.add(rows, inner, chosen)
        inner = self.ops.activate(inner, self.activation)
        made = self.ops.experts(inner, of_pairs, None, self.down, None)
        if self.down_pairs is not None:
            made = self.down_pairs.add(inner, made, chosen)
        wide = made.view(tokens, active, -1).float()
        if not self.weigh_inputs:
            wide *= weights[:, :, None]
        total = wide[:, 0]
        for place in range(1, active):  # the order of a sum of torch may depend on `tokens`
            total = total + wide[:, place]
        return (total if residual is None else total + residual).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, and optionally a shared MLP for every token (`ExpertsSpec`)."""

    ops: Ops
    router: Linear  # computes the routing logits, fp32
    rule: Router
    correction: Tensor | None  # [outputs] fp32, of `rule`
    experts: ExpertSet
    shared: MLP | None
    gate: Linear | None  # one number per token, for the output of `shared`
    scales: Tensor | None = None  # [experts] fp32, of `rule`
    adapted: AdaptedExperts | None = None  # the same experts with adapters
    table: Tensor | None = None  # [vocab, active] int64, the experts of each token, of `rule`

    def __call__(
        self,
        x: Tensor,
        ctx: ForwardContext | None = None,
        residual: Tensor | None = None,
        *,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """See `RoutedExperts`."""
        logits = self.router(x if routed_by is None else routed_by, ctx)
        given_ids = None
        if self.table is not None:
            assert ctx is not None and ctx.token_inputs is not None
            given_ids = self.ops.gather_rows(self.table, ctx.token_inputs)
        ids, weights = self.ops.route(logits, self.rule, self.correction, self.scales, given_ids)
        if self.shared is not None and self.gate is None:
            residual = self.shared(x, ctx, residual)
        elif self.shared is not None and self.gate is not None:
            shared = self.ops.gated(self.shared(x, ctx), self.gate(x, ctx), "sigmoid")
            residual = shared if residual is None else self.ops.add(residual, shared)
        if self.rule.zero:
            returned = self.ops.gated(x, weights[:, -1:], "none")
            residual = returned if residual is None else self.ops.add(residual, returned)
        if self.adapted is not None:
            return self.adapted(x, ids, weights, residual, ctx)
        return self.ops.experts(x, ids, weights, self.experts, residual)


@dataclass(slots=True)
class LearnedScale:
    """x times a scalar of the checkpoint."""

    ops: Ops
    value: Tensor  # [1]
    factor: float = 1.0  # the value on the host, once loaded

    def fill(self, first: int, values: Tensor) -> None:
        self.value.copy_(values)
        self.factor = float(values)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return x if self.factor == 1.0 else self.ops.scaled(x, self.factor)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The low-rank matrices of a layer from which each request chooses a pair, or none (Hu et al.
    2021; Chen et al. 2023, "Punica", arXiv 2310.18547)."""

    ops: Ops
    pairs: ExpertSet  # A and B of each adapter, the same ranks for all

    def __call__(self, x: Tensor, y: Tensor, ctx: ForwardContext | None) -> Tensor:
        """x [tokens, inputs], y = x W^T + b [tokens, rows of W] -> y + B A x, with A and B of each
        token's adapter."""
        return self.add(x, y, None if ctx is None else ctx.metadata[0].layout.adapters)

    def add(self, x: Tensor, y: Tensor, chosen: Tensor | None) -> Tensor:
        """The same with the pair of each row: chosen [rows] int64, below 0 for none; None: no row
        has one."""
        return y if chosen is None else self.ops.experts(x, chosen[:, None], None, self.pairs, y)


@dataclass(frozen=True, slots=True)
class Linear:
    """y = activation(x W^T + b) + residual.

    Without adapters this is one operation. With adapters their products are added before the
    activation, and the matrix itself has none.
    """

    ops: Ops
    matrix: Matrix
    adapters: Adapters | None = None
    activation: Activation | None = None  # applied after the adapters; None: none, or the matrix's

    def __call__(
        self, x: Tensor, ctx: ForwardContext | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [tokens, inputs], residual [tokens, outputs] -> [tokens, outputs].

        Args:
            ctx: says which adapters are used; None outside of a forward pass.
        """
        if self.adapters is None:
            return self.ops.linear(x, self.matrix, residual)
        y = self.adapters(x, self.ops.linear(x, self.matrix, None), ctx)
        if self.activation is not None:
            y = self.ops.activate(y, self.activation)
        return y if residual is None else self.ops.add(y, residual)


POOLED_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class PooledHead:
    """Layers over the pooled vector of a prompt (`PoolingSpec`), in fp32.

    These are a few small products per prompt, so torch computes one prompt at a time: results do
    not depend on the other prompts in the step.
    """

    # Each with its weight [outputs, inputs], or [outputs] of a norm, and bias.
    layers: Sequence[tuple[PooledLayer, Tensor, Tensor | None]]

    def __call__(self, x: Tensor) -> Tensor:
        """x [hidden] fp32 -> [outputs] fp32."""
        for layer, weight, bias in self.layers:
            if layer.norm_eps is not None:
                x = F.layer_norm(x, weight.shape, weight, bias, layer.norm_eps)
            else:
                x = F.linear(x, weight, bias)
            x = POOLED_FUNCTIONS[layer.function](x)
        return x
