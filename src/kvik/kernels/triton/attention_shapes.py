"""Division of attention for a GPU: plain data and arithmetic, for kernels and launchers.

Nothing is tuned at run time: an answer must not depend on which shape happened to be timed first.
The numbers of the split kernel were measured on an H200; the others are derived for Hopper (bytes
in flight, registers). They fit Ampere's smaller shared memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import triton
import triton.language as tl

from kvik.kernels.triton.launch import MAX_SHARED, ROOMY, ceil_div, power_of_two
from kvik.kernels.triton.matrix_shapes import FEW, MAX_IN_WORDS, SOME

# Programs that a single sequence may be spread over: about the multiprocessors of the largest GPUs,
# and a constant, so that results differ neither between GPUs nor between batches.
SPREAD = tl.constexpr(128)
# Keys; fewer do not justify a program and a row to merge. A multiple of the keys of a tile.
MIN_SPLIT = tl.constexpr(128)
SHORT = 64  # queries; a tree has no more
TALLEST = 64  # rows of a split kernel's tile: tokens times the query heads of a KV head
WIDE = 256  # channels of a head; sums of more take twice the registers, so tiles are smaller
# Programs that a launch of the split kernel aims at, for long sequences. Each program fills and
# drains a pipeline, so once ENOUGH tiles of rows occupy the GPU, a program takes up to MOST_SHARE
# keys of a short sequence. With more, the longest sequence of a batch would determine the time.
LAUNCHED, MAX_SHARE, ENOUGH = 8192, 1024, 512
# A tile's block ids are loaded before its keys, so the loop runs in three steps (ids, copies to
# shared memory, products): two more stages for each tile in flight.
STAGES = 5
IN_FLIGHT = 32 << 10  # bytes of K and V in a tile: 25 to 40 KiB hide the latency of memory
WORKSPACE = 64 << 20  # bytes of results of splits in one launch; a larger batch takes several


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of a tile of attention, and how it is compiled."""

    # m, n: rows (queries times query heads of a KV head) and keys of a tile.
    m: int
    n: int
    num_warps: int
    num_stages: int
    edge: int = 0  # keys of the prefill kernel's tiles that not every row sees
    max_registers: int | None = None  # of a thread; None: as many as the compiler chooses


