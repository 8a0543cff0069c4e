"""The table of weight formats; chooses the format of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from kvik.errors import ModelError, shown
from kvik.nn.formats.base import Dense, LinearShape, Shapes, WeightFormat
from kvik.nn.formats.bitsandbytes import Bnb4Bit, Bnb8Bit
from kvik.nn.formats.compressed_tensors import IntQuantized, PackQuantized
from kvik.nn.formats.fp4 import Mxfp4Blocks, Mxfp4Packed, Nvfp4
from kvik.nn.formats.fp8 import Fp8
from kvik.nn.formats.integers import Awq, Gptq
from kvik.nn.formats.ternary import Ternary
from kvik.nn.gguf_blocks import Blocks
from kvik.spec.stored_weights import (
    BLOCK_LAYOUTS,
    KEY,
    TERNARY_LAYOUTS,
    Layout,
    StoredScheme,
)

# (scheme, shape of the layer, shapes of its tensors) -> format of the layer.
MakeFormat = Callable[[StoredScheme, LinearShape, Shapes], WeightFormat]

FORMATS: Mapping[Layout, MakeFormat] = MappingProxyType(
    {
        "awq": Awq,
        "gptq": Gptq,
        "pack-quantized": PackQuantized,
        "int-quantized": IntQuantized,
        "fp8": Fp8,
        "mxfp4-pack-quantized": Mxfp4Packed,
        "mxfp4-blocks": Mxfp4Blocks,
        "mxfp4-deepseek": Mxfp4Packed,
        "nvfp4-pack-quantized": Nvfp4,
        "nvfp4-modelopt": Nvfp4,
        "bnb-nf4": Bnb4Bit,
        "bnb-fp4": Bnb4Bit,
        "bnb-int8": Bnb8Bit,
        **dict.fromkeys(TERNARY_LAYOUTS, Ternary),
        **dict.fromkeys(BLOCK_LAYOUTS, Blocks),
    }
)
PLAIN = "weight"
MAX_LISTED = 8


def choose_format(
    layer: str, stored: Shapes, scheme: StoredScheme | None, shape: LinearShape
) -> WeightFormat:
    """Return the format of a layer.

    Args:
        stored: shapes of its tensors in the checkpoint except the bias, by their names within the
            layer; empty: random weights, or the loader will report what is missing.
        scheme: what config.json declares; None: plain floats.

    Raises:
        ModelError: the tensors do not match the scheme.
    """
    if scheme is None:
        if stored and set(stored) != {PLAIN}:
            raise _mismatch(layer, stored, PLAIN)
        return Dense(shape)
    try:
        made = FORMATS[scheme.layout](scheme, shape, stored)
    except ValueError as error:
        source = "the GGUF file" if scheme.layout in BLOCK_LAYOUTS else KEY
        message = f"layer {shown(layer)}: {error}; {source} says {scheme}"
        raise ModelError("model", message) from None
    tensors = made.tensors(torch.float32)
    if stored and not set(tensors) <= set(stored):
        raise _mismatch(layer, stored, f"{', '.join(tensors)} ({scheme.layout})")
    return made


def has_scheme(stored: Shapes, scheme: StoredScheme, shape: LinearShape) -> bool:
    """Return whether a layer has the tensors of a scheme; see `choose_format`."""
    try:
        format = FORMATS[scheme.layout](scheme, shape, stored)
    except ValueError:
        return False
    return set(format.tensors(torch.float32)) <= set(stored)


def _mismatch(layer: str, stored: Shapes, names: str) -> ModelError:
    listed = ", ".join(sorted(stored)[:MAX_LISTED])
    return ModelError(
        "model",
        f"layer {shown(layer)} is stored as {listed}; by config.json {KEY} it must be {names}",
    )
