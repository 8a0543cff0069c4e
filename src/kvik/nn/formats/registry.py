"""Which weight formats exist, and which one a layer of a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.config.errors import ModelError
from kvik.config.fields import shown
from kvik.nn.formats.base import WeightFormat
from kvik.nn.formats.dense import Dense

# The first that matches is taken, so special formats stand before general ones.
FORMATS: tuple[WeightFormat, ...] = (Dense(),)


def choose_format(
    layer: str, tensors: frozenset[str], quantization: Mapping[str, object] | None
) -> WeightFormat:
    """The format of a layer that the checkpoint stores as `tensors`.

    A layer without any tensor gets the last, plainest format: random weights are made in it, and
    for a checkpoint the loader then says which tensors are missing.

    Raises:
        ModelError: no known format stores a layer like this.
    """
    if not tensors:
        return FORMATS[-1]
    for candidate in FORMATS:
        if candidate.match(tensors, quantization):
            return candidate
    method = shown((quantization or {}).get("quant_method"))
    raise ModelError(
        "model",
        f"{layer} is stored as {', '.join(sorted(tensors)[:8])} (quant_method {method}); "
        f"known weight formats: {', '.join(known.name for known in FORMATS)}",
    )
