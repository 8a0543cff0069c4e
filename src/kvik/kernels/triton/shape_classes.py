"""For which numbers of tokens other kernels run: all that a model's forward compiles."""

from __future__ import annotations

from kvik.kernels.triton.attention_shapes import query_classes
from kvik.kernels.triton.matrix_shapes import FEW


def lengths(heads: int, kv_heads: int, most: int) -> tuple[int, ...]:
    """Tokens of a request, one number of each class: the largest, and of the last class the least,
    or `most`, which none exceeds. Those of long prompts come first."""
    bounds = {1, *(tile.tokens for tile in FEW), *query_classes(heads // kv_heads, kv_heads)}
    return tuple(sorted({min(most, n) for n in (*bounds, max(bounds) + 1)}, reverse=True))
