"""Interfaces of a network and of the layers that a `LayerBuilder` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Taps:
    """Keeps copies of the residual stream before some layers, which draft heads read."""

    layers: tuple[int, ...]  # in ascending order
    copy: Callable[[Tensor], Tensor]  # copies [tokens, hidden]
    kept: list[Tensor] = field(default_factory=list)  # the copies so far

    def see(self, layer: int, x: Tensor) -> None:
        """Take the residual stream x [tokens, hidden] before a layer."""
        if layer in self.layers:
            self.kept.append(self.copy(x))


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs of a forward pass in addition to token ids; passed explicitly, never global."""

    positions: Tensor  # [tokens] int64, position of each token in its sequence
    # Attention arrays of this step (`AttentionMetadata`), one per KV group.
    metadata: tuple[Any, ...]
    kv: tuple[Any, ...]  # the cache of each layer that attends (`LayerKV`), in order
    states: tuple[Any, ...] = ()  # those of each layer that keeps one (`LayerStates`), in order
    # [tokens, layers, width], what each layer reads of a token alone, or [tokens] int64, the ids;
    # the model makes them of its own inputs. None: layers read no such vectors.
    token_inputs: Tensor | None = None
    # Results of `once`, by what made them.
    made: dict[Callable[[Tensor], Tensor], Tensor] = field(default_factory=dict)
    taps: Taps | None = None  # what keeps the residual stream between layers; None: nothing does
    # What the last indexer chose (`AttentionBackend.choose`); empty: tokens read all keys.
    chosen: list[Any] = field(default_factory=list)
    # [tokens, hidden], what experts made that is added after the next layer; empty: nothing.
    waiting: list[Tensor] = field(default_factory=list)

    def once(self, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `make(positions)`, computed for the first layer that asks and shared by all."""
        if make not in self.made:
            self.made[make] = make(self.positions)
        return self.made[make]


ALL = slice(None)  # layers


class Network(Protocol):
    """A model without state: it has only weights; the cache is part of the context.

    A forward is leave(blocks(enter(ids))), where the context of the blocks has the `token_inputs`.
    """

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32."""
        ...

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        """ids [tokens], x [tokens, hidden] from `enter` -> `token_inputs` of the context; None:
        layers read no such vectors."""
        ...

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Run the layers in `span`: residual stream x [tokens, hidden] before -> after them."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Residual stream x [tokens, hidden] after the last layer -> normalised, for `logits`."""
        ...


# Interfaces of the layers that a builder makes.


class LinearLayer(Protocol):
    def __call__(
        self, x: Tensor, ctx: ForwardContext | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [tokens, inputs], residual [tokens, outputs] -> [tokens, outputs]."""
        ...


FeedForward = LinearLayer  # x, residual [tokens, hidden] -> [tokens, hidden]
# x [tokens, inputs] -> [tokens, heads, head_dim or value_dim] of each projection
HeadsLayer: TypeAlias = "Callable[[Tensor, ForwardContext], list[Tensor]]"
# q [tokens, ...] -> the same, times a number per token
ScaledQueriesLayer: TypeAlias = "Callable[[Tensor, ForwardContext], Tensor]"
# x [tokens, channels] -> [tokens, channels]; reads and writes the states
StateLayer: TypeAlias = "Callable[[Tensor, ForwardContext], Tensor]"
# x [tokens, inputs], gates [tokens, numbers of a head * value_heads] -> [tokens, value_heads *
# value_dim]; reads and writes the states
RecurrentLayer: TypeAlias = "Callable[[Tensor, Tensor, ForwardContext], Tensor]"
# x, residual [tokens, hidden] -> residual + x times a constant
Sum: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
# x [tokens, dim], y [tokens, other] -> [tokens, dim + other]
Join: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
# x [tokens, dim], gate [tokens, dim or fewer, for equal parts of x] -> x times a function of gate
Gated: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
# x [tokens, parts, dim], y [tokens, dim] -> each part of x as large as y
Rescale: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
# x [tokens, inputs] -> [tokens, outputs] fp32
Mixture: TypeAlias = "Callable[[Tensor], Tensor]"
# x [tokens, dim] -> x times a number, or a number of each column
Scale: TypeAlias = "Callable[[Tensor], Tensor]"


class WeightedSums(Protocol):
    def __call__(self, x: Tensor, residual: Tensor | None, weights: Tensor | None = None) -> Tensor:
        """x [tokens, parts * dim], residual [tokens, sums * dim] or None, weights [tokens, sums *
        parts] fp32, or None for the constant ones -> residual + sums of the parts, [tokens, sums *
        dim]."""
        ...


class RoutedExperts(Protocol):
    def __call__(
        self,
        x: Tensor,
        ctx: ForwardContext | None = None,
        residual: Tensor | None = None,
        *,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]. The router reads `routed_by`, of the
        shape of x; None: x."""
        ...


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [tokens, dim] -> residual + norm(x)."""
        ...


class TokenTable(Protocol):
    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        ...


class PositionTable(TokenTable, Protocol):
    def add(self, ids: Tensor, x: Tensor) -> Tensor:
        """x [tokens, hidden] and the vectors of ids [tokens] -> their sum."""
        ...


class Rotations(Protocol):
    def at(self, positions: Tensor) -> Tensor:
        """positions [tokens] -> their rotations, [tokens, head_dim]."""
        ...


class AttentionLayer(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        ctx: ForwardContext,
        rotation: Tensor | None = None,
        indexed: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """q [tokens, heads, head_dim]; k [tokens, kv_heads, head_dim] and v [tokens, kv_heads,
        value_dim], or None with `kv_from` -> [tokens, heads * value_dim].

        Args:
            indexed: of the layer's indexer: queries [tokens, kv_heads * dim] and keys [tokens,
                dim].
        """
        ...


class LatentAttentionLayer(Protocol):
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
        """q [tokens, heads, nope], q_rope [tokens, heads, rope], latent [tokens, rank], k_rope
        [tokens, 1, rope], rotation [tokens, rope] or None -> [tokens, heads * value].

        Args:
            indexed: of the layer's indexer: queries [tokens, heads * dim], keys [tokens, dim] and
                weights [tokens, heads].
        """
        ...


class CompressedAttentionLayer(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        inputs: Tensor | None,
        indexed: tuple[Tensor, Tensor] | None,
        rotation: Tensor,
        ctx: ForwardContext,
    ) -> Tensor:
        """q [tokens, heads, head_dim], k [tokens, head_dim], rotation [tokens, rope] -> [tokens,
        groups * group_rank].

        Args:
            inputs: [tokens, channels], of which entries are made; None: there are none.
            indexed: of the layer's indexer: queries [tokens, heads * dim] and weights [tokens,
                heads].
        """
        ...
