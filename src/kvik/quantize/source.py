"""The model to quantise: its tensors by block, and the linear layers among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.files import is_gguf
from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.nn.checkpoint import open_checkpoint
from kvik.nn.formats.base import LinearShape
from kvik.nn.safetensors import Stored
from kvik.quantize.block import WEIGHT
from kvik.spec.declare import Declaration, DeclaredLinear, Role, stored_names
from kvik.spec.engine_folder import is_engine_folder

# The linear layers of a block, and where factors of their inputs can be folded: into the operation
# before them, if it is linear.
#
# A norm takes factors into its gain; the value projection into its rows, because attention mixes
# tokens and not channels; the up projection of a gated MLP into its rows, because the gate only
# multiplies. A nonlinear function between two layers, such as GELU, allows no folding.


@dataclass(frozen=True, slots=True)
class Fold:
    """Layers that read the same inputs, and the operation that produces these.

    Attributes:
        readers: names of the layers; {} is the block.
        source: name of the norm or linear layer before them.
        linear: whether the source is a linear layer.
        first: the output of the source that is channel 0.
        offset: that is added to the weight of a norm to be its gain.
        channels: [inputs] int64, the channel of each input. Query heads that share a value share
            its channels.
    """

    readers: tuple[str, ...]
    source: str
    linear: bool
    first: int
    channels: Tensor
    offset: float = 0.0

    @property
    def num_channels(self) -> int:
        return int(self.channels[-1]) + 1

    def average(self, values: Tensor) -> Tensor:
        """Return for each of values [inputs] the mean over the inputs of its channel."""
        totals = values.new_zeros(self.num_channels).index_add_(0, self.channels, values)
        counts = self.channels.bincount()
        return (totals / counts)[self.channels]

    def of_channels(self, values: Tensor) -> Tensor:
        """Return values [inputs], equal within a channel, by channel: [channels]."""
        found = values.new_empty(self.num_channels)
        found[self.channels] = values
        return found


def folds(spec: ModelSpec) -> tuple[Fold, ...]:
    """Return the folds of a block.

    Layers behind linear sources come first, so that the value projection contains the factors of
    the output projection when its own are searched. A norm is a source if the matrices of a single
    role read it and it multiplies by its gain.
    """
    declared = spec.declaration
    roles = _by_role(declared)
    qkv, o, down = roles["qkv"], roles["o"], roles["down"]
    up = roles.get("gate_up") or roles["up"]
    heads = torch.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)
    values = heads[:, None] * spec.head_dim + torch.arange(spec.head_dim)  # [heads, head_dim]
    fused = len(qkv.names) == 1  # q, k and v are one layer
    first = (spec.num_heads + spec.num_kv_heads) * spec.head_dim if fused else 0
    found = []
    if not qkv.by_head:  # where values stand together
        source = _patterns(declared, qkv)[-1]
        found.append(Fold(_patterns(declared, o), source, True, first, values.flatten()))
    if up.role == "gate_up":
        inner = torch.arange(down.inputs)
        first = down.inputs if len(up.names) == 1 else 0  # gate stands before up
        found.append(
            Fold(_patterns(declared, down), _patterns(declared, up)[-1], True, first, inner)
        )
    for norm in declared.norms:
        if norm.layer == 0 and norm.before:
            readers = _patterns(declared, roles[norm.before])
            source = declared.block + declared.in_block(norm.name)
            channels = torch.arange(norm.size)
            found.append(Fold(readers, source, False, 0, channels, norm.offset))
    return tuple(found)


def linear_inputs(spec: ModelSpec) -> dict[str, int]:
    """Return how many inputs each linear layer of a block has, by name; {} is the block."""
    declared = spec.declaration
    return {
        name: linear.inputs
        for linear in declared.of_block(0)
        for name in _patterns(declared, linear)
    }


def unclipped_rows(spec: ModelSpec) -> Mapping[str, int]:
    """Return how many rows of a layer make queries and keys, by name; {} is the block.

    Their weights are not clipped, because the error of queries and keys is not that of attention.
    """
    declared = spec.declaration
    qkv = _by_role(declared)["qkv"]
    names = _patterns(declared, qkv)
    if qkv.by_head:
        return {names[0]: sum(qkv.outputs)}
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if len(names) == 1:
        return {names[0]: queries + keys}
    return {names[0]: queries, names[1]: keys}


def _by_role(declared: Declaration) -> dict[Role, DeclaredLinear]:
    """The linear layers of a block, of which each role has one."""
    return {linear.role: linear for linear in declared.of_block(0)}


def _patterns(declared: Declaration, linear: DeclaredLinear) -> tuple[str, ...]:
    """Return the names of a block's layers, with {} for the block."""
    return tuple(declared.block + declared.in_block(name) for name in linear.names)


