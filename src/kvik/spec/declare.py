"""The vocabulary of model declarations: the layers of a network.

The constructors in `models/` declare layers to a `LayerBuilder`. The one in `nn.builder` builds
these layers; `describe` runs the same constructors with a builder that only lists them. So
parameter counts, the memory plan, the quantiser and the planner read the one declaration of a model
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvik.spec.declared import (
    Declaration,
    DeclaredLinear,
    DeclaredNorm,
    DeclaredOther,
    DeclaredTable,
    Role,
)
from kvik.spec.kv import CompressedSpec, IndexSpec
from kvik.spec.layers import LatentSpec, LayerSpec, QueryScale
from kvik.spec.network import (
    AttentionLayer,
    CompressedAttentionLayer,
    FeedForward,
    Gated,
    HeadsLayer,
    Join,
    LatentAttentionLayer,
    LinearLayer,
    Mixture,
    Network,
    Norm,
    PositionTable,
    RecurrentLayer,
    Rescale,
    Rotations,
    RoutedExperts,
    Scale,
    ScaledQueriesLayer,
    StateLayer,
    Sum,
    TokenTable,
    WeightedSums,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvik.spec.experts import ExpertsSpec
    from kvik.spec.kv import StateSpec
    from kvik.spec.model import ModelFacts
    from kvik.spec.rope import RopeSpec

GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in the scope of a layer's experts."""

    router: str = "gate"  # of the matrix that computes the logits
    # gate_up, down: of an expert's matrices; {} is its number. Gate and up may be one.
    gate_up: tuple[str, ...] = ("experts.{}.gate_proj", "experts.{}.up_proj")
    down: str = "experts.{}.down_proj"
    gated: bool = True  # experts have a gate; else `gate_up` and `shared_gate_up` are up alone
    correction: str = "gate.e_score_correction_bias"  # of the router's correction
    correction_row: bool = False  # the correction has shape [1, experts]
    shared: str = "shared_experts"  # scope of the shared expert
    # shared_gate_up, shared_down: of its matrices; gate and up may be one.
    shared_gate_up: tuple[str, ...] = GATE_UP
    shared_down: str = "down_proj"
    shared_gate: str = "shared_expert_gate"  # of the matrix that computes its gate
    # Rows of gate and up are interleaved in one matrix, and float weights are transposed.
    mixed: bool = False
    scales: str = "scales"  # of the learned factors of weights (`Router.scaled`)
    table: str = "gate.tid2eid"  # of the experts of each token (`Router.by_token`)


EXPERT_NAMES = ExpertNames()
SINKS = "sinks"  # usual name of the learned sinks in the scope of attention
POOL_BIAS = "indexer.index_kpool_compress_ape"  # of the gates of a pool
NO_TYPES = ("", 1)  # of `LayerBuilder.embedding`
NO_PARTS: Mapping[str, int] = MappingProxyType({})  # of `LayerBuilder.causal_conv`
# The activation with two learned numbers per layer, which apply above and below 0, and their names
# in the scope of an MLP.
XIELU = "xielu"
# Activations that clamp gate and up.
CLAMPED = frozenset({"clamped_swiglu", "limited_swiglu", "clipped_swiglu"})
RELU2 = "relu2"  # the square of ReLU; as a gate it is no part of a product
XIELU_NAMES = ("act_fn.alpha_p", "act_fn.alpha_n")


def usual_scope(name: str, *aliases: str) -> str:
    """Return the scope that a model has without a checkpoint: the last one, unless it is empty."""
    return aliases[-1] if aliases and aliases[-1] else name


