"""Divides a model among processes: a share of every layer (tensor parallelism), and stages
(pipeline parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kvik.spec.kv import KVCacheSpec, KVGroup

MAX_RANKS = 64  # csrc/group.hpp
MAX_STAGES = 64
MAX_REPLICAS = 64  # engines of one server, whose process delivers all tokens
TILE = 32  # outputs of a matrix that are never divided


def share_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first and the end of one process's part of `count` pieces. Parts differ by at most
    one."""
    return count * rank // size, count * (rank + 1) // size


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads of one process, and the KV heads that they read; each as first and end."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]

    @staticmethod
    def of(heads: int, kv_heads: int, rank: int, size: int) -> HeadShare:
        """Divide heads so that every process has, for each of its KV heads, equally many query
        heads.

        With fewer KV heads than processes, several processes have the same KV head and some of its
        query heads each. There are at least as many query heads as processes.
        """
        group = heads // kv_heads
        if size <= kv_heads:
            begin, end = share_of(kv_heads, rank, size)
            return HeadShare((begin * group, end * group), (begin, end))
        owner = next(h for h in range(kv_heads) if rank < size * (h + 1) // kv_heads)
        first = size * owner // kv_heads
        sharers = size * (owner + 1) // kv_heads - first
        begin, end = share_of(group, rank - first, sharers)
        return HeadShare((owner * group + begin, owner * group + end), (owner, owner + 1))


@dataclass(frozen=True, slots=True)
class Between:
    """The dimension between two matrices of a layer that processes divide, so that each computes
    its part alone (Shoeybi et al. 2019, section 3): attention heads, or channels of an MLP."""

    count: int  # of query heads, or of channels
    width: int  # channels of a head; or number of channels that are never divided
    kv_heads: int = 0  # number of KV heads; 0: the dimension is channels
    # Of the first matrix, in order: whether it has query heads, not KV heads, and the width of a
    # head.
    projections: tuple[tuple[bool, int], ...] = ()
    read: bool = False  # the matrix is the second one, which reads the dimension; else the first

    def of_rank(self, rank: int, size: int) -> tuple[int, int]:
        """Return the channels that one process's part of the second matrix reads: first and end."""
        if self.kv_heads:
            first, end = HeadShare.of(self.count, self.kv_heads, rank, size).heads
            return first * self.width, end * self.width
        first, end = share_of(-(-self.count // self.width), rank, size)
        return min(first * self.width, self.count), min(end * self.width, self.count)

    def made(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Return the outputs of one process's part of the first matrix: runs, as first and end."""
        if not self.kv_heads:
            return [self.of_rank(rank, size)]
        share = HeadShare.of(self.count, self.kv_heads, rank, size)
        runs, begin = [], 0
        for of_queries, width in self.projections:
            first, end = share.heads if of_queries else share.kv_heads
            runs.append((begin + first * width, begin + end * width))
            begin += (self.count if of_queries else self.kv_heads) * width
        return runs


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Consecutive layers of a model, which one process or group computes."""

    # number, count: number of the stage, from 0, and of all stages.
    number: int
    count: int
    layers: range  # their numbers
    # It needs the embedding although it is not the first stage, for drafts.
    reads_tokens: bool = False

    @property
    def first(self) -> bool:
        """Whether it is the first stage."""
        return self.number == 0

    @property
    def embeds(self) -> bool:
        """Whether it has the embedding."""
        return self.first or self.reads_tokens

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.number == self.count - 1

    @staticmethod
    def all_of(ends: Sequence[int]) -> tuple[PipelineStage, ...]:
        """Return the stages whose layers end before `ends`."""
        runs = enumerate(pairwise((0, *ends)))
        return tuple(PipelineStage(i, len(ends), range(*run)) for i, run in runs)


def stage_groups(groups: Sequence[KVGroup], stage: PipelineStage) -> tuple[KVGroup, ...]:
    """Return the cache groups with only the layers of a stage, and in the last one that of a head
    after them. No group is removed, even without layers."""
    end = stage.layers.stop + stage.last
    cut = []
    for group in groups:
        pairs = zip(group.specs, group.layers, strict=True)
        kept = [
            (spec, number)
            for spec, number in pairs
            if stage.layers.start <= (number if spec.entries_of is None else spec.entries_of) < end
        ]
        specs, layers = tuple(spec for spec, _ in kept), tuple(layer for _, layer in kept)
        cut.append(replace(group, specs=specs, layers=layers))
    return tuple(cut)


def cut_groups(groups: Sequence[KVGroup], rank: int, size: int) -> tuple[KVGroup, ...]:
    """Return the cache groups with only the KV heads that one process reads."""
    return tuple(
        replace(group, specs=tuple(cut_cache(spec, rank, size) for spec in group.specs))
        for group in groups
    )


def kv_share(heads: int, rank: int, size: int) -> tuple[int, int]:
    """Return the KV heads of one process: first and end."""
    return HeadShare.of(max(heads, size), heads, rank, size).kv_heads


def cut_cache(spec: KVCacheSpec, rank: int, size: int) -> KVCacheSpec:
    """Return the cache of a layer with only the KV heads that one process reads."""
    heads = spec.num_kv_heads
    begin, end = kv_share(heads, rank, size)
    count, index = end - begin, spec.index_bytes  # every process has the keys of an indexer
    size = (spec.bytes_per_token - index) // heads * count + index
    return replace(spec, num_kv_heads=count, bytes_per_token=size)


def stages_of(
    costs: Sequence[int], first: int, last: int, count: int, joined: Sequence[tuple[int, int]] = ()
) -> tuple[range, ...]:
    """Divide layers among the stages of a pipeline so that the largest stage is as small as
    possible, and then the stages are as even as possible.

    Args:
        costs: bytes of each layer.
        first, last: additional bytes of the first and the last stage, for embedding and head.
        joined: pairs of layers, (reader, source), where the reader uses the source's keys and
            values; both are in one stage, with all layers between them.

    Returns:
        The layers of each stage, at least one.

    Raises:
        ValueError: there are fewer layers than stages, or too many are joined.
    """
    layers = len(costs)
    if not 1 <= count <= layers:
        raise ValueError(f"{layers} layers cannot be divided into {count} stages")
    for reader, source in joined:
        if not 0 <= source < reader < layers:
            raise ValueError(f"layer {reader} of {layers} cannot read what layer {source} keeps")
    no_cuts = {cut for reader, source in joined for cut in range(source + 1, reader + 1)}
    cuts = [cut for cut in range(layers + 1) if cut not in no_cuts]
    num_parts = len(cuts) - 1
    if count > num_parts:
        raise ValueError(
            f"{layers} layers cannot be divided into {count} stages, but into {num_parts} at most: "
            f"layers read the keys and values of others"
        )
    sums = list(accumulate(costs, initial=first))
    sums[0], sums[-1] = 0, sums[-1] + last
    # The best division of the first layers into `stage` stages, by its end as an index of `cuts`:
    # the largest stage, the sum of squares, which measures unevenness, and the cuts.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for stage in range(1, count + 1):
        longer = {}
        for end in range(stage, num_parts - (count - stage) + 1):
            ways = []
            for start in (start for start in best if start < end):
                largest, squares, _ = best[start]
                size = sums[cuts[end]] - sums[cuts[start]]
                # ties: prefer the lightest last stage
                ways.append((max(largest, size), squares + size * size, -start))
            largest, squares, start = min(ways)
            longer[end] = (largest, squares, (*best[-start][2], cuts[end]))
        best = longer
    _, _, ends = best[num_parts]
    return tuple(range(begin, end) for begin, end in pairwise(ends))