@dataclass(frozen=True, slots=True)
class Source:
    """A model folder in plain floats.

    Attributes:
        tensors: all of the checkpoint, by name.
        layers: the linear layers of all blocks, by name.
        block_scope: what the names of a block's tensors begin with, "model.layers.{}.".
    """

    folder: Path
    spec: ModelSpec
    tensors: Mapping[str, Stored]
    layers: Mapping[str, LinearShape]
    block_scope: str

    def block(self, index: int) -> dict[str, Stored]:
        """Return the tensors of a block."""
        scope = self.block_scope.format(index)
        return {name: stored for name, stored in self.tensors.items() if name.startswith(scope)}

    def rest(self) -> dict[str, Stored]:
        """Return the tensors outside of blocks: embedding, last norm, head."""
        blocks = {name for i in range(self.spec.num_layers) for name in self.block(i)}
        return {name: stored for name, stored in self.tensors.items() if name not in blocks}

    @property
    def num_bytes(self) -> int:
        return sum(stored.entry.size for stored in self.tensors.values())


def open_source(folder: Path) -> Source:
    """Read the file headers of a model folder, and find its linear layers.

    Raises:
        ModelError: the folder cannot be used, or the model is quantised already.
    """
    if is_gguf(folder):
        raise ModelError("model", f"{folder.name} is a GGUF file: take the folder it was made of")
    if is_engine_folder(folder):
        raise ModelError("model", "is an engine folder: take the model it was built from")
    spec = read_model_spec(folder)
    if spec.quantization is not None:
        raise ModelError("model", f"is quantised already ({spec.quantization}): take the original")
    if spec.states:
        raise ModelError(
            "model",
            "has layers that keep states, which this does not quantise: quantization does, while "
            "the model is loaded",
        )
    tensors = {
        entry.name: Stored(path, entry)
        for path, entries in open_checkpoint(folder).files
        for entry in entries
    }
    scope = _block_scope(spec, tensors)
    layers = {
        name: _shape(name, inputs, tensors)
        for block in range(spec.num_layers)
        for name, inputs in _linear_layers(spec, scope.format(block)).items()
    }
    return Source(folder, spec, tensors, layers, scope)


def _block_scope(spec: ModelSpec, tensors: Mapping[str, Stored]) -> str:
    """Return the scope as the checkpoint has it."""
    scopes = stored_names(spec.declaration.block)
    found = (s for s in scopes if any(tensor.startswith(s.format(0)) for tensor in tensors))
    return next(found, scopes[0])


def _linear_layers(spec: ModelSpec, scope: str) -> dict[str, int]:
    """Return the number of inputs of a block's linear layers, by name."""
    inputs = linear_inputs(spec)
    return {scope + name.partition("{}.")[2]: width for name, width in inputs.items()}


def _shape(layer: str, inputs: int, tensors: Mapping[str, Stored]) -> LinearShape:
    """Return the shape of a layer, which the checkpoint may store transposed.

    Raises:
        ModelError: the layer is missing or has another size.
    """
    name = layer + WEIGHT
    if name not in tensors:
        raise ModelError("model", f"its weights lack {shown(name)}")
    shape = tensors[name].entry.shape
    if len(shape) != 2 or inputs not in shape:
        raise ModelError(
            "model", f"tensor {shown(name)} must have {inputs} inputs by config.json, not {shape}"
        )
    outputs = shape[0] if shape[1] == inputs else shape[1]
    return LinearShape(inputs, outputs)
