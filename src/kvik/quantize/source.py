"""The model to quantise: its tensors by block, and the linear layers among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
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
from kvik.quantize.recipe import Recipe
from kvik.spec.declared import UNQUANTISED, Declaration, DeclaredLinear, Role
from kvik.spec.engine_folder import is_engine_folder
from kvik.spec.stored_weights import HEAD, stored_names

# The linear layers of a block, and where factors of their inputs can be folded: into the operation
# before them, if it is linear.
#
# A norm takes factors in its gain; the value projection in its rows, because attention mixes tokens
# and not channels; the up projection of a gated MLP in its rows, because the gate only multiplies;
# likewise with the gate after a convolution. A nonlinear function between two layers, such as GELU,
# allows no folding.


@dataclass(frozen=True, slots=True)
class Fold:
    """Layers that read the same inputs, and the operation that produces them."""

    readers: tuple[str, ...]  # names of the layers; {} is the block
    source: str  # name of the norm or linear layer before them
    # [inputs] int64, the channel of each input. Query heads that share a value share its channels;
    # heads normalised with one gain share the channels of the gain.
    channels: Tensor
    # [channels] int64, the output of a linear source for each channel; None: the source is a norm.
    outputs: Tensor | None = None
    offset: float = 0.0  # added to the stored weight of a norm to get its gain

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
        result = values.new_empty(self.num_channels)
        result[self.channels] = values
        return result


# Roles that read the norm before an MLP or experts; roles that all tokens use come first.
FEED: tuple[Role, ...] = (
    *("router", "shared_gate"),
    *("gate_up", "up", "shared_gate_up", "shared_up", "expert_gate_up", "expert_up"),
)
GATED = {"gate_up": "down", "shared_gate_up": "shared_down", "expert_gate_up": "expert_down"}
KEPT = UNQUANTISED | {"gates", "wide_gates"}  # roles of layers that stay floats


def folds(spec: ModelSpec, layer: int = 0) -> tuple[Fold, ...]:
    """Return the folds of a block.

    Layers after linear sources come first, so that the value projection already contains the
    factors of the output projection when its own are searched. A norm is a source if it has a gain,
    and only matrices of one role, of a feed-forward part, or of a token mixer read it.
    """
    declared = spec.declaration
    linears = declared.of_block(layer)
    norms = [norm for norm in declared.norms if norm.layer == layer and norm.before]
    folds = []
    values = _values(spec, layer)
    if values is not None:
        o = next(linear for linear in linears if linear.role == "o")
        folds.append(Fold(_patterns(declared, o), *values))
    for up, down in pairwise(linears):
        if GATED.get(up.role) == down.role and not up.clamped:
            inner = torch.arange(down.inputs)
            outputs = inner + (down.inputs if len(up.names) == 1 else 0)  # gate comes before up
            source = _patterns(declared, up)[-1]
            folds.append(Fold(_patterns(declared, down), source, inner, outputs))
    for norm in norms:
        other_roles = {other.before for other in norms if other is not norm}
        roles = _reading(norm.before, {linear.role for linear in linears} - other_roles)
        if KEPT.issuperset(roles):
            continue
        reading = sorted(
            (linear for linear in linears if linear.role in roles),
            key=lambda linear: roles.index(linear.role),
        )
        readers = tuple(name for linear in reading for name in _patterns(declared, linear))
        source = declared.block + declared.in_block(norm.name)
        channels = torch.arange(norm.size).repeat(reading[0].inputs // norm.size)
        folds.append(Fold(readers, source, channels, offset=norm.offset))
    return tuple(folds)


def _reading(before: Role, roles: Collection[Role]) -> tuple[Role, ...]:
    """Return the roles of all matrices that read a norm before those of one role.

    Args:
        roles: of the block, without those that have their own norm.
    """
    if before == "qkv":
        return ("qkv", "gates", "q_down" if "q_down" in roles else "q_up", "kv_down")
    return tuple(role for role in FEED if role in roles) if before in FEED else (before,)


def _values(spec: ModelSpec, layer: int) -> tuple[str, Tensor, Tensor] | None:
    """Return the layer in whose outputs the inputs of a block's output projection are linear, as
    source, channels and outputs of a `Fold`; None: there is none."""
    facts = spec.layers[layer]
    latent, state = facts.latent, facts.state
    if spec.family.value_norm or facts.feeds or spec.scales.qkv_limit is not None:
        return None
    heads, (kv_heads, _), size = spec.query_heads(facts), spec.heads(facts), spec.value_dim(facts)
    declared = spec.declaration
    if any(norm.layer == layer and norm.before == "o" for norm in declared.norms):
        return None
    role = "kv_up" if latent else "qkv"
    linear = next(linear for linear in declared.of_block(layer) if linear.role == role)
    source = _patterns(declared, linear)[-1]
    if state is not None:
        if state.value_heads:  # a norm or a nonlinear gate is between
            return None
        # the second of three parts: the gate after the convolution
        channels = torch.arange(spec.hidden_size)
        return source, channels, spec.hidden_size + channels
    shared = torch.arange(heads) // (heads // kv_heads)  # KV head of each query head
    if latent is not None:
        size = latent.value
        shared = torch.arange(heads)
        begins = shared * (latent.nope + size) + latent.nope  # of each head of values
    elif linear.by_head:
        group_heads = heads // kv_heads + 2
        begins = (torch.arange(kv_heads) * group_heads + group_heads - 1) * size
    elif linear.shards:  # of queries, values and keys of as many heads
        head, each = torch.arange(kv_heads), kv_heads // linear.shards
        begins = (head // each * 3 * each + each + head % each) * size
    else:
        first = heads + kv_heads if len(linear.names) == 1 else 0  # q, k and v are one layer
        begins = (torch.arange(kv_heads) + first) * size
    channels = shared[:, None] * size + torch.arange(size)  # [heads, value_dim]
    return source, channels.flatten(), (begins[:, None] + torch.arange(size)).flatten()


def linear_inputs(spec: ModelSpec, layer: int) -> dict[str, int]:
    """Return the number of inputs of each linear layer of a block, by name; {} is the block."""
    declared = spec.declaration
    return {
        name: linear.inputs
        for linear in declared.of_block(layer)
        if not linear.bare
        for name in _patterns(declared, linear)
    }


def expert_roles(spec: ModelSpec, layer: int) -> dict[str, Role]:
    """Return the role of each matrix of a block's experts, by name; {} is the block.

    Matrices of one role are multiplied together, so they are quantised alike.
    """
    declared = spec.declaration
    return {
        name: linear.role
        for linear in declared.of_block(layer)
        if linear.router is not None
        for name in _patterns(declared, linear)
    }


def keeping_floats(recipe: Recipe, spec: ModelSpec) -> Recipe:
    """Return the recipe with the layers that stay floats (`KEPT`) skipped: routers and gates, which
    are small, and whose slight errors change the choice of experts or the decay of a state; and the
    projections of latent vectors, which the engine applies to queries and results."""
    declared = spec.declaration
    roles = {name: linear.role for linear in declared.linears for name in linear.names}
    rounded = {declared.in_block(name) for name, role in roles.items() if role not in KEPT}
    kept = {name: declared.in_block(name) for name, role in roles.items() if role in KEPT}
    # Layers of another kind may have the name for a matrix that is rounded.
    names = {name if inner in rounded else f"*.{inner}" for name, inner in kept.items()}
    return replace(recipe, skip=(*recipe.skip, *sorted(names - {*recipe.skip})))


def unclipped_rows(spec: ModelSpec, layer: int) -> Mapping[str, int]:
    """Return the number of first rows that compute queries and keys in a block's layers, by name;
    {} is the block.

    Their weights are not clipped, because the error of queries and keys does not represent the
    error of attention. If they are mixed with other rows, no row of the layer is clipped.
    """
    declared, facts = spec.declaration, spec.layers[layer]
    (kv_heads, size), state = spec.heads(facts), facts.state
    counts: dict[str, int] = {}
    for linear in declared.of_block(layer):
        names = _patterns(declared, linear)
        if linear.role in ("q_down", "q_up", "kv_down"):
            counts[names[0]] = linear.outputs[0]
        elif linear.role != "qkv":
            continue
        elif state is not None and len(names) <= 2:
            rows = 2 * state.key_heads * state.key_dim
            contiguous = len(names) > 1 or not rows  # else they are stored head by head
            counts[names[0]] = rows if contiguous else linear.outputs[0]
        elif linear.by_head or linear.shards:
            counts[names[0]] = linear.outputs[0]
        elif len(names) == 1:
            heads = spec.query_heads(facts) + (kv_heads if facts.kv_from is None else 0)
            counts[names[0]] = heads * size
        else:
            counts |= zip(names[:2], linear.outputs[:2], strict=True)
    return counts


def _patterns(declared: Declaration, linear: DeclaredLinear) -> tuple[str, ...]:
    """Return the names of a block's layers, with {} for the block."""
    return tuple(declared.block + declared.in_block(name) for name in linear.names)


