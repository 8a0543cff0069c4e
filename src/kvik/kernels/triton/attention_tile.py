"""The inner loop of every attention kernel: one tile of queries with one tile of keys.

Softmax is computed as it goes (Dao et al. 2022, "FlashAttention", algorithm 1; Milakov and
Gimelshein 2018): a row keeps the largest score so far and sums relative to it. Exponentials have
base 2, with log2(e) folded into the scale, so that each is one multiply-add and one instruction.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from kvik.kernels.triton.activation import capped
from kvik.kernels.triton.kv_load import load_scales, load_vectors, operand, product, vectors_at

LOG2_E = math.log2(math.e)
LOG2 = tl.constexpr(LOG2_E)
# Which keys before them queries see (0: all): the last `window` ones; those from the last multiple
# of `window` on; or the last ones and the first ones, which are sinks.
LAST = tl.constexpr(1)
CHUNK = tl.constexpr(2)
LAST_AND_SINKS = tl.constexpr(3)
# Arguments that change from step to step, which must not cause a new compilation.
OF_STEPS = [
    *("table_stride", "window", "sink_keys", "first_sequence", "sequences", "above", "most"),
    *("programs", "least", "slab"),
]


@triton.jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """Return the first key that a query at `position` sees, apart from sinks; below 0: all.

    Args:
        window: number of keys, without sinks. WINDOW: not 0.
    """
    before = position % window if WINDOW == CHUNK else window - 1
    return position - before


@triton.jit
def seen_by(where, position, window, sink_keys, WINDOW: tl.constexpr, OF_SINKS: tl.constexpr):
    """Return which keys rows see according to a window, [m, n], ignoring causality.

    Args:
        where: [n], positions of keys. position: [m], of rows.
        window, WINDOW: see `first_seen`. sink_keys: the number of first keys that are sinks.
        OF_SINKS: only sinks; else all other keys.
    """
    if OF_SINKS:
        seen = (where < sink_keys)[None, :] & (position >= 0)[:, None]
    else:
        seen = where[None, :] >= first_seen(position, window, WINDOW)[:, None]
        if WINDOW == LAST_AND_SINKS:
            seen &= (where >= sink_keys)[None, :]
    return seen


@triton.jit
def begin(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the state (sums [m, d], largest [m], total) before any keys.

    total is [m], or [m, BLOCK_N] if that is not 0: then each place of a tile has a separate total.
    If warps share a row, that saves three barriers per tile.
    """
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N] if BLOCK_N else [BLOCK_M], tl.float32)
    return sums, tl.full([BLOCK_M], float("-inf"), tl.float32), total


@triton.jit
def ended(state):
    """Return (sums, largest, total [m]) after all keys."""
    sums, largest, total = state
    if len(total.shape) == 2:
        total = tl.sum(total, 1)
    return sums, largest, total


@triton.jit
def weigh(scores, largest, total, scale, lift, GUARDED: tl.constexpr):
    """Compute the online softmax of one tile.

    Args:
        scores: [m, n] fp32, not yet scaled; -inf where a key is not seen.
        largest: [m], of the scores so far, also not scaled. total: see `begin`.
        scale: > 0, with log2(e) folded in.
        lift: [n], is added to scores for the weights, but not for the total; may be None.
        GUARDED: whether a row may have seen no key so far, this tile included.

    Returns:
        weights [m, n], factor [m] for the previous sums, largest, total.
    """
    lifted = scores if lift is None else scores + lift[None, :]
    new = tl.maximum(largest, tl.max(lifted, 1))
    base = tl.where(new == float("-inf"), 0.0, new) if GUARDED else new
    weights = tl.exp2(lifted * scale - (base * scale)[:, None])
    counted = weights if lift is None else tl.exp2(scores * scale - (base * scale)[:, None])
    factor = tl.exp2((largest - base) * scale)
    if len(total.shape) == 2:
        total = total * factor[:, None] + counted
    else:
        total = total * factor + tl.sum(counted, 1)
    return weights, factor, new, total


@triton.jit
def unit_of(scale, softcap, slopes):
    """Return the remaining factor of the scores of a state; capped scores, and those to which
    something is added, are scaled already."""
    unit = scale if softcap is None else 1.0
    return unit if slopes is None else 1.0


