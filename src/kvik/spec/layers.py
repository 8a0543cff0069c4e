"""What differs from layer to layer of a model, and how files say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvik.errors import shown
from kvik.spec.fields import Fields
from kvik.spec.rope import MAX_POSITIONS, RopeSpec, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW = 4096  # of transformers, when the key is left out; null means no window


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer.

    Attributes:
        window: keys that a query sees, its own included; None: all.
        rope: how positions turn its queries and keys; None: they do not.
    """

    window: int | None = None
    rope: RopeSpec | None = None


# config.json, number of layers, trained positions -> the layers. Raises `ModelError`.
LayerRule = Callable[[Fields, int, int], tuple[LayerSpec, ...]]


def unturned_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Learned positions, as in GPT-2: layers know none."""
    return (LayerSpec(),) * layers


def equal_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer sees all keys."""
    return (LayerSpec(None, read_rope(fields, positions)),) * layers


def windowed_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer has a sliding window, unless `sliding_window` is null (Mistral)."""
    return (LayerSpec(read_window(fields), read_rope(fields, positions)),) * layers


def switched_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Windows in use if `use_sliding_window` says so, where `layer_types` does, else from
    `max_window_layers` on (Qwen2 and 3)."""
    rope = read_rope(fields, positions)
    window = read_window(fields) if fields.boolean("use_sliding_window", False) else None
    if "layer_types" in fields:
        return tuple(LayerSpec(one, rope) for one in typed_windows(fields, layers, window))
    first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
    return tuple(LayerSpec(window if i >= first else None, rope) for i in range(layers))


def read_window(fields: Fields) -> int | None:
    """Return `sliding_window`."""
    if fields.is_null("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, MAX_POSITIONS, DEFAULT_WINDOW)


def layer_types(fields: Fields, layers: int, every: int = 0) -> tuple[str, ...]:
    """Return `FULL` or `SLIDING` for each layer, as `layer_types` has it.

    Args:
        every: without that key, each `every`-th layer is full; 0: the key is there.
    """
    if every and "layer_types" not in fields:
        return tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(layers))
    types = fields.strings("layer_types")
    if len(types) != layers:
        raise fields.error("layer_types", f"must have {layers} entries, not {len(types)}")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise fields.error("layer_types", f"must hold {FULL} or {SLIDING}, not {shown(kind)}")
    return types


def typed_windows(
    fields: Fields, layers: int, window: int | None, every: int = 0
) -> tuple[int | None, ...]:
    """Return the window of each layer; see `layer_types`."""
    types = layer_types(fields, layers, every)
    if window is None and SLIDING in types:
        raise fields.error("layer_types", f"has {SLIDING}, but no sliding_window is in use")
    return tuple(window if kind == SLIDING else None for kind in types)
