"""One decoder block, built by kvik's own models and observed at its matrices.

A block is a model with a single layer. Its weights come through the same `Ops.pack_rows` as in the
engine, and its inputs are observed in `Ops.linear`, so models need no code for calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvik.attention.layout import StepLayout
from kvik.attention.sdpa import SdpaAttention
from kvik.kernels.ops import Ops
from kvik.kernels.reference.experts import experts_by
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import Matrix, Weight
from kvik.models.model_spec import ModelSpec
from kvik.nn.builder import Builder
from kvik.nn.kv_formats import allocate_kv, allocate_states
from kvik.nn.parameters import DeclaredTensor, Parameters
from kvik.spec.kv import KVGroup, group_layers
from kvik.spec.network import ForwardContext, Network

# watch(number of a matrix, its inputs x [tokens, inputs]) -> the inputs to use instead.
Watch = Callable[[int, Tensor], Tensor]

WEIGHT, BIAS = ".weight", ".bias"


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """A linear layer of a block."""

    name: str  # in the checkpoint
    matrix: int  # number of the matrix that its rows are part of, with layers of the same inputs
    weight: Tensor  # [outputs, inputs] in the dtype of the checkpoint
    transposed: bool  # the checkpoint has [inputs, outputs]


def unwatched(matrix: int, x: Tensor) -> Tensor:
    """Return x unchanged; the default `Watch`."""
    return x


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """The inputs of a block for some windows."""

    x: Tensor  # [windows, tokens, hidden], the residual stream
    # [windows, tokens, width], the layer's own input of each token; None: none.
    token_inputs: Tensor | None = None
    # [windows, tokens, kv_heads * 2 * head_dim], keys and values that an earlier layer stored;
    # None: the layer computes its own.
    kv: Tensor | None = None


class Tap:
    """Observes matrix products and the filling of matrices."""

    def __init__(self) -> None:
        self.watch: Watch = unwatched
        self.matrices: list[Matrix] = []
        self.filled: list[tuple[int, Tensor]] = []  # matrix, rows
        self._numbers: dict[int, int] = {}  # id of a matrix -> its number

    def ops(self) -> Ops:
        """Return torch's operations, observed by the tap. The tap keeps no reference to them: a
        reference cycle would keep a block in memory after its use."""
        linear = self._linear
        return replace(TORCH, linear=linear, experts=experts_by(linear), pack_rows=self._pack_rows)

    def _pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        assert weight.kind.floats
        if id(matrix) not in self._numbers:
            self._numbers[id(matrix)] = len(self.matrices)
            self.matrices.append(matrix)
        self.filled.append((self._numbers[id(matrix)], weight.values))
        TORCH.pack_rows(matrix, first, weight)

    def _linear(self, x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
        return TORCH.linear(self.watch(self._numbers[id(matrix)], x), matrix, residual)


class Block:
    """A decoder block."""

    def __init__(
        self,
        spec: ModelSpec,
        tokens: int,
        tensors: Mapping[str, tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            spec: with this one layer.
            tokens: of a window.
            tensors: by the name that the model declares: the name in the checkpoint and the values.
            dtype: of the computation.
        """
        self._tap = Tap()
        self._tokens, self._states = tokens, spec.states
        self._groups = _groups(spec, dtype)
        ops = self._tap.ops()
        self._backend = SdpaAttention(ops)
        builder = block_builder(spec, ops, self._backend, tokens, dtype, device)
        self._network: Network = spec.family.network(spec, builder)
        self._device, self._dtype = device, dtype
        self._declared: dict[str, DeclaredTensor] = {}
        self._transposed: dict[str, bool] = {}  # whether the checkpoint stores a layer transposed
        # Its other tensors in the checkpoint, by name: norms, biases and weights of streams.
        self.tensors: dict[str, Tensor] = {}
        layers: list[BlockLinear] = []
        for declared in builder.declared.tensors:
            if declared.name not in tensors:
                continue
            name, values = tensors[declared.name]
            values = values.to(device)
            self._tap.filled.clear()
            declared.fill(0, values)
            if not self._tap.filled or not name.endswith(WEIGHT):
                self.tensors[name], self._declared[name] = values, declared
                continue
            number = self._tap.filled[0][0]
            layer, transposed = name.removesuffix(WEIGHT), declared.transposed
            weight = values.t() if transposed else values
            self._declared[layer], self._transposed[layer] = declared, transposed
            layers.append(BlockLinear(layer, number, weight, transposed))
        self._tap.filled.clear()
        self.layers = tuple(layers)  # its linear layers, in the order of the model

    def set_weight(self, layer: str, weight: Tensor) -> None:
        """Replace the weight of a layer: [outputs, inputs], any float dtype."""
        self._declared[layer].fill(0, weight.t() if self._transposed[layer] else weight)
        self._tap.filled.clear()

    def set_tensor(self, name: str, values: Tensor) -> None:
        """Replace the values of a norm or a bias, in the layout of the checkpoint."""
        self._declared[name].fill(0, values)

    def run(
        self, inputs: BlockInputs, watch: Watch, store: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Run the block; windows do not see each other.

        Args:
            watch: called with the inputs of each matrix; returns the inputs to multiply.
            store: called with the keys and values that the layer has stored, as `BlockInputs.kv`.

        Returns:
            [windows, tokens, hidden], the residual stream after it.
        """
        x, count = inputs.x, len(inputs.x)
        kv = allocate_kv(self._groups, count, self._tokens, self._dtype, self._device).layers
        states = allocate_states(self._states, count, self._device).layers
        # a layer that keeps a state uses only the layout
        windows = [group.spec.window for group in self._groups] or [None]
        layout = _layout(count, self._tokens, self._device)
        metadata = tuple(self._backend.plan(layout, window) for window in windows)
        positions = torch.arange(self._tokens, device=self._device).repeat(count)
        ctx = ForwardContext(positions, metadata, kv, states)
        if inputs.token_inputs is not None:
            ctx = replace(ctx, token_inputs=self._flat(inputs.token_inputs)[:, None])
        if inputs.kv is not None:
            kv[0].k[:], kv[0].v[:] = inputs.kv.view(*kv[0].k.shape[:3], -1).chunk(2, 3)
        self._tap.watch = watch
        try:
            y = self._network.blocks(self._flat(x), ctx).view_as(x)
        finally:
            self._tap.watch = unwatched
        if store is not None:
            store(torch.cat((kv[0].k, kv[0].v), 3).flatten(2))
        return y

    def _flat(self, x: Tensor) -> Tensor:
        """[windows, tokens, width] -> [windows * tokens, width] of the computation."""
        return x.to(self._device, self._dtype).view(-1, x.shape[-1])


def block_builder(
    spec: ModelSpec,
    ops: Ops,
    backend: SdpaAttention,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Builder:
    parameters = Parameters(ops, dtype=dtype, device=device, checkpoint=None)
    return Builder(parameters, backend, _groups(spec, dtype), max_model_len=tokens)


def _groups(spec: ModelSpec, dtype: torch.dtype) -> tuple[KVGroup, ...]:
    """Return the KV groups of the layers. A layer that reads another's keys and values has a cache
    for them too, because its block runs alone."""
    layers = tuple(replace(layer, kv_from=None) for layer in spec.layers)
    return group_layers(replace(spec, layers=layers).kv_specs(dtype.itemsize))


def _layout(count: int, tokens: int, device: torch.device) -> StepLayout:
    """Return the layout of `count` windows, each in one block of the cache and with one state."""
    lengths = torch.full((count,), tokens, dtype=torch.int32, device=device)
    table = torch.arange(count, dtype=torch.int32, device=device)[:, None]
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * tokens
    return StepLayout(
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        slot_mapping=torch.arange(count * tokens, device=device),
        num_scheduled=(tokens,) * count,
        contexts=(tokens,) * count,
        block_size=tokens,
        state_rows=torch.arange(count, dtype=torch.int32, device=device),
    )
