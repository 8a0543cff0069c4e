"""Declares the parameters of a model by their names in the checkpoint, and allocates their memory.

A linear layer becomes part of a matrix of the kind that its quantisation needs; several layers of
the checkpoint can be one matrix. Values are read later (nn/loader.py): each declared tensor knows
which part of it is needed, and where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.weights import Activation, Matrix, MatrixSpec, float_kind, float_weight
from kvik.nn.checkpoint import IN_RUNS, Checkpoint, Selection, layer_of
from kvik.nn.formats.base import LinearShape, WeightFormat
from kvik.nn.formats.registry import choose_format, has_scheme
from kvik.nn.layers import Linear
from kvik.nn.lora import AdapterSlots
from kvik.nn.parts import (
    FreshStorage,
    HeadRows,
    LayerFiller,
    Quantizer,
    Rows,
    Storage,
    Target,
    head_rows,
    rows_to_read,
)
from kvik.spec.declare import whole_name
from kvik.spec.shares import Between
from kvik.spec.stored_weights import StoredQuantization, StoredScheme
from kvik.spec.weights import matrix_kind

BIAS = "bias"
# Of a router; some checkpoints store them with its matrix.
OF_ROUTERS = ("e_score_correction_bias", "expert_bias", "tid2eid")
# Calibrated scales of a quantised KV cache, stored with the projections. Ignored: the engine
# computes its own scales.
KV_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale")


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """A tensor the checkpoint must hold."""

    # name, shape: in the checkpoint.
    name: str
    shape: tuple[int, ...]
    # dtype, because: as in `StoredTensor`.
    dtype: torch.dtype
    kind: str  # "matrix", "gain", "bias" or "ids": how random weights initialise it
    selection: Selection  # the part to read
    # Takes the index of the first row and the values from there, or all selected values at once;
    # keeps no reference.
    fill: Callable[[int, Tensor], None]
    because: str = ""
    transposed: bool = False  # a matrix of [inputs, outputs]


@dataclass(slots=True)
class Declarations:
    """Everything a model declared, in order, and the device of its weights."""

    device: torch.device
    tensors: list[DeclaredTensor] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)  # prefixes of names that are not used here
    elsewhere: set[str] = field(default_factory=set)  # prefixes of names that other stages read
    embedding: str = ""  # name of the embedding, if it is also the head
    unread_head: str = ""  # name of a head, which some checkpoints contain although it is not read
    # scope -> the heads of its attention, which may be divided among processes
    heads: dict[str, Between] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of the layers of the checkpoint that are one matrix here."""

    scope: str
    names: tuple[str, ...]  # in the scope

    @property
    def layers(self) -> list[str]:
        """Their whole names."""
        return [whole_name(self.scope, name) for name in self.names]

    @property
    def matrix(self) -> str:
        """The name of the matrix."""
        return " + ".join((self.layers[0], *self.names[1:]))


