"""Attention of one step over the paged cache: selects a kernel for each sequence.

Sequences of few queries (decodes, drafts, trees, short chunks) use the split kernel, with a launch
for each height of tiles; the others use the prefill kernel, in one launch. The choice depends only
on a sequence's own number of queries. Launches cover a range of the batch and skip sequences that
belong to other launches, so only plain integers are prepared on the host: no copy to the device, no
synchronisation, and a step may be captured in a CUDA graph with its maxima.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvik.kernels.triton.attention_decode import attention_decode_kernel, attention_merge_kernel
from kvik.kernels.triton.attention_prefill import attention_prefill_kernel
from kvik.kernels.triton.attention_shapes import (
    ENOUGH,
    LAUNCHED,
    MAX_SHARE,
    MIN_SPLIT,
    SPREAD,
    WIDE,
    WORKSPACE,
    block_d,
    max_splits,
    prefill_tiles,
    query_classes,
    split_tiles,
    tallest,
)
from kvik.kernels.triton.attention_tile import CHUNK, LAST, LAST_AND_SINKS, LOG2_E
from kvik.kernels.triton.kv_load import kind_of, stored
from kvik.kernels.triton.launch import ceil_div, launch, power_of_two, shared_memory
from kvik.spec.visible_keys import Window

MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class SequenceRun:
    """The range of sequences that contains all with one number of queries."""

    queries: int
    # first, last: sequences. start, end: their tokens in the flat batch.
    first: int
    last: int
    start: int
    end: int
    context: int  # the longest


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A launch without its tensors and the scale of scores."""

    kernel: Any
    grid: tuple[int, ...]
    numbers: tuple[int, ...]  # the last numbers of the kernel; the merge kernel has no others
    constants: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # options of `launch`
    # Number of sequences whose results the next launch merges, and of results of each; None: it
    # merges nothing.
    parts: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step of one KV group; tensors as in `StepLayout`, and `runs` by number of queries."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    first_keys: Tensor | None
    tree: Tensor | None
    block_size: int
    window: Window | None
    runs: tuple[SequenceRun, ...]
    # Results of `launches`, by heads.
    planned: dict[Hashable, tuple[PlannedLaunch, ...]] = field(default_factory=dict, init=False)

    def launches(self, q: Tensor, keys: Tensor) -> tuple[PlannedLaunch, ...]:
        """Return the launches of a layer, planned in the first layer with such heads for all.

        Args:
            q: [tokens, heads, head_dim]. keys: of `PagedCache`.
        """
        heads = q.shape[1:], q.dtype, keys.shape[2], keys.dtype
        if heads not in self.planned:
            self.planned[heads] = tuple(_launches(self, q, keys))
        return self.planned[heads]

    @property
    def seen(self) -> tuple[int, int, int]:
        """`window`, `sink_keys` and `WINDOW` of the kernels."""
        window = self.window
        if window is None:
            return 0, 0, 0
        if window.sinks:
            return window.keys, window.sinks, LAST_AND_SINKS.value
        return window.keys, 0, (CHUNK if window.chunked else LAST).value


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The cache of one layer; tensors as in `LayerKV`, contiguous."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None


