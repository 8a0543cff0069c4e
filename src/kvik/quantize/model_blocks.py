"""Reads a model's decoder blocks, one at a time from its checkpoint, and computes their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvik.attention.sdpa import SdpaAttention
from kvik.errors import ModelError, shown
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import DTYPES
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import IN_RUNS, WHOLE, Checkpoint, open_checkpoint
from kvik.nn.parameters import DeclaredTensor
from kvik.quantize.block import WEIGHT, Block, BlockInputs, block_builder, unwatched
from kvik.quantize.source import expert_roles
from kvik.spec.declared import Role
from kvik.spec.layers import LayerSpec
from kvik.spec.network import ForwardContext, Network
from kvik.spec.stored_weights import stored_names

# Dtype in which blocks run, by the checkpoint's: fp16 is too narrow for some residual streams.
RUN_DTYPES = DTYPES | {"float16": torch.float32}


class ModelBlocks:
    """The blocks of a checkpoint of plain floats, for windows of a number of tokens."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint, self._spec = checkpoint, spec
        self._entries = checkpoint.entries
        self._tokens, self.dtype, self.device = tokens, dtype, device
        declared = spec.declaration
        self._head = declared.head.names[0] + WEIGHT
        self._before = declared.block.partition("{}")[0]  # prefix of the names of blocks

    def check(self) -> None:
        """Check that all tensors of all blocks can be used, before any work begins.

        Raises:
            ModelError: a tensor of a block is missing, has another shape, or holds NaN or infinity.
        """
        names = {}
        for index in range(self._spec.num_layers):
            for declared in self._declared(self._block_spec(index)):
                if declared.name.startswith(self._scope):
                    name = self._stored_name(declared.name, index)
                    names[name] = IN_RUNS
                    if self._entries[name].shape != declared.shape:
                        raise _wrong_shape(name, declared, self._entries[name].shape)
        for run in self._checkpoint.runs(names):
            if not run.values.is_floating_point():
                raise ModelError("model", f"tensor {shown(run.name)} does not hold floats")
            run.check_finite()

    def input_layers(self, windows: Tensor) -> InputLayers:
        """Return the part of the network before the first block, for windows [n, tokens]. Only
        embeddings of tokens that occur are read.

        Raises:
            ModelError: a tensor is missing, or its file cannot be read.
        """
        used, ids = windows.unique(return_inverse=True)
        first = self._spec.layers[0]
        alone = first.token_input or first.streams
        layers = (replace(first, input_tokens=None),) if alone else ()
        spec = replace(self._spec, layers=layers, vocab_size=len(used))
        builder = block_builder(
            spec, TORCH, SdpaAttention(TORCH), self._tokens, self.dtype, self.device
        )
        network = spec.family.network(spec, builder)
        of_layers: list[tuple[DeclaredTensor, Tensor]] = []
        for declared in builder.declared.tensors:
            if declared.name == self._head or declared.name.startswith(self._scope):
                continue
            name = self._stored_name(declared.name, 0)
            stored_shape = self._entries[name].shape
            tables = self._spec.vocab_size, first.input_tokens
            if declared.shape[0] == len(used) and stored_shape[0] in tables:
                values = self._rows(name, used)
            else:
                values = self._read([name])[name]
            if values.shape == declared.shape:
                declared.fill(0, values.to(self.device))
            elif layers and values.numel() == self._spec.num_layers * math.prod(declared.shape):
                of_layers.append((declared, values))
            else:
                raise _wrong_shape(name, declared, values.shape)
        return InputLayers(network, ids, of_layers, self.device)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The facts of each block."""
        return self._spec.layers

    def shared(self, index: int) -> bool:
        """Return whether later blocks read the keys and values of this one."""
        return any(layer.kv_from == index for layer in self.layers)

    def kv_width(self, index: int) -> int:
        """Return the width of `BlockInputs.kv` of a block."""
        return 2 * math.prod(self._spec.heads(self._spec.layers[index]))

    def block(self, index: int) -> Block:
        """Build a block with its weights from the checkpoint.

        Raises:
            ModelError: a tensor is missing, or its file cannot be read.
        """
        spec = self._block_spec(index)
        names = {
            declared.name: self._stored_name(declared.name, index)
            for declared in self._declared(spec)
            if declared.name.startswith(self._scope)
        }
        values = self._read(names.values())
        tensors = {name: (stored, values[stored]) for name, stored in names.items()}
        return Block(spec, self._tokens, tensors, self.dtype, self.device)

    def stored(self, pattern: str, index: int) -> str:
        """Return the name of a layer in the checkpoint; {} of the pattern is the block."""
        names = stored_names(pattern.format(index))
        begins = (n for n in names if any(key.startswith(f"{n}.") for key in self._entries))
        return next(begins, names[0])

    def expert_roles(self, index: int) -> dict[str, Role]:
        """Return the role of each matrix of a block's experts, by its name in the checkpoint."""
        roles = expert_roles(self._spec, index)
        return {self.stored(pattern, index): role for pattern, role in roles.items()}

    @property
    def _scope(self) -> str:
        """The prefix of a block's names, as a model of one layer declares them."""
        return f"{self._before}0."

    def _block_spec(self, index: int) -> ModelSpec:
        """Return the spec of one layer alone: another's keys and values are in its own cache."""
        layer = replace(self._spec.layers[index], input_tokens=None)
        if layer.kv_from is not None:
            layer = replace(layer, kv_from=0)
        return replace(self._spec, layers=(layer,), vocab_size=1)

    def _declared(self, spec: ModelSpec) -> list[DeclaredTensor]:
        meta = torch.device("meta")
        builder = block_builder(spec, TORCH, SdpaAttention(TORCH), self._tokens, self.dtype, meta)
        spec.family.network(spec, builder)
        return builder.declared.tensors

    def _stored_name(self, declared: str, index: int) -> str:
        """Return a declared tensor's name in the checkpoint.

        Raises:
            ModelError: there is no such tensor.
        """
        name = declared.replace(self._scope, f"{self._before}{index}.", 1)
        for stored in stored_names(name):
            if stored in self._entries:
                return stored
        raise ModelError("model", f"its weights lack {shown(name)}")

    def _read(self, names: Iterable[str]) -> dict[str, Tensor]:
        selections = dict.fromkeys(names, WHOLE)
        return {run.name: run.values.clone() for run in self._checkpoint.runs(selections)}

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        """Return rows of a tensor: ids [n] -> [n, width]. Ids beyond it have the first row."""
        beyond = ids >= self._entries[name].shape[0]
        ids, places = ids.masked_fill(beyond, 0).unique(return_inverse=True)
        rows = []
        for run in self._checkpoint.runs({name: IN_RUNS}):
            ends = torch.tensor([run.first, run.first + len(run.values)])
            low, high = torch.searchsorted(ids, ends).tolist()
            rows.append(run.values[ids[low:high] - run.first])
        return torch.cat(rows)[places]


