"""What differs between kinds of KV groups: which cached blocks a prefix needs, which can go."""

from __future__ import annotations

from kvik.config.kv_spec import KVCacheSpec, KVKind


def first_visible_block(spec: KVCacheSpec, position: int, block_size: int) -> int:
    """Index of the first block that holds a key visible to the query at `position`.

    Full attention sees everything. A window of w sees keys j with position - w < j <= position.
    """
    if spec.kind is KVKind.FULL or spec.window is None:
        return 0
    return max(0, position - spec.window + 1) // block_size
