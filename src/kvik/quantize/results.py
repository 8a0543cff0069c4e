"""What a pass over a model gives, block by block, and how it tells where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvik.quantize.float8 import Float8
from kvik.quantize.quantised import Quantised

# Called with what is being worked on (a layer's name, "block 3: inputs", ...) and the share of the
# whole pass that is done, from 0 to 1.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What became of a linear layer.

    Attributes:
        name: in the checkpoint, "model.layers.0.self_attn.q_proj".
        quantised: None: it stays as it is (or as `BlockResult.changed` has it).
        error: || (W - Q) X || / || W X || on calibration inputs; || W - Q || / || W || without any;
            0 where it stays as it is.
        on_inputs: which of the two `error` is.
    """

    name: str
    quantised: Quantised | Float8 | None
    error: float
    on_inputs: bool


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What became of a decoder block.

    Attributes:
        index: of the block.
        layers: all linear layers, in the order of the model.
        changed: other tensors of the checkpoint that have other values now, because factors were
            folded into them, by name, in the shape and dtype of the checkpoint: norms, biases, and
            weights of layers that stay floats. What is in neither is as it was.
    """

    index: int
    layers: tuple[LayerResult, ...]
    changed: Mapping[str, Tensor]