def _wrong_shape(name: str, declared: DeclaredTensor, shape: Sequence[int]) -> ModelError:
    message = f"must have shape {list(declared.shape)} by config.json, not {list(shape)}"
    return ModelError("model", f"tensor {shown(name)} {message}")


class InputLayers:
    """The part of a model before the first block, for the tokens of some windows.

    Args:
        network: with one layer or none; complete except for the layer and `of_layers`.
        ids: [windows, tokens], row numbers in the network's reduced embedding.
        of_layers: tensors of the network, each with the checkpoint's tensor for all layers.
    """

    def __init__(
        self,
        network: Network,
        ids: Tensor,
        of_layers: Sequence[tuple[DeclaredTensor, Tensor]],
        device: torch.device,
    ) -> None:
        self._network, self._ids, self._of_layers = network, ids, of_layers
        self._device = device

    def embed(self, step: int) -> Iterator[Tensor]:
        """Yield the residual stream before the first block, [up to step, tokens, hidden]."""
        for shape, ids, ctx in self._parts(step):
            yield self._network.enter(ids, ctx).view(*shape, -1)

    def token_inputs(self, layer: int, step: int) -> Iterator[Tensor]:
        """Yield the token inputs of a layer, [up to step, tokens, width]."""
        for declared, values in self._of_layers:
            axis = next(axis for axis, n in enumerate(declared.shape) if n != values.shape[axis])
            size = declared.shape[axis]  # a part for each layer
            declared.fill(0, values.narrow(axis, layer * size, size).to(self._device))
        for shape, ids, ctx in self._parts(step):
            inputs = self._network.token_inputs(ids, self._network.enter(ids, ctx), ctx)
            assert inputs is not None
            yield inputs.view(*shape, -1)

    def _parts(self, step: int) -> Iterator[tuple[torch.Size, Tensor, ForwardContext]]:
        """Yield the shape of some windows, their ids [tokens] and their context."""
        for part in self._ids.split(step):
            positions = torch.arange(part.shape[1], device=self._device).repeat(len(part))
            ids = part.flatten().to(self._device)
            yield part.shape, ids, ForwardContext(positions, (), ())


def walk(model: ModelBlocks, windows: Tensor) -> Iterator[tuple[Block, BlockInputs, Tensor]]:
    """Yield each block, its inputs for windows [n, tokens], and the residual stream after it."""
    input_layers, kv = model.input_layers(windows), dict[int, Tensor]()
    (x,) = input_layers.embed(len(windows))
    for index, layer in enumerate(model.layers):
        block, token_input = model.block(index), None
        if layer.token_input:
            (token_input,) = input_layers.token_inputs(index, len(windows))
        inputs = BlockInputs(x, token_input, None if layer.kv_from is None else kv[layer.kv_from])
        x = block.run(
            inputs, unwatched, partial(kv.__setitem__, index) if model.shared(index) else None
        )
        yield block, inputs, x


def open_blocks(
    folder: Path, spec: ModelSpec, windows: Tensor | None, device: torch.device
) -> ModelBlocks:
    """Open a model for reading block by block.

    Args:
        windows: [windows, tokens] of calibration text; None: there is none.

    Raises:
        ModelError: its files cannot be read.
    """
    tokens = 1 if windows is None else windows.shape[1]
    return ModelBlocks(open_checkpoint(folder), spec, tokens, RUN_DTYPES[spec.dtype], device)