def runs_of(
    num_scheduled: Sequence[int], contexts: Sequence[int], first: int = 0, start: int = 0
) -> tuple[SequenceRun, ...]:
    """Summarise a batch by its few different numbers of queries, once for all layers.

    Args:
        first: of these sequences, in the batch. start: its first token there.
    """
    runs: dict[int, SequenceRun] = {}
    for i, (queries, context) in enumerate(zip(num_scheduled, contexts, strict=True), first):
        end = start + queries
        run = runs.get(queries)
        if run is None:
            runs[queries] = SequenceRun(queries, i, i, start, end, context)
        else:
            longest = max(run.context, context)
            runs[queries] = SequenceRun(queries, run.first, i, run.start, end, longest)
        start = end
    return tuple(runs[queries] for queries in sorted(runs))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores of a layer are transformed; as in `AttentionSpec`."""

    scale: float  # > 0
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def powers(self) -> tuple[float, float | None]:
        """Scale and softcap of exponents of 2."""
        return self.scale * LOG2_E, None if self.softcap is None else self.softcap * LOG2_E


def paged_attention(
    q: Tensor,
    cache: PagedCache,
    step: PagedStep,
    scoring: Scoring,
    out: Tensor,
    sink_q: Tensor | None = None,
) -> None:
    """Compute attention of queries over the cache, which includes the keys of this step.

    Args:
        q: [tokens, heads, head_dim], each token's heads contiguous.
        out: [tokens, heads, head_dim], contiguous; tokens of other sequences are left as they are.
        sink_q: q for sinks of the window, likewise; None: the same as for other keys.

    Raises:
        ValueError: head_dim is above 512.
    """
    if step.window is None or not step.window.sinks:
        sink_q = None
    elif sink_q is None:
        sink_q = q
    sinks, lengths = scoring.sinks, (step.query_start_loc, step.seq_lens, step.first_keys)
    slopes = scoring.slopes
    keys = (stored(cache.k), stored(cache.v), cache.k_scales, cache.v_scales)
    inputs = (q, sink_q, *keys, step.block_table, *lengths)
    sink_stride = 0 if sink_q is None else sink_q.stride(0)
    scores = (q.stride(0), sink_stride, step.block_table.stride(0), *scoring.powers)
    part_out = part_weight = None
    for planned in step.launches(q, cache.k):
        tensors: tuple[Tensor | None, ...] = (*inputs, sinks, slopes, out)
        numbers: tuple[float | None, ...] = (*scores, *planned.numbers)
        if planned.kernel is attention_merge_kernel:
            tensors, numbers = (part_out, part_weight, *lengths, sinks, out), planned.numbers
        elif planned.kernel is attention_decode_kernel:
            part_out = part_weight = None
            if planned.parts is not None:
                part_out = q.new_empty(*planned.parts, q.shape[2], dtype=torch.float32)
                part_weight = q.new_empty(*planned.parts, dtype=torch.float32)
            tensors = (*inputs, step.tree, sinks, slopes, out, part_out, part_weight)
        launch(planned.kernel, planned.grid, tensors, numbers, planned.constants, **planned.options)


def _launches(step: PagedStep, q: Tensor, keys: Tensor) -> Iterator[PlannedLaunch]:
    """See `PagedStep.launches`."""
    head_dim, kv_heads = q.shape[2], keys.shape[2]
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, not {head_dim}")
    classes = query_classes(q.shape[1] // kv_heads, kv_heads)
    long = classes[-1]
    floor = 0
    for max_queries in classes:
        runs = [run for run in step.runs if floor < run.queries <= max_queries]
        if runs:
            # A run alone in its step also takes fewer queries, so that a graph serves those too.
            above = floor if len(runs) < len(step.runs) else 0
            yield from _split(q, keys, step, joined(runs), above)
        floor = max(floor, max_queries)
    runs = [run for run in step.runs if run.queries > long]
    if runs:
        yield _prefill(q, keys, step, joined(runs), long)


def joined(runs: Sequence[SequenceRun]) -> SequenceRun:
    """Return one run that covers all runs, with the largest numbers."""
    return SequenceRun(
        max(run.queries for run in runs),
        min(run.first for run in runs),
        max(run.last for run in runs),
        min(run.start for run in runs),
        max(run.end for run in runs),
        max(run.context for run in runs),
    )


def _split(
    q: Tensor, keys: Tensor, step: PagedStep, run: SequenceRun, above: int
) -> Iterator[PlannedLaunch]:
    heads, head_dim, kv_heads = q.shape[1], q.shape[2], keys.shape[2]
    group = heads // kv_heads
    itemsize, of_cache = max(q.element_size(), keys.element_size()), kind_of(keys)
    tree, shared = step.tree is not None, shared_memory(q.device)
    highest = tallest(head_dim, itemsize, of_cache, shared)
    m = min(highest, max(16, power_of_two(run.queries * group)))
    tiles = split_tiles(m, head_dim, itemsize, kind=of_cache, tree=tree, shared=shared)
    stacked = ceil_div(run.queries * group, m)
    window, sink_keys, kind = step.seen
    shape = (group, kv_heads, head_dim, block_d(head_dim), m)
    seen = min(run.context, window + run.queries - 1) if window else run.context
    splits = max_splits(seen, kv_heads)
    # Results of a sequence: queries * heads * splits, and more tiles mean fewer splits.
    slab = min(run.queries * heads * splits, max(m * SPREAD.value, run.queries * heads))
    at_once = run.last + 1 - run.first
    tiles_at_once = at_once * kv_heads * stacked
    programs = min(splits, ceil_div(LAUNCHED, tiles_at_once))
    min_keys = min(MAX_SHARE, max(MIN_SPLIT.value, tiles_at_once * MAX_SHARE // ENOUGH))
    # A second set of sums, in which splits are merged, fits in registers beside 16 rows.
    merge = 1 if splits == 1 else 2 * (programs == 1 and m == 16 and head_dim <= WIDE)
    if not merge:
        at_once = min(at_once, max(1, WORKSPACE // (4 * slab * (head_dim + 1))))
    for first in range(run.first, run.last + 1, at_once):
        sequences = min(at_once, run.last + 1 - first)
        yield PlannedLaunch(
            attention_decode_kernel,
            (kv_heads * programs * stacked, sequences),
            (window, sink_keys, first, above, run.queries, programs, min_keys, slab),
            (*shape, tiles.n, step.block_size, of_cache, kind, tree, merge),
            {
                "num_warps": tiles.num_warps,
                "num_stages": tiles.num_stages,
                "maxnreg": None if merge else tiles.max_registers,  # the second sums would spill
            },
            None if merge else (sequences, slab),
        )
        if not merge:
            yield PlannedLaunch(
                attention_merge_kernel,
                (heads, run.queries, sequences),
                (window, first, above, run.queries, slab),
                (*shape, kind),
            )


def _prefill(
    q: Tensor, keys: Tensor, step: PagedStep, run: SequenceRun, above: int
) -> PlannedLaunch:
    head_dim, kv_heads = q.shape[2], keys.shape[2]
    group = q.shape[1] // kv_heads
    itemsize, of_cache = max(q.element_size(), keys.element_size()), kind_of(keys)
    tiles = prefill_tiles(
        head_dim,
        itemsize,
        kind=of_cache,
        edges=step.window is not None or step.first_keys is not None,
        sinks=step.window is not None and step.window.sinks > 0,
        block_size=step.block_size,
        shared=shared_memory(q.device),
    )
    window, sink_keys, kind = step.seen
    sequences = run.last + 1 - run.first
    max_tiles = (run.end - run.start) * group // tiles.m + sequences
    sizes = (tiles.m, tiles.n, tiles.edge, step.block_size)
    return PlannedLaunch(
        attention_prefill_kernel,
        (kv_heads * max_tiles,),
        (window, sink_keys, run.first, sequences, above),
        (group, kv_heads, head_dim, block_d(head_dim), *sizes, of_cache, kind),
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
