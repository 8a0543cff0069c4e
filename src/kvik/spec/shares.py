"""What each process of a group has of a model that is divided among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvik.spec.kv import KVCacheSpec, KVGroup

MAX_RANKS = 64  # csrc/group.hpp


def share_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first and the end of the pieces, of `count`, that are one process's. Shares differ
    by one at most."""
    return count * rank // size, count * (rank + 1) // size


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of queries of one process, and the heads of keys and values that they read; each as
    first and end."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]

    @staticmethod
    def of(heads: int, kv_heads: int, rank: int, size: int) -> HeadShare:
        """Share out heads so that those of each process read equally many of each head of keys.

        With fewer heads of keys than processes, several have the same one, and some of its queries
        each. There are at least as many heads of queries as processes.
        """
        each = heads // kv_heads
        if size <= kv_heads:
            begin, end = share_of(kv_heads, rank, size)
            return HeadShare((begin * each, end * each), (begin, end))
        owner = next(h for h in range(kv_heads) if rank < size * (h + 1) // kv_heads)
        first = size * owner // kv_heads
        sharers = size * (owner + 1) // kv_heads - first
        begin, end = share_of(each, rank - first, sharers)
        return HeadShare((owner * each + begin, owner * each + end), (owner, owner + 1))


def cut_groups(groups: Sequence[KVGroup], rank: int, size: int) -> tuple[KVGroup, ...]:
    """Return the cache of one process: of the heads of keys and values that it reads."""
    return tuple(
        replace(group, specs=tuple(_cut(spec, rank, size) for spec in group.specs))
        for group in groups
    )


def _cut(spec: KVCacheSpec, rank: int, size: int) -> KVCacheSpec:
    heads = spec.num_kv_heads
    begin, end = HeadShare.of(max(heads, size), heads, rank, size).kv_heads
    count = end - begin
    return replace(spec, num_kv_heads=count, bytes_per_token=spec.bytes_per_token // heads * count)