@dataclass(frozen=True, slots=True)
class ListedLayer:
    """Placeholder for a layer that is not built."""

    table: DeclaredTable | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        raise AssertionError("a layer that is only listed has no weights")

    add = at = __call__

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, hidden] of a table."""
        assert self.table is not None
        return self.table.rows, self.table.width


_LISTED = ListedLayer()


class LayerBuilder:
    """Declares layers within a scope of the checkpoint's names; `at` narrows the scope.

    This class only lists the declared layers; `nn.builder.Builder` builds them.
    """

    def __init__(self, declaration: Declaration) -> None:
        self._listed = declaration
        self._scope = ""
        self._layer: int | None = None

    def at(self, name: str | int, *aliases: str, layer: int | None = None) -> LayerBuilder:
        inner = copy(self)
        inner._scope = self._name(usual_scope(str(name), *aliases))
        if isinstance(name, int):
            inner._layer = name if layer is None else layer
            self._listed.block = f"{self._scope}.{{}}."
        return inner

    def one_of(self, *names: str) -> str:
        return names[0]

    def skip(self, *scopes: str) -> None:
        self._listed.skipped += [f"{self._name(scope)}." for scope in scopes]

    def ignore(self, *names: str) -> None:
        self._listed.skipped += map(self._name, names)

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
        activation: Any = None,
        uses: int = 1,
    ) -> LinearLayer:
        names = (names,) if isinstance(names, str) else names
        outputs = (outputs,) if isinstance(outputs, int) else outputs
        full = tuple(map(self._name, names))
        linear = DeclaredLinear(
            self._layer, role, full, inputs, outputs, bias, transposed=transposed, uses=uses
        )
        self._listed.linears.append(linear)
        return _LISTED

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
    ) -> HeadsLayer:
        widths = tuple(count * head_dim for count in heads)
        if value_dim is not None:
            widths = (*widths[:2], heads[2] * value_dim)
        if gated:
            widths = (2 * widths[0], *widths[1:])
        if len(names) == 1:
            widths = (sum(widths),)
        full = tuple(map(self._name, names))
        linear = DeclaredLinear(
            self._layer, "qkv", full, inputs, widths, bias, by_head=by_head, shards=shards
        )
        self._listed.linears.append(linear)
        return _LISTED

    def gated_mlp(
        self,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        names: tuple[str, ...] = GATE_UP,
        down: str = "down_proj",
        activation: Any = "silu_and_mul",
        sparsity: float = 0.0,
        limit: float = 0.0,
        up_first: bool = False,
        down_bias: bool | None = None,
    ) -> FeedForward:
        widths = (2 * inner // len(names),) * len(names)
        clamped = limit > 0 or activation in CLAMPED
        self._gate_up(names, hidden, widths, bias, "gate_up", clamped)
        biased = bias if down_bias is None else down_bias
        return self.linear(down, inner, hidden, bias=biased, role="down")

    def _gate_up(
        self,
        names: tuple[str, ...],
        hidden: int,
        widths: tuple[int, ...],
        bias: bool,
        role: Role,
        clamped: bool,
    ) -> None:
        full = tuple(map(self._name, names))
        linear = DeclaredLinear(self._layer, role, full, hidden, widths, bias, clamped=clamped)
        self._listed.linears.append(linear)

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
    ) -> FeedForward:
        self.linear(up, hidden, inner, bias=bias, role="up", transposed=transposed)
        for name in XIELU_NAMES if activation == XIELU else ():
            self._other(name, 1)
        return self.linear(down, inner, hidden, bias=bias, role="down", transposed=transposed)

    def experts(
        self,
        hidden: int,
        spec: ExpertsSpec,
        names: ExpertNames = EXPERT_NAMES,
        *,
        bias: bool = False,
        activation: Any = "silu_and_mul",
        shared_activation: Any = None,
        vocab: int = 0,
    ) -> RoutedExperts:
        router, inner = spec.router, spec.inner
        self.linear(names.router, hidden, router.outputs, bias=bias, role="router")
        if router.corrected:
            self._other(names.correction, router.outputs)
        if router.scaled:
            self._other(names.scales, router.experts)
        if router.by_token:
            self._other(names.table, vocab * router.active, (vocab, router.active))
        up: Role = "expert_gate_up" if names.gated else "expert_up"
        clamped = activation in CLAMPED
        copies, parts = 2 if names.gated else 1, len(names.gate_up)
        widths = (copies * inner // parts,) * parts
        kinds: tuple[tuple[Role, tuple[str, ...], int, tuple[int, ...]], ...] = (
            (up, tuple(map(self._name, names.gate_up)), hidden, widths),
            ("expert_down", (self._name(names.down),), inner, (hidden,)),
        )
        for expert in range(router.experts):
            for role, of_expert, inputs, outputs in kinds:
                full = tuple([name.format(expert) for name in of_expert])
                linear = DeclaredLinear(
                    self._layer,
                    role,
                    full,
                    inputs,
                    outputs,
                    bias,
                    router=router,
                    mixed=names.mixed,
                    clamped=clamped,
                )
                self._listed.linears.append(linear)
        if spec.gated:
            self.linear(names.shared_gate, hidden, 1, bias=False, role="shared_gate")
        if spec.shared:
            shared = self.at(names.shared)
            up = "shared_gate_up" if names.gated else "shared_up"
            parts = len(names.shared_gate_up)
            widths = (copies * spec.shared // parts,) * parts
            cut = spec.shared_limit > 0 or (shared_activation or activation) in CLAMPED
            shared._gate_up(names.shared_gate_up, hidden, widths, bias, up, cut)
            shared.linear(names.shared_down, spec.shared, hidden, bias=bias, role="shared_down")
        return _LISTED

    def embedding(
        self,
        name: str,
        rows: int,
        hidden: int,
        *,
        skipped: int = 0,
        types: tuple[str, int] = NO_TYPES,
    ) -> PositionTable:
        table = DeclaredTable("positions", self._name(name), skipped + rows, hidden)
        self._listed.tables.append(table)
        kinds, count = types
        if kinds:
            self._other(f"{kinds}.weight", count * hidden, (count, hidden))
        return _LISTED

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
        kinds, count = types
        if kinds:
            self._other(f"{kinds}.weight", count * hidden, (count, hidden))
        table = DeclaredTable("embedding", self._name(name), vocab, hidden, tied)
        self._listed.tables.append(table)
        return ListedLayer(table)

    def token_inputs(
        self, name: str, vocab: int, width: int, *, scale: float, rows: int | None = None
    ) -> TokenTable:
        table = DeclaredTable("token_inputs", self._name(name), rows or vocab, width)
        self._listed.tables.append(table)
        return _LISTED

    def lm_head(
        self, name: str, embedding: Any, *, bias: bool = False, softcap: float | None = None
    ) -> LinearLayer:
        table = embedding.table
        assert table is not None
        head = DeclaredLinear(
            None, "head", (self._name(name),), table.width, (table.rows,), bias, table.tied
        )
        self._listed.linears.append(head)
        return _LISTED

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
    ) -> Norm:
        norm = DeclaredNorm(self._layer, self._name(name), dim, False, before, offset)
        self._listed.norms.append(norm)
        return _LISTED

    def plain_norm(self, dim: int, eps: float, *, centred: bool = False) -> Norm:
        return _LISTED

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
    ) -> Norm:
        norm = DeclaredNorm(self._layer, self._name(name), dim, bias, before, offset)
        self._listed.norms.append(norm)
        return _LISTED

    def head_norms(
        self, name: str, heads: int, dim: int, eps: float, *, rope: RopeSpec | None = None
    ) -> Norm:
        stored_heads = range(heads) if "{}" in name else range(1)
        for head in stored_heads:
            full = self._name(name.format(head))
            size = heads * dim // len(stored_heads)
            self._listed.norms.append(DeclaredNorm(self._layer, full, size, False, ""))
        return _LISTED

    def query_scale(self, spec: QueryScale) -> ScaledQueriesLayer:
        return _LISTED

    def rope(self, spec: RopeSpec, head_dim: int) -> Rotations:
        return _LISTED

    def attention(
        self,
        layer: int,
        facts: LayerSpec,
        head_dim: int,
        scale: float | None = None,
        norms: tuple[Any, Any] | None = None,
        softcap: float | None = None,
        sinks: int = 0,
        sink_name: str = SINKS,
        distances: Any = None,
    ) -> AttentionLayer:
        if sinks:
            self._other(sink_name, sinks)
        return _LISTED

    def distances(self, name: str, buckets: int, heads: int, places: Sequence[int]) -> Any:
        self._other(f"{name}.weight", buckets * heads, (buckets, heads))
        return _LISTED

    def latent_attention(
        self,
        names: tuple[str, ...],
        layer: int,
        heads: int,
        latent: LatentSpec,
        scale: float,
        index: IndexSpec | None,
        sink_name: str,
    ) -> LatentAttentionLayer:
        if sink_name:
            self._other(sink_name, heads)
        if index is not None and index.pool and not index.shared:
            self._other(POOL_BIAS, index.pool * index.dim)
        if len(names) == 1:
            outputs = heads * (latent.nope + latent.value)
            self.linear(names, latent.rank, outputs, bias=False, role="kv_up")
        else:
            keys, values = names
            self.linear(keys, latent.nope, heads * latent.rank, bias=False, role="kv_up")
            self.linear(values, latent.rank, heads * latent.value, bias=False, role="kv_up")
        return _LISTED

    def compressed_attention(
        self,
        layers: Sequence[int],
        heads: int,
        head_dim: int,
        spec: CompressedSpec,
        window: int,
        rope: RopeSpec,
        biases: Sequence[str],
        norms: Sequence[Any],
        down: str,
        sink_name: str,
    ) -> CompressedAttentionLayer:
        self._other(sink_name, heads)
        for name, width in zip(biases, spec.dims(head_dim), strict=True):
            shape = spec.every, (1 + spec.overlap) * width
            self._other(name, prod(shape), shape)
        inputs, outputs = heads * head_dim // spec.groups, spec.groups * spec.group_rank
        self.linear(down, inputs, outputs, bias=False, role="o_down")
        return _LISTED

    def scaled_sum(self, factor: float) -> Sum:
        return _LISTED

    def joined(self) -> Join:
        return _LISTED

    def scaled_columns(self, factors: Sequence[tuple[int, float]]) -> Scale:
        return _LISTED

    def learned_scale(self, name: str, size: int = 1) -> Scale:
        self._other(name, size)
        return _LISTED

    def rescaled(self, least_square: float) -> Rescale:
        return _LISTED

    def mixtures(
        self,
        router: str,
        inputs: int,
        streams: int,
        coefficients: Mapping[str, tuple[int, float]],
    ) -> tuple[Mixture, ...]:
        name, uses = self._name(router), len(coefficients)
        self._listed.linears.append(
            DeclaredLinear(
                self._layer, "mixture", (name,), inputs, (streams,), bias=False, uses=uses
            )
        )
        for name, (outputs, _) in coefficients.items():
            self.linear(name, streams, outputs, bias=False, role="mixture")
        return (_LISTED,) * len(coefficients)

    def weighted_sums(self, parts: int, weights: Sequence[float] = ()) -> WeightedSums:
        return _LISTED

    def stream_weights(
        self,
        names: tuple[str, str, str],
        width: int,
        runs: Sequence[tuple[int, float, float]],
        eps: float,
        streams: int = 0,
        rounds: int = 0,
    ) -> Mixture:
        matrix, biases, gains = names
        count = sum(count for count, _, _ in runs)
        self.bare_linear(matrix, width, count)
        self._other(biases, count)
        self._other(gains, len(runs))
        return _LISTED

    def bare_linear(self, name: str, inputs: int, outputs: int) -> Callable[[Tensor], Tensor]:
        sizes = inputs, (outputs,)
        linear = DeclaredLinear(
            self._layer, "mixture", (self._name(name),), *sizes, bias=False, bare=True
        )
        self._listed.linears.append(linear)
        return _LISTED

    def gated(self, by: str = "none") -> Gated:
        return _LISTED

    def activated(self, by: Any) -> Scale:
        return _LISTED

    def causal_conv(
        self,
        name: str,
        layer: int,
        spec: StateSpec,
        *,
        silu: bool = False,
        parts: Mapping[str, int] = NO_PARTS,
    ) -> StateLayer:
        for part, channels in (parts or {name: spec.channels}).items():
            self._other(f"{part}.weight", channels * spec.width, (channels, 1, spec.width))
        if spec.bias:
            self._other(f"{name}.bias", spec.channels)
        return _LISTED

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
    ) -> RecurrentLayer:
        each = (spec.values, spec.key_dim) if spec.by_channel else decay_shape
        size = prod(each) if spec.by_channel else spec.value_heads
        self._other(decay, size, each, logarithm=True)
        self._other(bias, spec.value_heads * spec.decays)
        if skip:
            self._other(skip, spec.values if spec.by_channel else spec.value_heads)
        return _LISTED

    def decaying(self, layer: int, spec: StateSpec) -> StateLayer:
        return _LISTED

    def _other(
        self, name: str, size: int, shape: tuple[int, ...] = (), *, logarithm: bool = False
    ) -> None:
        other = DeclaredOther(self._layer, self._name(name), size, shape, logarithm)
        self._listed.others.append(other)

    def _name(self, name: str) -> str:
        return whole_name(self._scope, name)


def whole_name(scope: str, name: str) -> str:
    """Return the whole name of a layer or tensor in a scope; "": none."""
    return ".".join(filter(None, (scope, name)))


def describe(make: Callable[[ModelFacts, LayerBuilder], Network], spec: ModelFacts) -> Declaration:
    """Return what a network's constructor declares, and the layers over pooled vectors."""
    declaration = Declaration()
    make(spec, LayerBuilder(declaration))
    for layer in spec.pooling.layers if spec.pooling else ():
        for name, shape in layer.tensors.items():
            declaration.others.append(DeclaredOther(None, name, prod(shape), shape))
    return declaration