class Parameters:
    """Declares and allocates the parameters of a model."""

    def __init__(
        self,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        checkpoint: Checkpoint | None,
        stored_quantization: StoredQuantization | None = None,
        quantization: str = "none",
        storage: Storage | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """
        Args:
            checkpoint: source of the weights; None: random floats.
            stored_quantization: how the checkpoint stores linear layers; None: as floats.
            quantization: applied to linear layers while loading, as in `EngineConfig`.
            storage: allocates the weights; None: new memory.
            adapters: from which requests choose; None: there are none.
        """
        self.ops, self.dtype, self.device = ops, dtype, device
        self.checkpoint = checkpoint
        self.stored_quantization = stored_quantization
        self.quantization = quantization
        self.storage = storage or FreshStorage(ops)
        self.adapters = adapters
        self.declared = Declarations(device)
        self.stored: dict[str, dict[str, tuple[int, ...]]] = {}  # layer -> its tensors' shapes
        for name, entry in checkpoint.entries.items() if checkpoint else ():
            layer, last = layer_of(name)
            self.stored.setdefault(layer, {})[last] = entry.shape
        self.stored |= {name: {} for name in self.storage.names}
        self._identities: dict[int, Matrix] = {}  # by size, shared by layers

    def identity(self, size: int) -> Matrix:
        """Return an identity of the model's dtype."""
        if size not in self._identities:
            kind = float_kind(self.dtype)
            spec = MatrixSpec(kind, size, size, False, None, self.dtype, self.device)
            self._identities[size] = self.ops.matrix(spec)
            values = torch.eye(size, dtype=self.dtype, device=self.device)
            self.ops.pack_rows(self._identities[size], 0, float_weight(values))
        return self._identities[size]

    def of_heads(self, layer: str, heads: int, inputs: int, outputs: int) -> Matrix:
        """Return memory for a matrix of each head, or group of heads."""
        kind, rows = float_kind(self.dtype), heads * head_rows(outputs)
        spec = MatrixSpec(kind, rows, inputs, False, None, self.dtype, self.device, heads)
        return self.storage.matrix(layer, spec)

    def declare_heads(
        self, layer: str, matrix: Matrix, heads: int, inputs: int, outputs: int
    ) -> None:
        """Declare the tensors of a layer that becomes a matrix of `of_heads`."""
        parts = [(matrix, lambda rows: rows)]
        to = HeadRows(self.ops, Quantizer(float_kind(self.dtype), layer), outputs, parts)
        self.declare_layer(layer, LinearShape(inputs, heads * outputs), to)

    def linear(
        self,
        names: LayerNames,
        shapes: Sequence[LinearShape],
        *,
        bias: bool,
        dtype: torch.dtype | None = None,
        stored: Sequence[StoredScheme | None] | None = None,
        activation: Activation | None = None,
        head: bool = False,
        exact: bool = False,
        wide: bool = False,
        places: Tensor | None = None,
        expert: tuple[int, int] | None = None,
        between: Between | None = None,
        replicable: bool = False,
        declared_bias: bool = True,
    ) -> Linear:
        """Return the fused layer of some layers of the checkpoint, and declare their tensors.

        Args:
            names: of the layers, one for each of `shapes`.
            dtype: of the weight, if it is no other kind, and of the outputs; None: the model's.
            expert, between, replicable: see `MatrixSpec`; `exact` implies `replicable`.
            stored: how the checkpoint stores each layer, None for floats; None: as for any layer of
                its name.
            exact: the weight is never quantised here. Whether the checkpoint stores it quantised is
                seen from its tensors: some tools exclude such layers without saying so.
            wide: the outputs are fp32.
            places: destinations of the first rows; see `Rows`.
            head: the layer computes logits or is the embedding. Logits are fp32, because small
                differences between them matter; the weight keeps at least eight bits.
            declared_bias: the caller declares no bias itself, under another name.
        """
        layers, dtype = names.layers, dtype or self.dtype
        inputs, rows = shapes[0].inputs, sum(shape.outputs for shape in shapes)
        if stored is None:
            stored = list(map(self.scheme, layers))
        if exact:
            stored = [
                scheme if scheme and has_scheme(self._shapes(layer), scheme, shape) else None
                for layer, scheme, shape in zip(layers, stored, shapes, strict=True)
            ]
        quantised = None if exact else matrix_kind(self.quantization, inputs, stored, head=head)
        kind = quantised or float_kind(dtype)
        quantizer = Quantizer(kind, names.matrix)
        adapters = None
        if self.adapters is not None and not head and not exact and expert is None:
            adapters = self.adapters.of(layers, shapes, places)
        spec = MatrixSpec(
            kind,
            rows,
            inputs,
            bias,
            activation if adapters is None else None,
            torch.float32 if head or wide else dtype,
            self.device,
            expert=expert,
            between=between,
            replicable=replicable or exact,
        )
        matrix = self.storage.matrix(quantizer.layer, spec)
        linear = Linear(self.ops, matrix, adapters, None if adapters is None else activation)
        if self.storage.names:
            return linear
        target, first = Rows(self.ops, matrix, quantizer, places), 0
        for layer, shape, scheme in zip(layers, shapes, stored, strict=True):
            self._declare_stored(layer, shape, scheme, target, first, dtype)
            if matrix.bias is not None and declared_bias:
                offsets = matrix.bias[first : first + shape.outputs]
                fill = partial(fill_rows, offsets)
                if places is not None and first < len(places):
                    moved = places[first : first + shape.outputs] - first
                    fill = partial(fill_moved, offsets, moved)
                self.declare(f"{layer}.{BIAS}", offsets, "bias", fill)
            first += shape.outputs
        return linear

    def declare_layer(self, layer: str, shape: LinearShape, to: Target) -> None:
        """Declare the tensors of a layer whose weight becomes what `to` holds."""
        self._declare_stored(layer, shape, self.scheme(layer), to, 0, self.dtype)

    def _declare_stored(
        self,
        layer: str,
        shape: LinearShape,
        stored: StoredScheme | None,
        to: Target,
        first: int,
        dtype: torch.dtype,
    ) -> None:
        """Declare the tensors of a layer whose weight becomes rows first.. of a matrix."""
        format = self._format(layer, shape, stored)
        tensors = format.tensors(dtype)
        runs = rows_to_read(to, first, shape.outputs, tensors.values())
        part = LayerFiller(layer, format, tensors, shape, to, first, runs)
        for suffix, tensor in tensors.items():
            self.declared.tensors.append(
                DeclaredTensor(
                    f"{layer}.{suffix}",
                    tensor.shape,
                    tensor.dtype,
                    "matrix",
                    tensor.selection(runs),
                    partial(part.fill, suffix),
                    tensor.because,
                    stored is None and shape.transposed,
                )
            )

    def scheme(self, layer: str) -> StoredScheme | None:
        """Return how the checkpoint stores a layer; None: as floats."""
        if self.checkpoint is None or self.stored_quantization is None:
            return None
        return self.stored_quantization.scheme(layer)

    def embedding_scheme(self, layer: str) -> StoredScheme | None:
        """Return how the checkpoint stores an embedding; None: as floats."""
        if self.checkpoint is None or self.stored_quantization is None:
            return None
        return self.stored_quantization.embedding_scheme(layer)

    def _format(self, layer: str, shape: LinearShape, scheme: StoredScheme | None) -> WeightFormat:
        format = choose_format(layer, self._shapes(layer), scheme, shape)
        unread = (*format.unread, *KV_SCALES)
        self.declared.ignored.update(f"{layer}.{name}" for name in unread)
        return format

    def _shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in the checkpoint that may be of the layer's weight."""
        other_names = (BIAS, *OF_ROUTERS, *KV_SCALES)
        stored = self.stored.get(layer, {}).items()
        return {name: size for name, size in stored if name not in other_names}

    def gain(
        self,
        full: str,
        dim: int,
        scale: float = 1.0,
        offset: float = 0.0,
        places: Tensor | None = None,
        *,
        exact: bool = False,
    ) -> Tensor:
        """Declare the gain of a norm, and return its memory.

        Args:
            full: its name in the checkpoint.
            places: destination of each channel; None: unchanged.
            exact: a gain that differs from the stored one is kept in fp32.
        """
        changed = scale != 1.0 or offset != 0.0
        dtype = torch.float32 if changed and exact else self.dtype
        weight = self.storage.tensor(full, (dim,), dtype, self.device)
        fill = None
        if changed or places is not None:
            fill = partial(fill_scaled, weight, scale, offset, places)
        self.declare(full, weight, "gain", fill)
        return weight

    def tensor(
        self, full: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Declare a tensor by its name in the checkpoint, and return its memory."""
        tensor = self.storage.tensor(full, shape, dtype, self.device)
        self.declare(full, tensor, kind)
        return tensor

    def declare(
        self,
        name: str,
        target: Tensor,
        kind: str,
        fill: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """Declare a tensor that the checkpoint must hold, unless its values are in memory.

        Args:
            name: in the checkpoint. target: has its shape and dtype.
            kind, fill: see `DeclaredTensor`; None: values are copied to the target.
        """
        if self.storage.names:
            return
        self.declared.tensors.append(
            DeclaredTensor(
                name,
                tuple(target.shape),
                target.dtype,
                kind,
                IN_RUNS,
                fill=fill or partial(fill_rows, target),
            )
        )


def fill_rows(target: Tensor, first: int, values: Tensor) -> None:
    """Copy values to the target, from row `first`."""
    target[first : first + len(values)].copy_(values)


def fill_moved(target: Tensor, places: Tensor, first: int, values: Tensor) -> None:
    """Copy values, of rows from `first` on, to the destinations of these rows; rows that have none
    keep their place."""
    moved = places[first : first + len(values)].to(target.device)
    target[moved] = values[: len(moved)].to(target)
    target[first + len(moved) : first + len(values)] = values[len(moved) :].to(target)


def fill_scaled(
    target: Tensor, scale: float, offset: float, places: Tensor | None, first: int, values: Tensor
) -> None:
    """Copy scale * (offset + values); see `fill_moved`."""
    scaled = (values.float() + offset) * scale
    if places is None:
        target[first : first + len(values)].copy_(scaled)
    else:
        fill_moved(target, places, first, scaled)
