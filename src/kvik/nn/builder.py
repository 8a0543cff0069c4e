"""Builds a model's layers: a model declares each layer by its checkpoint name, and gets the layer
with weights to be loaded later (nn/parameters.py).

So models have no loading code and do not know how their weights are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend, AttentionSpec, HeadNorms, LatentUp
from kvik.attention.compressed import EntryMaker
from kvik.kernels.ops import Gate, StateHeads
from kvik.kernels.weights import Activation, Matrix, MatrixSpec, float_kind, float_weight
from kvik.nn.checkpoint import layer_of
from kvik.nn.feed_forward import FeedForwardBuilder, MLPShape
from kvik.nn.formats.base import LinearShape
from kvik.nn.layers import (
    MLP,
    Attention,
    CausalConv,
    CompressedAttention,
    Embedding,
    Experts,
    Heads,
    LatentAttention,
    LayerNorm,
    LearnedScale,
    Linear,
    MatrixEmbedding,
    PooledHead,
    Recurrence,
    RMSNorm,
    TypedEmbedding,
)
from kvik.nn.parameters import (
    BIAS,
    KV_SCALES,
    LayerNames,
    Parameters,
    fill_moved,
    fill_scaled,
)
from kvik.nn.parts import (
    HeadRows,
    Quantizer,
    head_places,
    in_parts,
    with_gates,
)
from kvik.nn.rope import Rope
from kvik.spec.declare import (
    EXPERT_NAMES,
    GATE_UP,
    NO_PARTS,
    NO_TYPES,
    POOL_BIAS,
    SINKS,
    ExpertNames,
    LayerBuilder,
    usual_scope,
)
from kvik.spec.declared import SMALL, Declaration, Role
from kvik.spec.experts import ExpertsSpec
from kvik.spec.kv import CompressedSpec, IndexSpec, KVGroup, StateSpec
from kvik.spec.layers import LatentSpec, LayerSpec, QueryScale
from kvik.spec.network import (
    ForwardContext,
    Gated,
    Join,
    LinearLayer,
    Mixture,
    PositionTable,
    Rescale,
    Scale,
    ScaledQueriesLayer,
    StateLayer,
    Sum,
    TokenTable,
    WeightedSums,
)
from kvik.spec.pooling import PoolingSpec
from kvik.spec.rope import RopeSpec
from kvik.spec.shares import Between, PipelineStage
from kvik.spec.stored_weights import TRUNKS, stored_alike

WEIGHT = "weight"
GATES: Mapping[str, Gate] = {gate: gate for gate in get_args(Gate)}


class Builder(LayerBuilder):
    """Builds layers within a scope of the checkpoint's names; `at` narrows the scope."""

    def __init__(
        self,
        parameters: Parameters,
        backend: AttentionBackend,
        groups: Sequence[KVGroup],
        *,
        max_model_len: int,
        stage: PipelineStage | None = None,
    ) -> None:
        """
        Args:
            groups: KV groups in the order of `ForwardContext.metadata`.
            max_model_len: number of positions; fixes the base of "dynamic" rotary embeddings.
            stage: the part of the model to build; None: all of it.
        """
        super().__init__(Declaration())  # for layers of other stages
        self.parameters = parameters
        self.ops = parameters.ops
        self.backend = backend
        self.dtype = parameters.dtype
        self.device = parameters.device
        self.max_model_len = max_model_len
        self.storage = parameters.storage
        self.declared = parameters.declared
        self._stage = stage
        self._groups = groups
        self._ropes: dict[tuple[RopeSpec, int], Rope] = {}
        self._group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        self._q_ropes: dict[tuple[RopeSpec, int], Rope] = {}  # shared by layers
        self._query_scales: dict[QueryScale, Tensor] = {}  # tables shared by layers
        self._position_of = {layer: i for i, layer in enumerate(sorted(self._group_of))}
        self._states: dict[int, int] = {}  # layer that keeps a state -> its number among these
        # What layers with a budget compute, by their number.
        self.budgeted: dict[int, AttentionSpec] = {}

    def at(self, name: str | int, *aliases: str, layer: int | None = None) -> LayerBuilder:
        """Return the builder of a narrower scope; layers of other stages are skipped.

        Args:
            aliases: alternative names, of which the first in the checkpoint is taken; "": no scope,
                as in checkpoints of the bare trunk of a model.
            layer: number of the layer with this name; None: the name.
        """
        if isinstance(name, int) and self._stage is not None and name not in self._stage.layers:
            self.declared.elsewhere.add(f"{self._name(str(name))}.")
            return LayerBuilder(Declaration())
        inner = copy(self)
        inner._scope = self._name(usual_scope(str(name), *aliases))
        trunks = TRUNKS if name == "model" else ()
        for scope in map(self._name, (*trunks, str(name), *aliases)):
            if any(layer.startswith(f"{scope}.") for layer in self.parameters.stored):
                inner._scope = scope
                break
        else:
            if self.parameters.stored and "" in aliases:
                return self
        return inner

    def one_of(self, *names: str) -> str:
        """Return the first name of a layer or tensor that the checkpoint has, else the first."""

        def stored(name: str) -> bool:
            full = self._name(name)
            layer, tensor = layer_of(full)
            is_layer = bool({full, f"{full}.weight"} & self.parameters.stored.keys())
            return is_layer or tensor in self.parameters.stored.get(layer, {})

        return next(filter(stored, names), names[0])

    def skip(self, *scopes: str) -> None:
        """Skip all tensors in some scopes, such as an image encoder."""
        self.declared.skipped.update(f"{self._name(scope)}." for scope in scopes)

    def ignore(self, *names: str) -> None:
        """Ignore tensors that some checkpoints contain and the model does not need."""
        self.declared.ignored.update(self._name(name) for name in names)

    def linear(
        self,
        names: str | tuple[str, ...],
        inputs: int,
        outputs: int | tuple[int, ...],
        *,
        bias: bool,
        role: Role = "",
        transposed: bool = False,
        order: Sequence[int] = (),
        columns: Sequence[int] = (),
        parts: tuple[int, ...] = (),
        activation: Activation | None = None,
        uses: int = 1,
    ) -> Linear:
        """Return the layer x [tokens, inputs] -> [tokens, sum of outputs], fused from one per name.

        Args:
            role: of the matrix in a block; the inputs of "o" may be heads of attention.
            transposed: the checkpoint stores [inputs, outputs].
            order: the output of the checkpoint at each place; (): in the stored order.
            columns: likewise for inputs.
            parts: widths of the parts of query heads that attention reads separately; each part of
                all heads is contiguous; (): none.
            activation: of the outputs; "silu_and_mul" halves them.
            uses: see `DeclaredLinear`.
        """
        places = torch.tensor(order).argsort() if order else None
        names = (names,) if isinstance(names, str) else names
        outputs = (outputs,) if isinstance(outputs, int) else outputs
        shapes = [LinearShape(inputs, width, transposed, tuple(columns)) for width in outputs]
        between = self.declared.heads.get(self._scope) if role == "o" else None
        if between is not None:
            assert between.count * between.width == inputs
            between = replace(between, read=True)
        elif parts and self.parameters.adapters is None:
            heads = sum(outputs) // sum(parts)
            projections = tuple((True, width) for width in parts)
            between = Between(heads, sum(parts), heads, projections)
        return self.parameters.linear(
            self._names(*names),
            shapes,
            bias=bias,
            activation=activation,
            places=places,
            between=between,
            replicable=role in SMALL,
        )

    def heads(
        self,
        names: tuple[str, ...],
        inputs: int,
        heads: tuple[int, ...],
        head_dim: int,
        *,
        bias: bool,
        rope: RopeSpec | None = None,
        by_head: bool = False,
        shards: int = 0,
        gated: bool = False,
        full_rows: bool = False,
        value_dim: int | None = None,
        limit: float | None = None,
    ) -> Heads:
        """Return the projections of x [tokens, inputs] to queries, keys and values.

        Args:
            names: of one layer for each of the three, or of one layer for all. Keys and values, or
                values, may be missing.
            heads: number of heads of each.
            rope: rotation of queries and keys, which decides the order of a head's channels; None:
                the stored order.
            by_head: the one layer has, for each KV head in order, its queries, its key and its
                value.
            shards: number of equal parts of the heads, if the one layer has, for each part in
                order, its queries, its values and its keys; 0: it has not.
            gated: in the layer, a gate follows the queries of each head; in the result, all gates
                follow all queries.
            full_rows: the next operation reads whole rows, not single heads.
            value_dim: dimension of the heads of values, if the three have a layer each; None: that
                of the others.
            limit: all are clipped to +- this; None: they are not.
        """
        clip = None if limit is None else self._clip(limit)
        between, dims = None, [head_dim] * len(heads)
        if value_dim is not None:
            dims[-1] = value_dim
        if not full_rows and len(heads) > 1 and self.parameters.adapters is None:
            between = Between(heads[0], dims[-1], heads[1])
            self.declared.heads[self._scope] = between
        head_counts: list[tuple[int, ...]] = [(count,) for count in heads]  # of each layer
        places = head_places(rope, sum(heads[:2]), head_dim)
        if gated:
            head_counts[0] = (heads[0], heads[0])
            places = with_gates(places, heads[0], heads[1], head_dim)
        if by_head:
            places = in_parts(places, heads, head_dim, heads[-1])
        elif shards:
            places = in_parts(places, heads, head_dim, shards, (0, 2, 1))
        if len(names) == 1:
            total = sum(heads) * head_dim
            if between is not None:
                between = replace(
                    between, projections=tuple((i == 0, head_dim) for i in range(len(heads)))
                )
            shape = LinearShape(inputs, total)
            linear = self.parameters.linear(
                self._names(*names), [shape], bias=bias, places=places, between=between
            )
            return Heads([linear], [tuple((count, head_dim) for count in heads)], clip)
        linears, parts, first = [], [], 0
        for size in self._matrix_sizes(names):
            members = slice(first, first + size)
            sizes = [
                [(count, dims[i]) for count in head_counts[i]] for i in range(first, first + size)
            ]
            widths = tuple(sum(count * dim for count, dim in each) for each in sizes)
            if between is not None:
                projections = [
                    (i == 0, dim) for i, each in enumerate(sizes, first) for _, dim in each
                ]
                between = replace(between, projections=tuple(projections))
            shapes = [LinearShape(inputs, width) for width in widths]
            linears.append(
                self.parameters.linear(
                    self._names(*names[members]), shapes, bias=bias, places=places, between=between
                )
            )
            parts.append(tuple(chain(*sizes)))
            first += size
            if places is not None:
                places = places[sum(widths) :] - sum(widths)
        return Heads(linears, parts, clip)

    def _clip(self, limit: float) -> Callable[[Tensor], Tensor]:
        ops = self.ops
        return lambda x: ops.clipped(x, limit)

    def gated_mlp(
        self,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        names: tuple[str, ...] = GATE_UP,
        down: str = "down_proj",
        activation: Activation = "silu_and_mul",
        sparsity: float = 0.0,
        limit: float = 0.0,
        up_first: bool = False,
        down_bias: bool | None = None,
    ) -> MLP:
        """Return the MLP of gate, up and down projections in this scope.

        Args:
            names: of gate and up, or of one layer for both.
            down: name of the down projection.
            sparsity, limit: as in `LayerSpec`; with a limit the activation is SiLU.
            up_first, down_bias: as in `MLPShape`.
        """
        shape, builder = MLPShape(names, down, hidden, inner, bias), self._feed_forward
        shape = replace(shape, up_first=up_first, down_bias=down_bias)
        if limit:
            return builder.limited(shape, limit)
        if sparsity:
            return builder.sparse(shape, activation, sparsity)
        return builder.mlp(shape, activation)

    def mlp(
        self,
        up: str,
        down: str,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        transposed: bool = False,
        activation: str = "gelu_new",
    ) -> MLP:
        """Return the MLP of the two matrices `up` and `down` of this scope.

        Args:
            activation: by its name in config.json.
        """
        shape = MLPShape((up,), down, hidden, inner, bias, transposed)
        return self._feed_forward.ungated(shape, activation)

    def experts(
        self,
        hidden: int,
        spec: ExpertsSpec,
        names: ExpertNames = EXPERT_NAMES,
        *,
        bias: bool = False,
        activation: Activation = "silu_and_mul",
        shared_activation: Activation | None = None,
        vocab: int = 0,
    ) -> Experts:
        """Return the routed experts of this scope. The router is never quantised.

        Args:
            bias: of the router and of the experts.
            shared_activation: of the shared expert; None: that of the others.
            vocab: number of tokens, if a table has their experts.

        Raises:
            ModelError: the checkpoint stores the experts in several formats.
        """
        of_all = bias, activation, shared_activation, vocab
        return self._feed_forward.experts(hidden, spec, names, *of_all)

    @property
    def _feed_forward(self) -> FeedForwardBuilder:
        return FeedForwardBuilder(self.parameters, self._scope)

    def embedding(
        self,
        name: str,
        rows: int,
        hidden: int,
        *,
        skipped: int = 0,
        types: tuple[str, int] = NO_TYPES,
    ) -> PositionTable:
        """Return a table [rows, hidden].

        Args:
            skipped: number of first rows that are never read.
            types: name and rows of a second table. The result has the sums of all rows with its
                first row, then with its second, `ModelFacts.type_stride` rows later, and so on.
        """
        if self._stage is not None and not self._stage.embeds:
            self.skip(name)
            return super().embedding(name, rows, hidden)
        kinds, count = types
        if not kinds:
            return self._table(name, rows, hidden, skipped)
        full = self._name(f"{name}.weight")
        table = self.storage.tensor(
            full, (count * (skipped + rows), hidden), self.dtype, self.device
        )
        sums = table.view(count, skipped + rows, hidden)
        if not self.storage.names:
            sums.zero_()
            self.parameters.declare(full, sums[0], "matrix", partial(_add_positions, sums))
            other = self._name(f"{kinds}.weight")
            self.parameters.declare(other, sums[:, 0], "matrix", partial(_add_types, sums))
        return Embedding(self.ops, table[skipped:])

    def _table(self, name: str, rows: int, hidden: int, skipped: int = 0) -> Embedding:
        full = self._name(f"{name}.weight")
        table = self.parameters.tensor(full, (skipped + rows, hidden), "matrix", self.dtype)
        return Embedding(self.ops, table[skipped:])

    def token_embedding(
        self,
        name: str,
        vocab: int,
        hidden: int,
        *,
        tied: bool,
        bias: bool = False,
        scale: float = 1.0,
        types: tuple[str, int] = NO_TYPES,
    ) -> TokenTable:
        """Return the embedding of tokens.

        Args:
            tied: the head has the same matrix.
            bias: of the head.
            scale: of the vectors; it is rounded to the dtype.
            types: name and rows of a table of token types, of which the first is added to vectors.
        """
        kinds, count = types
        if kinds:
            inner = self.token_embedding(name, vocab, hidden, tied=tied, bias=bias, scale=scale)
            return TypedEmbedding(self.ops, inner, self._table(kinds, count, hidden).table[:1])
        stage = self._stage
        if stage is not None and not (stage.embeds or (stage.last and tied)):
            self.skip(name)
            return super().token_embedding(name, vocab, hidden, tied=tied)
        if tied:
            self.declared.embedding = self._name(f"{name}.weight")
        scale = float(torch.tensor(scale, dtype=self.dtype))
        stored_as_matrix = self._name(name) in self.storage.names
        scheme = self.parameters.embedding_scheme(self._name(name))
        if not tied and scheme is None and not stored_as_matrix:
            plain = self._table(name, vocab, hidden)
            return Embedding(self.ops, plain.table, scale)
        return self._embedding_matrix(name, LinearShape(hidden, vocab), tied, scale, tied and bias)

    def token_inputs(
        self, name: str, vocab: int, width: int, *, scale: float, rows: int | None = None
    ) -> MatrixEmbedding:
        """Return a table of token vectors, which is quantised like a head.

        Args:
            scale: of the vectors.
            rows: tokens that have a vector; later ones have that of token 0. None: all.
        """
        table = self._embedding_matrix(name, LinearShape(width, rows or vocab), False, scale)
        if rows is None or rows >= vocab:
            return table
        row_of = torch.arange(vocab, device=self.device)
        row_of[rows:] = 0
        return replace(table, row_of=row_of[:, None])

    def _embedding_matrix(
        self, name: str, shape: LinearShape, tied: bool, scale: float, bias: bool = False
    ) -> MatrixEmbedding:
        scheme = self.parameters.embedding_scheme(self._name(name))
        linear = self.parameters.linear(
            self._names(name), [shape], stored=[scheme], bias=bias, head=True, declared_bias=False
        )
        return MatrixEmbedding(self.ops, linear.matrix, self.dtype, tied, scale)

    def lm_head(
        self, name: str, embedding: Any, *, bias: bool = False, softcap: float | None = None
    ) -> LinearLayer:
        """Return the head: logits over the rows of `embedding`, from its matrix or a separate one.

        Args:
            embedding: as `token_embedding` returned it.
            softcap: a logit x becomes softcap * tanh(x / softcap); None: no cap.
        """
        if self._stage is not None and not self._stage.last:
            self.skip(name)
            return super().linear(name, 0, 0, bias=bias)
        if isinstance(embedding, MatrixEmbedding) and embedding.tied:
            self.ignore(f"{name}.weight")
            self.declared.unread_head = self._name(f"{name}.weight")
            head = Linear(self.ops, embedding.matrix)
            if embedding.matrix.bias is not None:
                full = self._name(f"{name}.{BIAS}")
                self.parameters.declare(full, embedding.matrix.bias, "bias")
        else:
            vocab, hidden = embedding.shape
            head = self.parameters.linear(
                self._names(name), [LinearShape(hidden, vocab)], bias=bias, head=True
            )
        if softcap is None:
            return head
        cap, ops = softcap, self.ops

        def capped(
            x: Tensor, ctx: ForwardContext | None = None, residual: Tensor | None = None
        ) -> Tensor:
            logits = head(x, ctx, residual)
            ops.softcap(logits, cap)
            return logits

        return capped

    def rms_norm(
        self,
        name: str,
        dim: int,
        eps: float,
        *,
        before: Role = "",
        offset: float = 0.0,
        scale: float = 1.0,
        rope: RopeSpec | None = None,
        heads: int = 1,
        groups: int = 1,
        tensor: str = "weight",
    ) -> RMSNorm:
        """Return an RMSNorm.

        Args:
            tensor: the last component of the gain's name.
            offset, scale: the gain is scale * (offset + stored gain), kept in fp32, because 16 bits
                would lose most of the stored gain.
            rope: rotation of the normalised heads; see `heads` of the builder.
            heads: number of heads that `dim` covers.
            groups: number of equal parts of `dim` that are normalised separately; x is [tokens,
                groups, dim / groups], or [tokens, dim] if there is one.
        """
        places = head_places(rope, heads, dim // heads)
        full = self._name(f"{name}.{tensor}")
        gain = self.parameters.gain(full, dim, scale, offset, places, exact=True)
        return RMSNorm(self.ops, gain if groups == 1 else gain.view(groups, -1), eps)

    def plain_norm(self, dim: int, eps: float, *, centred: bool = False) -> RMSNorm | LayerNorm:
        """Return an RMSNorm, or a LayerNorm if it is centred, without a gain."""
        gain = torch.ones(dim, dtype=self.dtype, device=self.device)
        if centred:
            return LayerNorm(self.ops, gain, torch.zeros_like(gain), eps)
        return RMSNorm(self.ops, gain, eps)

    def layer_norm(
        self,
        name: str,
        dim: int,
        eps: float,
        *,
        before: Role = "",
        bias: bool = True,
        offset: float = 0.0,
        scale: float = 1.0,
        rope: RopeSpec | None = None,
        order: Sequence[int] = (),
    ) -> LayerNorm:
        """Return a LayerNorm.

        Args:
            offset, scale: the gain is scale * (offset + stored gain); a scale only without a bias.
            rope: rotation of the normalised heads; see `heads` of the builder.
            order: of the channels, as in `linear`.
        """
        places = torch.tensor(order).argsort() if order else head_places(rope, 1, dim)
        weight = self.parameters.gain(self._name(f"{name}.weight"), dim, scale, offset, places)
        shift = self._empty(f"{name}.bias", dim)
        if bias:
            moved = None if places is None else partial(fill_moved, shift, places)
            self.parameters.declare(self._name(f"{name}.bias"), shift, "bias", moved)
        elif not self.storage.names:
            shift.zero_()
        return LayerNorm(self.ops, weight, shift, eps)

    def head_norms(
        self, name: str, heads: int, dim: int, eps: float, *, rope: RopeSpec | None = None
    ) -> LayerNorm:
        """Return a LayerNorm without biases over each head, with separate gains per head.

        Args:
            name: of the gains of all heads, [heads, dim]; with {}, of each head's gains, [dim].
            rope: rotation of the normalised heads; see `heads` of the builder.
        """
        gains = self._empty(f"{name}.weight", heads, dim)
        offsets = self._empty(f"{name}.bias", heads, dim)
        if not self.storage.names:
            offsets.zero_()
        places = head_places(rope, 1, dim)
        for head in range(heads) if "{}" in name else ():
            fill = partial(fill_scaled, gains[head], 1.0, 0.0, places)
            full = self._name(f"{name.format(head)}.weight")
            self.parameters.declare(full, gains[head], "gain", fill)
        if "{}" not in name:
            moved = None if places is None else partial(_fill_heads, gains, places)
            self.parameters.declare(self._name(f"{name}.weight"), gains, "gain", moved)
        return LayerNorm(self.ops, gains, offsets, eps)

    def query_scale(self, spec: QueryScale) -> ScaledQueriesLayer:
        if spec not in self._query_scales:
            counted = spec.first + torch.arange(self.max_model_len, device=self.device)
            table = 1.0 + spec.weight * torch.log1p((counted // spec.step).float())
            self._query_scales[spec] = table[:, None]
        ops, scales = self.ops, self._query_scales[spec]

        def scaled(q: Tensor, ctx: ForwardContext) -> Tensor:
            scale = ops.gather_rows(scales, ctx.positions)
            return ops.gated(q.flatten(1), scale, "none").view(q.shape)

        return scaled

    def rope(self, spec: RopeSpec, head_dim: int) -> Rope:
        rope = Rope(self.ops, spec, head_dim, self.max_model_len, self.device)
        self._ropes[spec, head_dim] = rope
        return rope

    def attention(
        self,
        layer: int,
        facts: LayerSpec,
        head_dim: int,
        scale: float | None = None,
        norms: tuple[RMSNorm, RMSNorm | None] | None = None,
        softcap: float | None = None,
        sinks: int = 0,
        sink_name: str = SINKS,
        distances: Tensor | None = None,
    ) -> Attention:
        """Return the attention of a layer.

        Args:
            scale: of the scores; None: 1 / sqrt(head_dim).
            norms: of the heads of q and k, with the same eps, the second None with `kv_from`; None:
                none.
            softcap: as in `AttentionSpec`.
            sinks: number of heads with a learned sink; 0: none.
            sink_name: of the sinks.
            distances: as in `AttentionSpec`.

        Raises:
            ConfigError: the attention backend does not support it.
        """
        self.ignore(*KV_SCALES)
        rope, bidirectional, head_norms = facts.rope, facts.bidirectional, None
        if norms is not None:
            q_norm, k_norm = norms
            k_weight = None if k_norm is None else k_norm.weight
            after = rope is not None and rope.then_normed
            head_norms = HeadNorms(q_norm.weight, k_weight, q_norm.eps, after)
        learned = None
        if sinks:
            learned = self.parameters.tensor(self._name(sink_name), (sinks,), "bias")
        alibi = None
        if facts.slopes:
            alibi = torch.tensor(facts.slopes, dtype=torch.float32, device=self.device)
        scale = head_dim**-0.5 if scale is None else scale
        local_heads = self._scope in self.declared.heads
        spec = AttentionSpec(
            scale,
            head_norms,
            softcap,
            learned,
            local_heads,
            bidirectional,
            facts.value_dim,
            alibi,
            distances,
        )
        self.backend.caps.check(spec)
        q_rope = None
        if rope is not None and rope.query_beta:
            key = rope, head_dim
            if key not in self._q_ropes:
                self._q_ropes[key] = Rope(
                    self.ops, rope, head_dim, self.max_model_len, self.device, of_queries=True
                )
            q_rope = self._q_ropes[key]
        owner = layer if facts.kv_from is None else facts.kv_from
        owner = 0 if bidirectional is not None else owner  # all such layers use layer 0's cache
        position, group = self._position_of[owner], self._group_of[owner]
        window = self._groups[group].spec.window
        if self._groups[group].budgeted:
            self.budgeted[layer] = spec
        sink_rope = None
        if window is not None and window.sinks and rope is not None:
            sink_rope = self._ropes[rope, head_dim]
        return Attention(self.backend, position, group, spec, q_rope, sink_rope, facts.index)

    def distances(self, name: str, buckets: int, heads: int, places: Sequence[int]) -> Tensor:
        """Return `AttentionSpec.distances`, which layers share, from a table [buckets, heads] of
        the checkpoint.

        Args:
            places: row of the table for each distance.
        """
        full, rows = self._name(f"{name}.weight"), torch.tensor(places)
        table = self.storage.tensor(full, (heads, len(places)), torch.float32, self.device)
        stored = torch.empty(buckets, heads, device="meta")
        self.parameters.declare(full, stored, "matrix", partial(_fill_distances, table, rows))
        return table

    def latent_attention(
        self,
        names: tuple[str, ...],
        layer: int,
        heads: int,
        latent: LatentSpec,
        scale: float,
        index: IndexSpec | None,
        sink_name: str,
    ) -> LatentAttention:
        """Return attention over latent vectors.

        Args:
            names: of one layer that makes, for each head, its key and its value; or of two layers:
                the keys' one, transposed to be applied to queries, and the values'. They become
                floats, whatever the checkpoint stores.
            scale: of the scores.
            index: chooses the keys; None: a query reads all that it sees.
            sink_name: of the heads' learned sinks; "": none.

        Raises:
            ConfigError: the attention backend does not support it.
        """
        self.ignore(*KV_SCALES)
        position, group = self._position_of[layer], self._group_of[layer]
        up = self._latent_up(names, heads, latent)
        local_heads = self.parameters.adapters is None
        if local_heads:
            self.declared.heads[self._scope] = Between(heads, latent.value, heads)
        sinks = None
        if sink_name:
            sinks = self.parameters.tensor(self._name(sink_name), (heads,), "bias")
        pool_bias = None
        if index is not None and index.pool and not index.shared:
            shape = index.pool, index.dim
            pool_bias = self.parameters.tensor(self._name(POOL_BIAS), shape, "bias")
        spec = AttentionSpec(scale, sinks=sinks, local_heads=local_heads)
        self.backend.caps.check(spec)
        return LatentAttention(self.backend, position, group, spec, up, index, pool_bias)

    def compressed_attention(
        self,
        layers: Sequence[int],
        heads: int,
        head_dim: int,
        spec: CompressedSpec,
        window: int,
        rope: RopeSpec,
        biases: Sequence[str],
        norms: Sequence[RMSNorm],
        down: str,
        sink_name: str,
    ) -> CompressedAttention:
        """Return attention over a window and over entries, with a product for each group of heads.

        Args:
            layers: its own number, and those of its entries and of their keys.
            window: most keys of single tokens that a query sees.
            biases, norms: of the gates and of the results, for entries and their keys.
            down: name of the layer of matrices of groups of heads. They become floats, whatever the
                checkpoint stores.
            sink_name: of the heads' learned sinks.
        """
        tensor, tables = partial(self.parameters.tensor, kind="bias"), self._ropes[rope, spec.rope]
        turns = tables.high, tables.low, tables.end
        widths = [(1 + spec.overlap) * width for width in spec.dims(head_dim)]
        makers = tuple(
            EntryMaker(tensor(self._name(name), (spec.every, width)), norm.weight, norm.eps, *turns)
            for name, norm, width in zip(biases, norms, widths, strict=True)
        )
        places = tuple((self._position_of[number], self._group_of[number]) for number in layers)
        sinks = tensor(self._name(sink_name), (heads,))
        sizes = spec.groups, heads * head_dim // spec.groups, spec.group_rank
        matrix = self.parameters.of_heads(self._name(down), *sizes)
        if not self.storage.names:
            self.parameters.declare_heads(self._name(down), matrix, *sizes)
        local_heads = self.parameters.adapters is None
        if local_heads:
            self.declared.heads[self._scope] = Between(spec.groups, spec.group_rank, spec.groups)
        of = spec, makers, window, head_dim**-0.5, sinks, matrix, local_heads
        return CompressedAttention(self.backend, places, *of)

    def _latent_up(self, names: tuple[str, ...], heads: int, latent: LatentSpec) -> LatentUp:
        layer, kind = self._name(names[0]), float_kind(self.dtype)
        sizes = (latent.nope, latent.rank), (latent.rank, latent.value)
        keys, values = matrices = [
            self.parameters.of_heads(f"{layer}.{part}", heads, *size)
            for part, size in zip(("keys", "values"), sizes, strict=True)
        ]
        up = LatentUp(keys, values, latent.rank, latent.value)
        if self.storage.names:
            return up
        quantizer = Quantizer(kind, layer)
        if len(names) == 1:
            size, nope = latent.nope + latent.value, latent.nope
            shape = LinearShape(latent.rank, heads * size)
            # Transposed: the keys' matrix is applied to queries before the cache is read.
            parts = (keys, lambda rows: rows[:nope].t()), (values, lambda rows: rows[nope:])
            to = HeadRows(self.ops, quantizer, size, parts)
            self.parameters.declare_layer(layer, shape, to)
            return up
        for name, matrix, (inputs, outputs) in zip(names, matrices, sizes, strict=True):
            self.parameters.declare_heads(self._name(name), matrix, heads, inputs, outputs)
        return up

    def scaled_sum(self, factor: float) -> Sum:
        ops = self.ops
        return lambda x, residual: ops.add(residual, ops.scaled(x, factor))

    def joined(self) -> Join:
        return self.ops.joined

    def pooled(self, spec: PoolingSpec) -> PooledHead:
        """Return the layers over pooled vectors, by full names of the checkpoint. In fp32: they
        process one vector per prompt."""
        layers = []
        for layer in spec.layers:
            made: list[Tensor] = []
            for name, shape in layer.tensors.items():
                gain = layer.norm_eps is not None and not name.endswith(BIAS)
                kind = "gain" if gain else "matrix" if len(shape) == 2 else "bias"
                made.append(self.parameters.tensor(name, shape, kind))
            layers.append((layer, made[0], made[1] if layer.bias else None))
        return PooledHead(layers)

    def learned_scale(self, name: str, size: int = 1) -> Scale:
        """Return a layer that multiplies by a scalar of the checkpoint, [1], or columns by a number
        each, [size]."""
        full = self._name(name)
        if size > 1:
            ops, row = self.ops, self.parameters.tensor(full, (size,), "gain")[None]
            return lambda x: ops.gated(x, row.expand_as(x), "none")
        scale = LearnedScale(self.ops, self.storage.tensor(full, (1,), torch.float32, self.device))
        self.parameters.declare(full, scale.value, "gain", scale.fill)
        if self.storage.names:
            scale.factor = float(scale.value)
        return scale

    def rescaled(self, least_square: float) -> Rescale:
        """Return a layer that makes each part of x as large as y; see `Ops.rescaled`."""
        ops = self.ops
        return lambda x, y: ops.rescaled(x, y, least_square)

    def mixtures(
        self,
        router: str,
        inputs: int,
        streams: int,
        coefficients: Mapping[str, tuple[int, float]],
    ) -> tuple[Mixture, ...]:
        """Return layers that compute weights of streams: a linear layer after the tanh of one that
        all share. Neither is quantised.

        Args:
            router: name of the shared one.
            coefficients: names of the others, with their outputs and what is added to these.
        """
        shared = self.parameters.linear(
            self._names(router),
            [LinearShape(inputs, streams)],
            bias=False,
            activation="tanh",
            exact=True,
            wide=True,
        )
        made = []
        for name, (outputs, offset) in coefficients.items():
            linear = self.parameters.linear(
                self._names(name),
                [LinearShape(streams, outputs)],
                bias=offset != 0.0,
                dtype=torch.float32,
                exact=True,
                declared_bias=False,
            )
            if linear.matrix.bias is not None and not self.storage.names:
                linear.matrix.bias.fill_(offset)
            made.append(partial(_after, linear, shared))
        return tuple(made)

    def weighted_sums(self, parts: int, weights: Sequence[float] = ()) -> WeightedSums:
        """Return a layer that adds sums of equal parts of x to y.

        Args:
            parts: their number.
            weights: of each part in each sum, if they are constant.
        """
        ops, row = self.ops, torch.tensor(weights, device=self.device)[None]

        def add(x: Tensor, residual: Tensor | None, weights: Tensor | None = None) -> Tensor:
            each = row.expand(len(x), -1) if weights is None else weights
            return ops.weighted_sums(x, each.unflatten(1, (-1, parts)), residual)

        return add

    def stream_weights(
        self,
        names: tuple[str, str, str],
        width: int,
        runs: Sequence[tuple[int, float, float]],
        eps: float,
        streams: int = 0,
        rounds: int = 0,
    ) -> Mixture:
        """Return a layer that computes weights of residual streams from all of them.

        Args:
            names: of a matrix, of biases, and of a gain for each run of weights.
            width: of all streams together.
            runs: of weights, as their number, the largest of them without the smallest, and the
                smallest.
            eps: of the norm of the streams.
            streams, rounds: see `Ops.stream_weights`.
        """
        counts = torch.tensor([count for count, _, _ in runs])
        n = int(counts.sum())
        linear = self.bare_linear(names[0], width, n, torch.float32)
        biases, gains = map(self._name, names[1:])
        factors = self.storage.tensor(biases, (4, n), torch.float32, self.device)
        if not self.storage.names:
            each = torch.tensor([ends for _, *ends in runs])
            factors[2:].copy_(each.t().repeat_interleave(counts, 1))
            self.parameters.declare(biases, factors[1], "bias")
            fill = partial(_fill_each, factors[0], counts)
            self.parameters.declare(gains, torch.empty(len(runs), device="meta"), "gain", fill)
        ops = self.ops
        return lambda x: ops.stream_weights(x, linear(x), factors, eps, streams, rounds)

    def bare_linear(
        self, name: str, inputs: int, outputs: int, dtype: torch.dtype | None = None
    ) -> Linear:
        """Return x [tokens, inputs] -> [tokens, outputs], whose weight is a tensor of this name.

        Args:
            dtype: of the outputs; None: the model's.
        """
        full, to = self._name(name), dtype or self.dtype
        sizes = float_kind(self.dtype), outputs, inputs, False, None
        spec = MatrixSpec(*sizes, to, self.device, replicable=True)
        linear = Linear(self.ops, self.storage.matrix(full, spec))
        if not self.storage.names:
            rows = torch.empty(outputs, inputs, dtype=self.dtype, device="meta")
            fill = partial(self._pack_floats, linear.matrix)
            self.parameters.declare(full, rows, "matrix", fill)
        return linear

    def _pack_floats(self, matrix: Matrix, first: int, values: Tensor) -> None:
        self.ops.pack_rows(matrix, first, float_weight(values.to(self.dtype)))

    def gated(self, by: str = "none") -> Gated:
        """Return a layer that multiplies by a function of a gate: `by`, one of `GATES`."""
        ops, function = self.ops, GATES[by]
        return lambda x, gate: ops.gated(x, gate, function)

    def activated(self, by: Activation) -> Scale:
        """Return a layer that applies an activation."""
        ops = self.ops
        return lambda x: ops.activate(x, by)

    def scaled_columns(self, factors: Sequence[tuple[int, float]]) -> Scale:
        """Return a layer that multiplies columns by constants.

        Args:
            factors: runs of columns, as their number and their factor.
        """
        counts, values = zip(*factors, strict=True)
        each = torch.tensor(values).repeat_interleave(torch.tensor(counts))
        ops, row = self.ops, each[None].to(self.device)
        return lambda x: ops.gated(x, row.expand_as(x), "none")

    def causal_conv(
        self,
        name: str,
        layer: int,
        spec: StateSpec,
        *,
        silu: bool = False,
        parts: Mapping[str, int] = NO_PARTS,
    ) -> CausalConv:
        """Return the convolution of a layer that keeps a state; checkpoints store its weight as
        [channels, 1, width].

        Args:
            parts: names of the tensors of consecutive channels, and their numbers; {}: there is
                one.
        """
        width, channels = spec.width, spec.channels
        full = self._name(f"{name}.weight")
        weight = self.storage.tensor(full, (width, channels), self.dtype, self.device)
        sizes = dict(parts) or {name: channels}
        stored = [
            self.parameters.stored.get(self._name(part), {}).get(WEIGHT, ()) for part in sizes
        ]
        if sum(shape[0] for shape in stored if shape) == channels:  # transformers divides evenly
            sizes = {part: shape[0] for part, shape in zip(sizes, stored, strict=True)}
        first = 0
        for part, size in sizes.items():
            rows = weight.t()[first : first + size, None]
            self.parameters.declare(self._name(f"{part}.weight"), rows, "gain")
            first += size
        offset = None
        if spec.bias:
            full = self._name(f"{name}.bias")
            offset = self.parameters.tensor(full, (channels,), "bias", self.dtype)
        return CausalConv(self.ops, weight, offset, self._state_of(layer), silu)

    def recurrence(
        self,
        decay: str,
        bias: str,
        layer: int,
        spec: StateSpec,
        *,
        skip: str = "",
        beta_scale: float = 1.0,
        decay_shape: tuple[int, ...] = (),
    ) -> Recurrence:
        """Return the gated delta rule or the state space of a layer.

        Args:
            decay, bias, skip: names of the learned parameters of the heads; see `StateHeads`.
            beta_scale: see `StateHeads`.
            decay_shape: of `decay` in the checkpoint; (): [value_heads], or if each number has its
                own rate [value_heads * value_dim, key_dim].
        """
        parameter, count = partial(self.parameters.tensor, kind="bias"), spec.value_heads
        if spec.by_channel:
            full, shape = self._name(decay), (count, spec.key_dim, spec.value_dim)
            rates = self.storage.tensor(full, shape, torch.float32, self.device)
            assert count == 1  # else the checkpoint's rows are no view
            self.parameters.declare(full, rates[0].t(), "bias")
        else:
            rates = parameter(self._name(decay), decay_shape or (count,)).flatten()
        offsets = parameter(self._name(bias), (count * spec.decays,))
        skips = spec.values if spec.by_channel else count
        skipped = parameter(self._name(skip), (skips,)) if skip else None
        heads = StateHeads(rates, offsets, spec.key_heads, skipped, beta_scale, spec.bound)
        return Recurrence(self.ops, heads, self._state_of(layer))

    def decaying(self, layer: int, spec: StateSpec) -> StateLayer:
        """Return the state space of a layer whose decays are constant."""
        decay = torch.tensor(spec.rates, device=self.device).log()
        # The gates are 0, and softplus(ln(e - 1)), the step of each token, is 1.
        bias, skip = torch.full_like(decay, math.log(math.e - 1)), torch.zeros_like(decay)
        heads = StateHeads(decay, bias, spec.key_heads, skip)
        space = Recurrence(self.ops, heads, self._state_of(layer))
        zeros = skip[None].to(self.dtype)
        return lambda x, ctx: space(x, zeros.expand(len(x), -1), ctx)

    def _state_of(self, layer: int) -> int:
        return self._states.setdefault(layer, len(self._states))

    def _names(self, *names: str) -> LayerNames:
        return LayerNames(self._scope, names)

    def _matrix_sizes(self, names: tuple[str, ...]) -> list[int]:
        """Return the number of consecutive layers that each matrix holds."""
        if not self.storage.names:
            return stored_alike([self.parameters.scheme(self._name(name)) for name in names])
        sizes: list[int] = []
        while (first := sum(sizes)) < len(names):
            ends = range(len(names), first, -1)
            matches = (
                end for end in ends if self._names(*names[first:end]).matrix in self.storage.names
            )
            sizes.append(next(matches, first + 1) - first)
        return sizes

    def _empty(self, name: str, *shape: int) -> Tensor:
        return self.storage.tensor(self._name(name), shape, self.dtype, self.device)


def _after(last: Linear, first: Linear, x: Tensor) -> Tensor:
    """Return last(first(x))."""
    return last(first(x))


def _fill_each(target: Tensor, counts: Tensor, first: int, values: Tensor) -> None:
    """Take one value for each run of the target, from run `first`."""
    runs = target.split(counts.tolist())
    for run, value in zip(runs[first : first + len(values)], values, strict=True):
        run.fill_(float(value))


def _add_positions(sums: Tensor, first: int, values: Tensor) -> None:
    """Add values [n, hidden], from position `first`, to sums [types, positions, hidden]."""
    sums[:, first : first + len(values)].add_(values.to(sums))


def _add_types(sums: Tensor, first: int, values: Tensor) -> None:
    """Add values [n, hidden], from type `first`, to sums [types, positions, hidden]."""
    sums[first : first + len(values)].add_(values.to(sums)[:, None])


def _fill_distances(table: Tensor, rows: Tensor, first: int, values: Tensor) -> None:
    """Take values [n, heads] of rows from `first`, for table [heads, distances]."""
    for row, of_heads in enumerate(values.to(table), first):
        table[:, rows == row] = of_heads[:, None]


def _fill_heads(target: Tensor, places: Tensor, first: int, values: Tensor) -> None:
    """Take values [heads, head_dim], from head `first`."""
    rows = target[first : first + len(values)]
    rows.index_copy_(1, places.to(rows.device), values.to(rows))