@triton.jit
def slope_of(slopes, head):
    """Return the slope of each row with log2(e) folded in, [m].

    Args:
        slopes: [heads] fp32. head: [m], of each row.
    """
    return tl.load(slopes + head) * LOG2


@triton.jit
def from_sinks(position, window, sink_keys, OF_SINKS: tl.constexpr):
    """Return the positions relative to which rows, [m], have their keys: those of the rows, but in
    the part of the sinks the window follows these directly."""
    return tl.minimum(position, window + sink_keys - 1) if OF_SINKS else position


@triton.jit
def attend(
    q, state, k_cache, v_cache, k_scales, v_scales, table, head, at, place,
    visible, scale, softcap, slope, where, position,
    TYPE: tl.constexpr, KIND: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Return the state after one more tile of keys.

    Args:
        q: [m, BLOCK_D], an operand.
        state: see `begin`.
        place: [n], places of the keys in their sequence; all are valid, but places that no row sees
            may repeat others. visible: [m, n].
        scale, softcap: with log2(e) folded in; softcap may be None.
        slope: see `slope_of`; None without slopes, else where and position are used, those of keys
            [n] and rows [m].
        ALL: every row sees every key, and visible is not used.
    """
    sums, largest, total = state
    VECTORS: tl.constexpr = BLOCK_SIZE * KV_HEADS
    WHOLE: tl.constexpr = ALL and place.shape[0] % BLOCK_SIZE == 0
    block, within = vectors_at(table, at, place, head, BLOCK_SIZE, KV_HEADS, WHOLE)
    k_zero, v_zero = 0, 0
    if KIND != "float":
        k_scale, k_zero, v_scale, v_zero = load_scales(
            k_scales, v_scales, block * VECTORS + within, head, KIND, KV_HEADS
        )
    k = load_vectors(k_cache, block, within, k_zero, TYPE, KIND, VECTORS, HEAD_DIM, BLOCK_D)
    scores = product(q, tl.trans(k), None)
    if KIND != "float":
        scores *= k_scale[None, :]
    if softcap is not None:
        scores = capped(scores * scale, softcap)
    if slope is not None:
        scores = scores * unit_of(scale, softcap, None)
        scores += slope[:, None] * (where[None, :] - position[:, None]).to(tl.float32)
    if not ALL:
        scores = tl.where(visible, scores, float("-inf"))
    unit = unit_of(scale, softcap, slope)
    lift = None
    if KIND != "float" and tl.float16 == TYPE:
        # A weight times a scale may be too small for fp16, so it is relative to the largest such
        # product. Zeros have any scale; that of numbers that are not finite is NaN, which is kept.
        least = tl.full(v_scale.shape, 1e-20, tl.float32)
        lift = tl.log2(tl.maximum(v_scale, least, propagate_nan=tl.PropagateNan.ALL)) / unit
    weights, factor, largest, total = weigh(scores, largest, total, unit, lift, not ALL)
    v = load_vectors(v_cache, block, within, v_zero, TYPE, KIND, VECTORS, HEAD_DIM, BLOCK_D, True)
    if KIND != "float" and tl.float16 != TYPE:
        weights *= v_scale[None, :]
    sums = product(operand(weights, TYPE), v, sums * factor[:, None])
    return sums, largest, total


@triton.jit
def with_sinks(state, unit, sinks, head):
    """Return (sums, total [m]) after all keys and, unless `sinks` is None, the sink of each row.

    Args:
        state: (sums, largest, total [m]). unit: see `unit_of`.
        sinks: [heads] fp32. head: [m], of each row.
    """
    sums, largest, total = state
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2
        most = tl.maximum(largest * unit, sink)
        fall = tl.exp2(largest * unit - most)
        sums *= fall[:, None]
        total = total * fall + tl.exp2(sink - most)
    return sums, total


@triton.jit
def finish(sums, total):
    """Return the results, [m, d]; 0 for a row that saw no key."""
    return sums / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def log2_weight(largest, total, scale):
    """Return log2 of the sum of each row's weights, [m], not relative to its largest score.

    It is -inf for a row that saw no key.
    """
    return largest * scale + tl.log2(tl.where(total == 0.0, 1.0, total))


@triton.jit
def bits_set(words):
    """Return the number of bits set, of int64 >= 0."""
    x = words - ((words >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return x & 127