@dataclass(frozen=True, slots=True)
class Source:
    """A model folder in plain floats."""

    folder: Path
    spec: ModelSpec
    tensors: Mapping[str, Stored]  # all tensors of the checkpoint, by name
    layers: Mapping[str, LinearShape]  # the linear layers of all blocks, by name
    block_scope: str  # prefix of the names of a block's tensors, "model.layers.{}."

    def block(self, index: int) -> dict[str, Stored]:
        """Return the tensors of a block."""
        scope = self.block_scope.format(index)
        return {name: stored for name, stored in self.tensors.items() if name.startswith(scope)}

    def rest(self) -> dict[str, Stored]:
        """Return the tensors outside of blocks: embedding, last norm, head."""
        blocks = {name for i in range(self.spec.num_layers) for name in self.block(i)}
        return {name: stored for name, stored in self.tensors.items() if name not in blocks}

    @property
    def outside(self) -> tuple[str, ...]:
        """The names of linear layers outside of blocks, but for a head with the usual name."""
        linears = self.spec.declaration.linears
        declared = (li.names[0] for li in linears if li.layer is None and not li.tied)
        return tuple(
            name for name in (_stored(name, self.tensors) for name in declared) if name != HEAD
        )

    @property
    def foreign(self) -> dict[str, list[str]]:
        """The names of layers that are not the model's, by the scope that they share: of encoders
        of images, of heads that draft."""
        declared = self.spec.declaration
        others = [linear.names[0] for linear in declared.linears if linear.layer is None]
        names = (*others, *(table.name for table in declared.tables))
        known = {form for name in names for form in stored_names(name)} | set(self.layers)
        outer = {name[:i] for name in known for i, c in enumerate(name) if c == "."}
        foreign: dict[str, list[str]] = {}
        for name, stored in self.rest().items():
            layer = name.rpartition(".")[0]
            if len(stored.entry.shape) > 1 and layer not in known:
                parts = layer.split(".")
                scopes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
                foreign.setdefault(next(s for s in scopes if s not in outer), []).append(layer)
        return foreign

    @property
    def num_bytes(self) -> int:
        return sum(stored.entry.size for stored in self.tensors.values())


