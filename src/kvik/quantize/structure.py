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

from kvik.spec.architectures import ARCHITECTURES
from kvik.spec.model import ModelSpec

# The norms before attention and before the MLP, of architectures whose norms multiply by their
# gain alone. One that is not here is quantised without factors.
NORMS: Mapping[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("input_layernorm", "post_attention_layernorm"),
    "MistralForCausalLM": ("input_layernorm", "post_attention_layernorm"),
    "Qwen2ForCausalLM": ("input_layernorm", "post_attention_layernorm"),
    "Qwen3ForCausalLM": ("input_layernorm", "post_attention_layernorm"),
    "GPT2LMHeadModel": ("ln_1", "ln_2"),
}


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
    """Those of a block. Layers whose inputs come from linear ones go first: the value projection
    has taken the factors of the output projection when its own are sought."""
    if spec.architecture not in NORMS:
        return ()
    names = ARCHITECTURES[spec.architecture].matrices
    prefix = names.o[0].partition("{}")[0] + "{}."
    norms = [prefix + name for name in NORMS[spec.architecture]]
    hidden, inner = torch.arange(spec.hidden_size), torch.arange(spec.intermediate_size)
    heads = torch.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)
    values = heads[:, None] * spec.head_dim + torch.arange(spec.head_dim)  # [heads, head_dim]
    fused = len(names.qkv) == 1  # q, k and v are one layer
    first = (spec.num_heads + spec.num_kv_heads) * spec.head_dim if fused else 0
    found = [Fold(names.o, names.qkv[-1], True, first, values.flatten())]
    if spec.gated_mlp:
        found.append(Fold(names.down, names.up[-1], True, 0, inner))
    found.append(Fold(names.qkv, norms[0], False, 0, hidden))
    found.append(Fold(names.up, norms[1], False, 0, hidden))
    return tuple(found)


def linear_inputs(spec: ModelSpec) -> dict[str, int]:
    """How many inputs each linear layer of a block has, by name; {} is the block."""
    names = ARCHITECTURES[spec.architecture].matrices
    hidden, attended = spec.hidden_size, spec.num_heads * spec.head_dim
    sizes = (
        (names.qkv, hidden),
        (names.o, attended),
        (names.up, hidden),
        (names.down, spec.intermediate_size),
    )
    return {name: inputs for layers, inputs in sizes for name in layers}


def unclipped_rows(spec: ModelSpec) -> Mapping[str, int]:
    """Of layers that make queries and keys, how many rows do: their error is not that of the
    attention, so none of these weights are cut. By name; {} is the block."""
    names = ARCHITECTURES[spec.architecture].matrices.qkv
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if len(names) == 1:
        return {names[0]: queries + keys}
    return {names[0]: queries, names[1]: keys}
