"""A model's decoder blocks, one at a time from its checkpoint; and what goes into the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvik.attention.sdpa import SdpaAttention
from kvik.config.architectures import ARCHITECTURES
from kvik.config.errors import ModelError
from kvik.config.fields import shown
from kvik.config.model_spec import ModelSpec
from kvik.kernels.torch_ops import TORCH
from kvik.models.registry import MODELS
from kvik.nn.builder import DeclaredTensor
from kvik.nn.checkpoint import Checkpoint
from kvik.nn.context import ForwardContext
from kvik.quantize.block import WEIGHT, Block, block_builder
from kvik.quantize.structure import linear_inputs


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
        names = ARCHITECTURES[spec.architecture].matrices
        self._head = names.head + WEIGHT
        self._before = names.o[0].partition("{}")[0]  # what names of blocks begin with

    def check(self) -> None:
        """
        Raises:
            ModelError: a tensor of a block is missing, has another shape, or holds NaN or infinity.
        """
        names = {}
        for index in range(self._spec.num_layers):
            for declared in self._declared(self._block_spec(index)):
                if declared.name.startswith(self._scope):
                    name = self._stored_name(declared.name, index)
                    names[name] = True
                    if self._entries[name].shape != declared.shape:
                        raise ModelError(
                            "model",
                            f"tensor {shown(name)} must have shape {list(declared.shape)} by "
                            f"config.json, not {list(self._entries[name].shape)}",
                        )
        for run in self._checkpoint.runs(names):
            if not run.values.is_floating_point():
                raise ModelError("model", f"tensor {shown(run.name)} does not hold floats")
            # a sum is one pass, and tells if it is finite
            if not bool(run.values.sum(dtype=torch.float32).isfinite()) and not bool(
                run.values.isfinite().all()
            ):
                raise ModelError(
                    "model", f"tensor {shown(run.name)} holds NaN or infinity: nothing is quantised"
                )

    def embed(self, windows: Tensor, step: int) -> Iterator[Tensor]:
        """windows [n, tokens] -> the residual stream before the first block, some windows at a
        time: [up to step, tokens, hidden]. Only vectors of tokens that occur are read."""
        used, ids = windows.unique(return_inverse=True)
        spec = replace(self._spec, num_layers=0, windows=(), vocab_size=len(used))
        builder = block_builder(
            spec, TORCH, SdpaAttention(TORCH), self._tokens, self.dtype, self.device
        )
        network = MODELS[spec.architecture](spec, builder)
        for declared in builder.declared.tensors:
            if declared.kind != "matrix" or declared.name == self._head:
                continue
            name = self._stored_name(declared.name, 0)
            whole = self._entries[name].shape
            if declared.shape[0] == len(used) and whole[0] == self._spec.vocab_size:
                values = self._rows(name, used)
            else:
                values = self._read([name])[name]
            declared.fill(0, values.to(self.device))
        positions = torch.arange(self._tokens, device=self.device)
        for part in ids.split(step):
            ctx = ForwardContext(positions.repeat(len(part)), (), ())
            yield network.enter(part.flatten().to(self.device), ctx).view(*part.shape, -1)

    def block(self, index: int) -> Block:
        """
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
        """The name in the checkpoint of a layer; {} of the pattern is the block."""
        name = pattern.format(index)
        trunk = name.partition(".")[0] + "."
        found = any(key.startswith(f"{name}.") for key in self._entries)
        return name if found else name.removeprefix(trunk)

    def inputs(self) -> dict[str, int]:
        """Of each linear layer of all blocks, by its name in the checkpoint."""
        return {
            self.stored(pattern, index): width
            for index in range(self._spec.num_layers)
            for pattern, width in linear_inputs(self._spec).items()
        }

    @property
    def _scope(self) -> str:
        """What the names of a block begin with, as a model of one layer declares them."""
        return f"{self._before}0."

    def _block_spec(self, index: int) -> ModelSpec:
        return replace(self._spec, num_layers=1, windows=(self._spec.windows[index],), vocab_size=1)

    def _declared(self, spec: ModelSpec) -> list[DeclaredTensor]:
        meta = torch.device("meta")
        builder = block_builder(spec, TORCH, SdpaAttention(TORCH), self._tokens, self.dtype, meta)
        MODELS[spec.architecture](spec, builder)
        return builder.declared.tensors

    def _stored_name(self, declared: str, index: int) -> str:
        """
        Raises:
            ModelError: there is no such tensor.
        """
        name = declared.replace(self._scope, f"{self._before}{index}.", 1)
        for stored in (name, name.removeprefix(self._before.partition(".")[0] + ".")):
            if stored in self._entries:
                return stored
        raise ModelError("model", f"its weights lack {shown(name)}")

    def _read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = dict.fromkeys(names, False)
        return {run.name: run.values.clone() for run in self._checkpoint.runs(wanted)}

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a tensor: ids [n] ascending -> [n, width]."""
        found = []
        for run in self._checkpoint.runs({name: True}):
            ends = torch.tensor([run.first, run.first + len(run.values)])
            low, high = torch.searchsorted(ids, ends).tolist()
            found.append(run.values[ids[low:high] - run.first])
        return torch.cat(found)
