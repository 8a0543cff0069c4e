"""What a forward pass needs beside its token ids; passed explicitly, never global."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvik.attention.base import AttentionMetadata, LayerKV


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Attributes:
    positions: [tokens] int64, position of each token in its sequence.
    metadata: attention arrays of this step, one per KV group.
    kv: the cache of each layer, indexed by layer.
    """

    positions: Tensor
    metadata: tuple[AttentionMetadata, ...]
    kv: tuple[LayerKV, ...]