def split_tiles(
    m: int,
    head_dim: int,
    itemsize: int,
    *,
    kind: str = "float",
    tree: bool = False,
    shared: int,
) -> Tiles:
    """Return the tiles of the split kernel, whose time is dominated by reading K and V.

    Args:
        m: 16, 32 or 64 rows, up to `tallest`. The queries of one decode are 16, the least a tensor
            core takes.
        itemsize: bytes of a number of the queries or of the cache, whichever are larger: the
            size of the factors of products.
        kind: of the cache's numbers (`kv_load.kind_of`).
        tree: the step has trees. shared: bytes that a program can have.
    """
    wide, roomy = block_d(head_dim), shared >= ROOMY
    n = min(128, IN_FLIGHT // (2 * wide * itemsize))
    warps, stages = 4, STAGES
    if tree and m == TALLEST:  # which keys a node sees takes registers
        n //= 2
    if not roomy:
        n //= 2
    if itemsize == 4:  # no tensor cores: keys and values, too, are in registers
        n = min(n, 16 if tree and m > 16 else 32)
        warps = 8 if m > 16 and m * wide >= 4096 else 4
        if not roomy or m * wide > 8192:  # a tile in flight does not fit
            stages = 3
    if wide > WIDE:
        warps = 8
        if itemsize == 4:
            stages = 3 if roomy else 1
        elif not roomy:
            stages -= 1
    # More programs on a multiprocessor hide the latency of converting bytes before the products.
    bytes_kept = kind in ("fp8", "int8") and m == 16 and wide == 128 and itemsize == 2
    return Tiles(m, max(16, n), warps, stages, max_registers=128 if bytes_kept else None)


def tallest(head_dim: int, itemsize: int, kind: str, shared: int = MAX_SHARED) -> int:
    """Return the most rows of a tile of the split kernel; 64 of 512 sums would spill, and 64 of 256
    numbers of fp32 take half of a consumer GPU's shared memory."""
    if block_d(head_dim) == WIDE and itemsize == 4 and shared < ROOMY:
        return TALLEST // 2
    if block_d(head_dim) <= WIDE:
        return TALLEST
    return 16 if itemsize == 4 or kind == "int4" else 32


def prefill_tiles(
    head_dim: int,
    itemsize: int,
    *,
    kind: str,
    edges: bool,
    sinks: bool = False,
    block_size: int = 16,
    shared: int,
) -> Tiles:
    """Return the tiles of the prefill kernel, whose time is dominated by its products.

    128 rows for two groups of warps that use the tensor cores alternately. With 128 keys a tile has
    the fewest instructions per product, and Hopper's tensor cores read the fewest operands from
    shared memory; scores, weights and sums of a row just fit 255 registers a thread, which
    leaves too few for the pointers that blocks of more than 32 take. Tiles that some rows see only
    in part are smaller: fewer masked scores are computed.

    Args:
        itemsize, shared: as of `split_tiles`. kind: of the cache's numbers (`kv_load.kind_of`).
        edges: keys end at a window or at the first one that is kept, which takes a loop more.
        sinks: a window has sinks, whose queries take as much shared memory as the others.
    """
    wide, roomy = block_d(head_dim), shared >= ROOMY
    if wide > WIDE:
        return _wide_prefill_tiles(itemsize, kind, edges, shared)
    if itemsize == 4 and wide > 128 and not roomy:
        return Tiles(16, 16, 8, STAGES, 16)
    if itemsize == 4:  # no tensor cores, and twice the registers
        return Tiles(32, 32 if roomy and wide <= 64 else 16, 4 if wide <= 64 else 8, STAGES, 16)
    # Half the bytes, so half the rows can share them; numbers are widened in registers.
    if kind != "float":
        n = 64 if wide <= 128 and roomy else 32
        return Tiles(64, n, 4, STAGES, 16 if wide > 128 else n)
    if not roomy:
        n = 32 if wide <= 128 else 16
        return Tiles(64, n, 4, STAGES, n)
    if wide > 128 and shared < MAX_SHARED:
        return Tiles(64, 32, 4, STAGES - 1, 32)
    if wide > 128:  # 32 keys of such large heads fit, so two tiles are in flight
        return Tiles(128, 32, 8, STAGES if sinks else STAGES + 2, 32)
    if wide <= 64:
        return Tiles(128, 128, 8, STAGES, 64)
    large = shared >= MAX_SHARED and block_size in (1, 2, 4, 8, 16, 32)
    return Tiles(128, 128 if large else 64, 8, STAGES, 32)


def _wide_prefill_tiles(itemsize: int, kind: str, edges: bool, shared: int) -> Tiles:
    """Return the tiles for heads of 512: sums of 64 rows are half of the registers of 256 threads,
    and keys and values of 32, with the next tile, 128 KiB. Kernels that need more registers beside
    the sums have fewer rows, and so use older instructions of the tensor cores."""
    roomy = shared >= ROOMY
    if itemsize == 4:
        return Tiles(16, 16, 8, 3 if roomy or not edges else 1, 16)
    n, stages = (32, STAGES) if roomy else (16, STAGES - 1)
    if kind == "int4":
        return Tiles(16, n, 8, stages, 16)
    if kind != "float" or edges or not roomy:
        return Tiles(32, n, 8, stages, 16)
    return Tiles(64, n, 8, 3, 16)


def block_d(head_dim: int) -> int:
    """Return the columns of a tile; those after head_dim are zeros, which are not read."""
    return max(32, power_of_two(head_dim))


def max_queries(group: int, kv_heads: int) -> int:
    """Return the most queries of a sequence that uses the split kernel.

    Trees always use it, and other sequences do while their tiles alone would leave half of a GPU
    idle. It does not depend on the batch, so that a sequence's answer does not depend on it either.
    """
    return max(SHORT, TALLEST * (SPREAD.value // 2 // kv_heads) // group)


def query_classes(group: int, kv_heads: int) -> tuple[int, ...]:
    """Return the most queries of a sequence in a tile of 16, 32 and `TALLEST` rows of the split
    kernel, each of which is compiled separately; sequences with more queries use the prefill
    kernel."""
    classes = (16 // group, 32 // group, max_queries(group, kv_heads))
    return tuple(queries for queries in classes if queries > 0)


def lengths(
    heads: Collection[tuple[int, int]], limit: int, of_experts: Collection[int] = ()
) -> tuple[int, ...]:
    """Return one number of tokens for each class of shapes that a model's forward compiles.

    It is the largest number of each class, for the last class the smallest; none exceeds `limit`.
    The largest come first.

    Args:
        heads: each pair of numbers of query and KV heads that layers have.
        of_experts: the largest number of each class of a model's experts.
    """
    bounds = {1, *(tile.tokens for tile in FEW), 2 * SOME.tokens, MAX_IN_WORDS, *of_experts}
    bounds.update(n for count, kv in heads for n in query_classes(count // kv, kv))
    return tuple(sorted({min(limit, n) for n in (*bounds, max(bounds) + 1)}, reverse=True))


def max_splits(context: int, tiles: int) -> int:
    """Return an upper bound of the number of splits for contexts up to this.

    Args:
        tiles: least number per sequence: KV heads times tiles of rows.
    """
    return max(1, min(SPREAD.value // tiles, ceil_div(context, MIN_SPLIT.value)))


@triton.jit
def split(seen, tiles):
    """Return the keys of a split and the number of splits, for a sequence that sees `seen` keys.

    They depend only on the sequence. Sequences of few keys have few splits; for many keys there are
    as many as needed to spread a single sequence over a GPU.
    """
    most = tl.maximum(tl.full((), SPREAD, tl.int32) // tiles, 1)
    keys = tl.cdiv(tl.cdiv(seen, most), MIN_SPLIT) * MIN_SPLIT
    keys = tl.maximum(keys, MIN_SPLIT)
    return keys, tl.cdiv(seen, keys)
