"""The model that is quantised: its tensors by block, and the linear layers among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvik.errors import ModelError, shown
from kvik.files import is_gguf
from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.nn.checkpoint import open_checkpoint
from kvik.nn.formats.base import LinearShape
from kvik.nn.safetensors_writer import Stored
from kvik.quantize.block import WEIGHT
from kvik.quantize.structure import linear_inputs
from kvik.spec.engine_folder import is_engine_folder


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
        """The tensors of a block."""
        scope = self.block_scope.format(index)
        return {name: stored for name, stored in self.tensors.items() if name.startswith(scope)}

    def rest(self) -> dict[str, Stored]:
        """The tensors outside of blocks: embedding, last norm, head."""
        blocks = {name for i in range(self.spec.num_layers) for name in self.block(i)}
        return {name: stored for name, stored in self.tensors.items() if name not in blocks}

    @property
    def num_bytes(self) -> int:
        return sum(stored.entry.size for stored in self.tensors.values())


def open_source(folder: Path) -> Source:
    """
    Raises:
        ModelError: a folder that cannot be used, or a model that is quantised already.
    """
    if is_gguf(folder):
        raise ModelError("model", f"{folder.name} is a GGUF file: take the folder it was made of")
    if is_engine_folder(folder):
        raise ModelError("model", "is an engine folder: take the model it was built from")
    spec = read_model_spec(folder)
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
        for name, inputs in _linear_layers(spec, scope.format(block)).items()
    }
    return Source(folder, spec, tensors, layers, scope)


def _block_scope(spec: ModelSpec, tensors: Mapping[str, Stored]) -> str:
    """As the checkpoint has it: those saved from the bare trunk leave out the first word."""
    whole = spec.declaration.block
    bare = whole.partition(".")[2]
    begins = whole.format(0)
    return whole if any(tensor.startswith(begins) for tensor in tensors) else bare


def _linear_layers(spec: ModelSpec, scope: str) -> dict[str, int]:
    """Names of a block's linear layers, and how many inputs each has."""
    inputs = linear_inputs(spec)
    return {scope + name.partition("{}.")[2]: width for name, width in inputs.items()}


def _shape(layer: str, inputs: int, tensors: Mapping[str, Stored]) -> LinearShape:
    """Whichever way round the checkpoint stores it.

    Raises:
        ModelError: it is not there, or of another size.
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