def open_source(folder: Path) -> Source:
    """Read the file headers of a model folder, and find its linear layers.

    Raises:
        ModelError: the folder cannot be used, or the model is none to quantise.
    """
    if is_gguf(folder):
        raise ModelError("model", f"{folder.name} is a GGUF file: take the folder it was made of")
    if is_engine_folder(folder):
        raise ModelError("model", "is an engine folder: take the model it was built from")
    spec = read_model_spec(folder)
    if spec.encoder or spec.classifier:
        kind = "an encoder" if spec.encoder else "a classifier"
        raise ModelError("model", f"is {kind}, which can only be rounded at load (quantization)")
    if spec.compressed:
        reason = "keeps entries that sum up tokens, and can only be rounded at load (quantization)"
        raise ModelError("model", reason)
    if any(layer.shared_rank or layer.shortcut for layer in spec.layers):
        reason = "has layers that share matrices or experts; it can only be rounded at load"
        raise ModelError("model", reason)
    if spec.quantization is not None:
        raise ModelError("model", f"is quantised already ({spec.quantization}): take the original")
    tensors = {
        entry.name: Stored(path, entry)
        for path, entries in open_checkpoint(folder).files
        for entry in entries
    }
    scope = _block_scope(spec, tensors)
    layers = {
        name: _shape(name, inputs, tensors)
        for block in range(spec.num_layers)
        for name, inputs in _linear_layers(spec, block, scope.format(block)).items()
    }
    return Source(folder, spec, tensors, layers, scope)


def _stored(name: str, tensors: Collection[str]) -> str:
    """Return the name of a layer as the checkpoint has it."""
    matches = (stored for stored in stored_names(name) if stored + WEIGHT in tensors)
    return next(matches, name)


def _block_scope(spec: ModelSpec, tensors: Mapping[str, Stored]) -> str:
    """Return the scope as the checkpoint has it."""
    scopes = stored_names(spec.declaration.block)
    matches = (s for s in scopes if any(tensor.startswith(s.format(0)) for tensor in tensors))
    return next(matches, scopes[0])


def _linear_layers(spec: ModelSpec, block: int, scope: str) -> dict[str, int]:
    """Return the number of inputs of a block's linear layers, by name."""
    inputs = linear_inputs(spec, block)
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
