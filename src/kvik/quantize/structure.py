"""The linear layers of a block, and where the factors of their inputs can go: the operation
before them, if it is linear.

A norm takes them into its gain; the value projection into its rows, since attention mixes tokens
and never channels; the up projection of a gated MLP into its rows, since the gate is only
multiplied on. A function between two layers, such as GELU, lets no factor through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.models.model_spec import ModelSpec
from kvik.spec.declare import Declaration, DeclaredLinear, Role


@dataclass(frozen=True, slots=True)
class Fold:
    """Layers that read the same inputs, and what makes these.

    Attributes:
        readers: names of the layers; {} is the block.
        source: name of the norm or linear layer.
        linear: it is a linear layer.
        first: the source's output that is channel 0.
        channels: [inputs] int64, the channel that each input is. Query heads that share a value
            share its channels.
    """

    readers: tuple[str, ...]
    source: str
    linear: bool
    first: int
    channels: Tensor

    @property
    def num_channels(self) -> int:
        return int(self.channels[-1]) + 1

    def average(self, values: Tensor) -> Tensor:
        """values [inputs] -> their mean over the inputs that are one channel, for each input."""
        totals = values.new_zeros(self.num_channels).index_add_(0, self.channels, values)
        counts = self.channels.bincount()
        return (totals / counts)[self.channels]

    def of_channels(self, values: Tensor) -> Tensor:
        """values [inputs], equal where the channel is -> [channels]."""
        found = values.new_empty(self.num_channels)
        found[self.channels] = values
        return found


def folds(spec: ModelSpec) -> tuple[Fold, ...]:
    """Return those of a block.

    Layers whose inputs come from linear ones go first: the value projection has taken the factors
    of the output projection when its own are sought. A norm is a source where matrices of one role
    alone read it, and multiplies by its gain.
    """
    declared = spec.declaration
    roles = _by_role(declared)
    qkv, o, down = roles["qkv"], roles["o"], roles["down"]
    up = roles.get("gate_up") or roles["up"]
    heads = torch.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)
    values = heads[:, None] * spec.head_dim + torch.arange(spec.head_dim)  # [heads, head_dim]
    fused = len(qkv.names) == 1  # q, k and v are one layer
    first = (spec.num_heads + spec.num_kv_heads) * spec.head_dim if fused else 0
    found = [
        Fold(_patterns(declared, o), _patterns(declared, qkv)[-1], True, first, values.flatten())
    ]
    if up.role == "gate_up":
        inner = torch.arange(down.inputs)
        found.append(Fold(_patterns(declared, down), _patterns(declared, up)[-1], True, 0, inner))
    for norm in declared.norms:
        if norm.layer == 0 and norm.before:
            readers = _patterns(declared, roles[norm.before])
            source = declared.block + declared.in_block(norm.name)
            found.append(Fold(readers, source, False, 0, torch.arange(norm.size)))
    return tuple(found)


def linear_inputs(spec: ModelSpec) -> dict[str, int]:
    """How many inputs each linear layer of a block has, by name; {} is the block."""
    declared = spec.declaration
    return {
        name: linear.inputs
        for linear in declared.of_block(0)
        for name in _patterns(declared, linear)
    }


def unclipped_rows(spec: ModelSpec) -> Mapping[str, int]:
    """Of layers that make queries and keys, how many rows do: their error is not that of the
    attention, so none of these weights are cut. By name; {} is the block."""
    declared = spec.declaration
    names = _patterns(declared, _by_role(declared)["qkv"])
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if len(names) == 1:
        return {names[0]: queries + keys}
    return {names[0]: queries, names[1]: keys}


def _by_role(declared: Declaration) -> dict[Role, DeclaredLinear]:
    """The linear layers of a block, of which each role has one."""
    return {linear.role: linear for linear in declared.of_block(0)}


def _patterns(declared: Declaration, linear: DeclaredLinear) -> tuple[str, ...]:
    """The names of a block's layers, with {} for the block."""
    return tuple(declared.block + declared.in_block(name) for name in linear.names)
