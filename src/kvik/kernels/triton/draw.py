"""Draw one token per row by inverse CDF, or return each token's probability, without sorting.

One kernel finds the largest logit and the weight of each chunk of a row. Then one program per row
finds the chunk, and in it the token, at which the running sum exceeds u times the total. So without
rules each logit is read once. A rule adds a search (see below). Weights are never written to
memory.

A row's token depends only on that row. Of tokens with equal logits, those with higher ids are
dropped first; weights are compared by their logits, whose order rounding does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.ops import Draws, Masks, Penalties, Truncation
from kvik.kernels.triton.launch import in_blocks, launch, power_of_two

# Finding the tokens that a row keeps without sorting: a rule keeps the nearest tokens, by distance
# from the top or (typical_p) from the entropy, until they reach a target.
#
# The logits of a row are divided into chunks, one per program: a single SM would take microseconds
# to read a row of 128k logits. One pass sums the weights up to each of a few distances, which gives
# an interval that contains the threshold. A second pass divides this interval in the same way. The
# last pass sums the weights nearer than the interval and lists the logits in it, a few percent of
# the row at most if logits differ. One program per row then searches the list, digit by digit of
# the logits' keys, and finds the threshold exactly. Exact sums are in double precision and depend
# only on the row.
#
# Floor of a rule: three reads of the logits; the last two skip chunks beyond the interval. A list
# may hold all of a row (equal logits); then its one program takes most of the time. Rows that do
# not use the rule are not read.

# The truncations that the kernels here apply.
RULES = ("top_k", "top_p", "min_p", "typical_p")

CHUNK = 4096  # logits of a program
EDGES = tl.constexpr(16)  # distances at which a pass sums
EDGE_STEP = tl.constexpr(1.0)  # between edges of an infinite interval, in temperatures or logits
SLACK = tl.constexpr(1e-5)  # relative error of the sums up to edges; more than they have
TILE = 64  # logits of each chunk that the search compares at a time
DIGITS = tl.constexpr(4)  # values of a digit of the search


@triton.jit
def ordered(logit):
    """Map fp32 to int32, preserving order; equal numbers are mapped to the same one."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0 is 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_of(logit):
    """Map fp32 to int64 in 0..2^32 - 1, as `ordered`."""
    return ordered(logit).to(tl.int64) + 0x80000000


@triton.jit
def nearness(distance, centre):
    """Return how near a token's information is to the entropy, as a key: larger is nearer."""
    return 0x7FFFFFFF - tl.abs(distance - centre).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def over_chunks(parts, row, chunks, CHUNKS: tl.constexpr):
    """Load one row of [rows, chunks], filled with zeros: [CHUNKS]."""
    at = tl.arange(0, CHUNKS)
    return tl.load(parts + row * chunks + at, mask=at < chunks, other=0)


@triton.jit
def top_of(highs, row, chunks, CHUNKS: tl.constexpr):
    """Return the largest logit of a row."""
    at = tl.arange(0, CHUNKS)
    return tl.max(tl.load(highs + row * chunks + at, mask=at < chunks, other=float("-inf")), 0)


@triton.jit
def whole_chunks(highs, temperature, weights, row, chunks, CHUNKS: tl.constexpr):
    """Return the weight of each chunk without rules, from `highs_kernel`: [CHUNKS] fp64."""
    at = tl.arange(0, CHUNKS)
    high = tl.load(highs + row * chunks + at, mask=at < chunks, other=float("-inf"))
    scale = tl.exp((high - tl.max(high, 0)) / tl.load(temperature + row))
    return over_chunks(weights, row, chunks, CHUNKS) * scale


@triton.jit
def kept_weights(
    logits, highs, temperature, cut, equals, min_p, centre, limit, row, chunk, vocab, stride,
    chunks, CUT: tl.constexpr, MIN_P: tl.constexpr, TYPICAL: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the weights of a chunk after the rules applied so far.

    Args:
        highs: [rows, chunks] fp32, largest logits.
        cut: [rows, 2] int64, the key of the lowest logit that is kept, and how many equal ones are.
        equals: [rows, chunks] int32, number of such equal logits in each chunk.
        centre, limit: [rows] fp32 and int64, a centre and the least nearness to it.

    Returns:
        ids, weights with dropped ones at 0 (fp32), distances from the top in temperatures, logits.
    """
    at = tl.arange(0, CHUNKS)
    top = top_of(highs, row, chunks, CHUNKS)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    logit = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    distance = (top - logit) / tl.load(temperature + row)
    weight = tl.exp(-distance)
    if CUT:
        lowest, allowed = tl.load(cut + 2 * row), tl.load(cut + 2 * row + 1)
        counts = over_chunks(equals, row, chunks, CHUNKS)
        before = tl.sum(tl.where(at < chunk, counts, 0), 0)
        lowest = (tl.maximum(lowest, 0) - 0x80000000).to(tl.int32)  # -1: below every logit
        key = tl.where(inside, ordered(logit), -0x80000000)
        equal = (key == lowest).to(tl.int32)
        first = (tl.cumsum(equal, 0) + before) <= allowed
        weight = tl.where((key > lowest) | ((equal > 0) & first), weight, 0.0)
    if MIN_P:
        weight = tl.where(weight >= tl.load(min_p + row), weight, 0.0)
    if TYPICAL:
        near = nearness(distance, tl.load(centre + row)) >= tl.load(limit + row)
        weight = tl.where(near, weight, 0.0)
    return ids, weight, distance, logit


@triton.jit
def applies(shares, row, vocab, COUNT: tl.constexpr):
    """Return whether a row uses a rule, with its share of the mass or (COUNT) number of tokens."""
    return tl.load(shares + row) < (vocab if COUNT else 1.0)


@triton.jit
def interval(bounds, row, FIRST: tl.constexpr):
    """Return the distances between which the target is reached; (FIRST) none are known yet."""
    if FIRST:
        before, beyond = tl.full([], -1.0, tl.float32), tl.full([], float("inf"), tl.float32)
    else:
        before, beyond = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
    return before, beyond


@triton.jit
def edges_of(before, beyond, temperature, row, COUNT: tl.constexpr):
    """Return the distances at which a pass sums; the last one is the end of the interval: [EDGES].

    An infinite interval is divided from its start, with steps in temperatures or (COUNT) logits.
    Rounded in one way, so that all kernels get the same edges.
    """
    number = tl.arange(0, EDGES)
    start = tl.maximum(before, 0.0)
    fixed = tl.full((), EDGE_STEP, tl.float32)
    if COUNT:
        fixed /= tl.load(temperature + row)
    step = tl.where(beyond < float("inf"), (beyond - start) * (1.0 / EDGES), fixed)
    edge = tl.fma((number + 1).to(tl.float32), step, start)
    return tl.where(number < EDGES - 1, edge, beyond)


@triton.jit
def has_nearer(highs, temperature, row, chunk, beyond, chunks, CHUNKS: tl.constexpr):
    """Return whether a chunk has a logit within a distance of the top."""
    high = tl.load(highs + row * chunks + chunk)
    return (top_of(highs, row, chunks, CHUNKS) - high) / tl.load(temperature + row) <= beyond


@triton.jit
def coarse_kernel(
    logits, highs, temperature, cut, equals, min_p, centre, shares, bounds, parts, vocab, stride,
    chunks, FIRST: tl.constexpr, COUNT: tl.constexpr, NEAR: tl.constexpr, CUT: tl.constexpr,
    MIN_P: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows, chunks]: sum weights or (COUNT) tokens up to each edge, by the distance from the
    top or (NEAR) from the centre: `parts` [rows, chunks, EDGES] fp64. Only the last sum of the
    FIRST pass, the total weight, is exact. Numbers of tokens at an infinite distance are too large.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, EDGES)
    where = (row * chunks + chunk) * EDGES + number
    used = applies(shares, row, vocab, COUNT)
    before, beyond = interval(bounds, row, FIRST)
    reads = used
    if not (FIRST or NEAR):
        reads &= has_nearer(highs, temperature, row, chunk, beyond, chunks, CHUNKS)
    if reads:
        _, weight, distance, _ = kept_weights(
            logits, highs, temperature, cut, equals, min_p, centre, centre, row, chunk, vocab,
            stride, chunks, CUT, MIN_P, False, CHUNK, CHUNKS,
        )  # fmt: skip
        if NEAR:
            distance = tl.abs(distance - tl.load(centre + row))
        edge = edges_of(before, beyond, temperature, row, COUNT)
        within = distance[None, :] <= edge[:, None]
        measure = tl.where(within, 1.0, 0.0)
        if not COUNT:
            measure *= weight[None, :]
        sums = tl.sum(measure, 1).to(tl.float64)
        if FIRST and not COUNT:
            total = tl.sum(weight.to(tl.float64), 0)
            sums = tl.where(number < EDGES - 1, sums, total)
        tl.store(parts + where, sums)
    elif used:
        tl.store(parts + where, tl.zeros([EDGES], tl.float64))


@triton.jit
def bounds_kernel(
    temperature, shares, parts, bounds, targets, vocab, chunks, FIRST: tl.constexpr,
    COUNT: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows]: the FIRST time, the target [rows] fp64; and the nearest two edges between which
    it is reached, [rows, 2]"""
    row = tl.program_id(0).to(tl.int64)
    if applies(shares, row, vocab, COUNT):
        at, number = tl.arange(0, CHUNKS), tl.arange(0, EDGES)
        where = (row * chunks + at)[:, None] * EDGES + number[None, :]
        reached = tl.sum(tl.load(parts + where, mask=(at < chunks)[:, None], other=0.0), 0)
        target = tl.load((shares if FIRST else targets) + row)
        if FIRST:
            if not COUNT:
                target *= tl.sum(tl.where(number == EDGES - 1, reached, 0.0), 0)
            tl.store(targets + row, target)
        before, beyond = interval(bounds, row, FIRST)
        edge = edges_of(before, beyond, temperature, row, COUNT)
        before = tl.max(tl.where(reached < target * (1.0 - SLACK), edge, before), 0)
        beyond = tl.min(tl.where(reached > target * (1.0 + SLACK), edge, beyond), 0)
        tl.store(bounds + 2 * row, before)
        tl.store(bounds + 2 * row + 1, beyond)


@triton.jit
def list_kernel(
    logits, highs, temperature, cut, equals, min_p, centre, shares, bounds, nearer, sums, counts,
    listed, vocab, stride, chunks, COUNT: tl.constexpr, NEAR: tl.constexpr, CUT: tl.constexpr,
    MIN_P: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows, chunks]: what is nearer than the bounds, as the rule measures it and by weight,
    fp64; and the number of logits between them, int32, and these logits: [rows, chunks, CHUNK]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * chunks + chunk
    used = applies(shares, row, vocab, COUNT)
    before, beyond = interval(bounds, row, False)
    reads = used
    if not NEAR:
        reads &= has_nearer(highs, temperature, row, chunk, beyond, chunks, CHUNKS)
    if reads:
        ids, weight, distance, logit = kept_weights(
            logits, highs, temperature, cut, equals, min_p, centre, centre, row, chunk, vocab,
            stride, chunks, CUT, MIN_P, False, CHUNK, CHUNKS,
        )  # fmt: skip
        if NEAR:
            distance = tl.abs(distance - tl.load(centre + row))
        kept = ids < vocab if COUNT else weight > 0.0
        between = kept & (distance > before) & (distance <= beyond)
        mass = tl.sum(tl.where(distance <= before, weight, 0.0).to(tl.float64), 0)
        tl.store(sums + at, mass)
        if COUNT:
            mass = tl.sum((distance <= before).to(tl.int32), 0).to(tl.float64)
        tl.store(nearer + at, mass)
        tl.store(counts + at, tl.sum(between.to(tl.int32), 0))
        place = tl.where(between, tl.cumsum(between.to(tl.int32), 0) - 1, -1)
        # With the mask from `place`, the compiler sums in the layout of the loads, in which a
        # thread has neighbours, and not in that of the store, with four times as many steps.
        tl.store(listed + at * CHUNK + place, logit, mask=place >= 0)
    elif used:
        tl.store(nearer + at, 0.0)
        tl.store(sums + at, 0.0)
        tl.store(counts + at, 0)


@triton.jit
def listed_keys(places, mask, top, temperature, centre, NEAR: tl.constexpr):
    """Load some of a list: keys in the order of the search, -1 where masked, and weights."""
    logit = tl.load(places, mask=mask, other=float("-inf"))
    distance = (top - logit) / temperature
    key = nearness(distance, centre) if NEAR else key_of(logit)
    return tl.where(mask, key, -1), tl.where(mask, tl.exp(-distance), 0.0)


@triton.jit
def threshold_of(
    places, place, count, most, missing, top, temperature, centre, COUNT: tl.constexpr,
    NEAR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the largest key such that the tokens in the list from it on reach what is missing.

    The first tile, usually all of the list, stays in registers.
    """
    inside = place < count
    keys, weights = listed_keys(places, inside, top, temperature, centre, NEAR)
    measures = inside.to(tl.float64) if COUNT else weights.to(tl.float64)
    low, high = tl.min(tl.where(inside, keys, 1 << 40), 0), tl.max(keys, 0)
    for first in range(TILE, most, TILE):
        mask = first + place < count
        key, _ = listed_keys(places + first, mask, top, temperature, centre, NEAR)
        low = tl.minimum(low, tl.min(tl.where(mask, key, 1 << 40), 0))
        high = tl.maximum(high, tl.max(key, 0))
    step = tl.full([], 1, tl.int64)
    while step * DIGITS <= high - low:
        step *= DIGITS
    digit = tl.arange(0, DIGITS)
    while step > 0:
        least = (low + digit * step)[:, None]
        reached = tl.sum(tl.where(keys[None, :] >= least, measures[None, :], 0.0), 1)
        for first in range(TILE, most, TILE):
            mask = first + place < count
            key, weight = listed_keys(places + first, mask, top, temperature, centre, NEAR)
            measure = mask.to(tl.float64) if COUNT else weight.to(tl.float64)
            reached += tl.sum(tl.where(key[None, :] >= least, measure[None, :], 0.0), 1)
        low += tl.max(tl.where(reached >= missing, digit, 0), 0) * step
        step //= DIGITS
    return low


@triton.jit
def settle_kernel(
    highs, temperature, centre, shares, targets, weights, nearer, counts, listed, cut, equals,
    limit, sums, vocab, chunks, COUNT: tl.constexpr, NEAR: tl.constexpr, CUT: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """grid [rows]: set the cut and the number of equal logits in each chunk, or (NEAR) the limit;
    and the weight kept of each chunk, [rows, chunks] fp64."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    if applies(shares, row, vocab, COUNT):
        top, heat = top_of(highs, row, chunks, CHUNKS), tl.load(temperature + row)
        middle = tl.load(centre + row) if NEAR else 0.0
        most = tl.max(over_chunks(counts, row, chunks, CHUNKS), 0)
        lane = tl.arange(0, CHUNKS * TILE)
        owner, place = lane // TILE, lane % TILE
        count = tl.load(counts + row * chunks + owner, mask=owner < chunks, other=0)
        places = listed + (row * chunks + owner) * CHUNK + place
        missing = tl.load(targets + row) - tl.sum(over_chunks(nearer, row, chunks, CHUNKS), 0)
        low = threshold_of(
            places, place, count, most, missing, top, heat, middle, COUNT, NEAR, TILE
        )
        if NEAR:
            tl.store(limit + row, low)
        else:
            above = tl.zeros([CHUNKS], tl.float64)
            equal = tl.zeros([CHUNKS], tl.int32)
            height = tl.zeros([], tl.float32)
            for first in range(0, most, TILE):
                mask = first + place < count
                key, weight = listed_keys(places + first, mask, top, heat, middle, NEAR)
                higher = tl.where(key > low, weight, 0.0).to(tl.float64)
                above += tl.sum(tl.reshape(higher, [CHUNKS, TILE]), 1)
                same = (key == low).to(tl.int32)
                equal += tl.sum(tl.reshape(same, [CHUNKS, TILE]), 1)
                height = tl.maximum(height, tl.max(tl.where(key == low, weight, 0.0), 0))
                if COUNT:
                    missing -= tl.sum((key > low).to(tl.int32), 0)
            if not COUNT:
                missing = (missing - tl.sum(above, 0)) / height.to(tl.float64)
            wanted = tl.maximum(tl.ceil(missing).to(tl.int64), 1)
            if CUT:
                earlier = tl.load(cut + 2 * row) == low
                allowed = tl.load(cut + 2 * row + 1)
                wanted = tl.where(earlier, tl.minimum(wanted, allowed), wanted)
            tl.store(cut + 2 * row, low)
            tl.store(cut + 2 * row + 1, wanted)
            tl.store(equals + row * chunks + at, equal, mask=at < chunks)
            room = tl.maximum(wanted - (tl.cumsum(equal, 0) - equal), 0)
            kept = tl.minimum(room, equal.to(tl.int64)).to(tl.float64)
            total = over_chunks(sums, row, chunks, CHUNKS) + above + kept * height
            tl.store(sums + row * chunks + at, total, mask=at < chunks)
    elif NEAR:
        tl.store(limit + row, tl.full([], -1, tl.int64))
    elif not CUT:  # nothing is cut off
        tl.store(cut + 2 * row, tl.full([], -1, tl.int64))
        whole = whole_chunks(highs, temperature, weights, row, chunks, CHUNKS)
        tl.store(sums + row * chunks + at, whole, mask=at < chunks)
        tl.store(equals + row * chunks + at, tl.zeros([CHUNKS], tl.int32), mask=at < chunks)


WARPS = 8
SETTLE_WARPS = 8
# For kernels that compare a token's distance from the centre: fusion in only some of them would
# round the distance differently there, and the token at the threshold would be dropped.
FUSION = False


@triton.jit
def highs_kernel(logits, temperature, highs, weights, vocab, stride, CHUNK: tl.constexpr):
    """grid [rows, chunks]: the largest logit of each chunk, and the total weight relative to it,
    fp64"""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    logit = logit.to(tl.float32)
    high = tl.max(logit, 0)
    weight = tl.exp((logit - high) / tl.load(temperature + row))
    weight = tl.where(logit > float("-inf"), weight, 0.0)
    at = row * tl.num_programs(1) + chunk
    tl.store(highs + at, high)
    tl.store(weights + at, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def sums_kernel(
    logits, highs, temperature, cut, equals, min_p, centre, limit, sums, moments, vocab, stride,
    chunks, MOMENTS: tl.constexpr, CUT: tl.constexpr, MIN_P: tl.constexpr, TYPICAL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows, chunks]: the total weight kept of each chunk, [rows, chunks] fp64, and the same
    weighted by the distance from the top"""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, weight, distance, _ = kept_weights(
        logits, highs, temperature, cut, equals, min_p, centre, limit, row, chunk, vocab, stride,
        chunks, CUT, MIN_P, TYPICAL, CHUNK, CHUNKS,
    )  # fmt: skip
    wide = weight.to(tl.float64)
    tl.store(sums + row * chunks + chunk, tl.sum(wide, 0))
    if MOMENTS:
        moment = wide * tl.where(weight > 0.0, distance, 0.0)
        tl.store(moments + row * chunks + chunk, tl.sum(moment, 0))


@triton.jit
def centre_kernel(sums, moments, centre, chunks, CHUNKS: tl.constexpr):
    """grid [rows]: the mean distance from the top.

    A token's information is its distance from the top plus the logarithm of the total, and the
    entropy is the mean distance plus the same. So distances can be compared instead.
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.sum(over_chunks(sums, row, chunks, CHUNKS), 0)
    mean = tl.sum(over_chunks(moments, row, chunks, CHUNKS), 0) / total
    tl.store(centre + row, mean.to(tl.float32))


@triton.jit
def pick_kernel(
    logits, highs, temperature, cut, equals, min_p, centre, limit, sums, uniforms, out, vocab,
    stride, chunks, WHOLE: tl.constexpr, CUT: tl.constexpr, MIN_P: tl.constexpr,
    TYPICAL: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows]: the chunk, then the token, at which the running sum exceeds the point"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    if WHOLE:
        masses = whole_chunks(highs, temperature, sums, row, chunks, CHUNKS)
    else:
        masses = over_chunks(sums, row, chunks, CHUNKS)
    point = tl.load(uniforms + row) * tl.sum(masses, 0)
    beyond = (tl.cumsum(masses, 0) > point) & (masses > 0.0)
    # If no sum exceeds the point because of rounding, the last token with any weight is drawn.
    last = tl.max(tl.where(masses > 0.0, at, 0), 0)
    chunk = tl.minimum(tl.min(tl.where(beyond, at, CHUNKS), 0), last)
    before = tl.sum(tl.where(at < chunk, masses, 0.0), 0)
    ids, weight, _, _ = kept_weights(
        logits, highs, temperature, cut, equals, min_p, centre, limit, row, chunk, vocab, stride,
        chunks, CUT, MIN_P, TYPICAL, CHUNK, CHUNKS,
    )  # fmt: skip
    running = tl.cumsum(weight.to(tl.float64), 0) + before
    token = tl.min(tl.where((running > point) & (weight > 0.0), ids, 0x7FFFFFFF), 0)
    token = tl.minimum(token, tl.max(tl.where(weight > 0.0, ids, 0), 0))
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def shares_kernel(
    logits, highs, temperature, cut, equals, min_p, centre, limit, sums, out, vocab, stride,
    chunks, CUT: tl.constexpr, MIN_P: tl.constexpr, TYPICAL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows, chunks]: out [rows, vocab] fp32"""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.sum(over_chunks(sums, row, chunks, CHUNKS), 0)
    ids, weight, _, _ = kept_weights(
        logits, highs, temperature, cut, equals, min_p, centre, limit, row, chunk, vocab, stride,
        chunks, CUT, MIN_P, TYPICAL, CHUNK, CHUNKS,
    )  # fmt: skip
    share = (weight.to(tl.float64) / total).to(tl.float32)
    tl.store(out + row * vocab + ids, share, mask=ids < vocab)


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """See `Ops`."""
    rows = _Rows.of(logits, draws.temperature, draws.truncation)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        sums = rows.truncate()
        launch(
            pick_kernel,
            (len(logits),),
            (*rows.arguments(), sums, draws.uniforms, out),
            rows.sizes,
            (sums is rows.weights, *rows.flags()),
            num_warps=WARPS,
            enable_fp_fusion=FUSION,
        )
    return out


def probabilities(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
    """See `Ops`."""
    rows = _Rows.of(logits, temperature, truncation)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        sums = rows.truncate()
        if sums is rows.weights:
            sums = rows.sums()
        launch(
            shares_kernel, rows.grid, (*rows.arguments(), sums, out), rows.sizes, rows.flags(),
            num_warps=WARPS, enable_fp_fusion=FUSION,
        )  # fmt: skip
    return out


@dataclass(slots=True)
class _Rows:
    """Rows of logits and intermediate results; names as in `kept_weights`."""

    logits: Tensor
    temperature: Tensor
    rules: Truncation
    chunk: int
    highs: Tensor
    weights: Tensor
    cut: Tensor
    equals: Tensor
    centre: Tensor
    limit: Tensor
    has_cut: bool = False
    has_limit: bool = False
    applies_min_p: bool = False

    @classmethod
    def of(cls, logits: Tensor, temperature: Tensor, rules: Truncation) -> _Rows:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        chunk, chunks = in_blocks(logits.shape[1], CHUNK)
        n, device = len(logits), logits.device
        highs = torch.empty(n, chunks, dtype=torch.float32, device=device)
        weights = torch.empty(n, chunks, dtype=torch.float64, device=device)
        if n:
            launch(
                highs_kernel, (n, chunks), (logits, temperature, highs, weights),
                (logits.shape[1], logits.stride(0)), (chunk,), num_warps=WARPS,
            )  # fmt: skip
        return cls(
            logits,
            temperature,
            rules,
            chunk,
            highs,
            weights,
            torch.empty(n, 2, dtype=torch.int64, device=device),
            torch.empty(n, chunks, dtype=torch.int32, device=device),
            torch.empty(n, dtype=torch.float32, device=device),
            torch.empty(n, dtype=torch.int64, device=device),
        )

    @property
    def grid(self) -> tuple[int, int]:
        n, chunks = self.highs.shape
        return n, chunks

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.logits.shape[1], self.logits.stride(0), self.highs.shape[1]

    def arguments(self) -> tuple[Tensor, ...]:
        min_p = self.temperature if self.rules.min_p is None else self.rules.min_p
        row_facts = (self.highs, self.temperature, self.cut, self.equals)
        return self.logits, *row_facts, min_p, self.centre, self.limit

    def flags(self) -> tuple[bool, bool, bool, int, int]:
        rules = self.has_cut, self.applies_min_p, self.has_limit
        return *rules, self.chunk, power_of_two(self.highs.shape[1])

    def truncate(self) -> Tensor:
        """Apply the rules, one after the other, and return how much of each chunk is kept, by
        weight: [rows, chunks] fp64. If there is no rule, that is `weights`."""
        rules, sums = self.rules, self.weights
        if rules.top_k is not None:
            sums = self._search(rules.top_k.double(), sums, count=True)
            self.has_cut = True
        if rules.top_p is not None:
            sums = self._search(rules.top_p, sums)
            self.has_cut = True
        if rules.min_p is not None:
            self.applies_min_p = True
            sums = self.sums()
        if rules.typical_p is not None:
            moments = self._empty(torch.float64)
            sums = self.sums(moments)
            tensors, numbers = (sums, moments, self.centre), (self.highs.shape[1],)
            launch(centre_kernel, (len(sums),), tensors, numbers, self.flags()[-1:])
            self._search(rules.typical_p, sums, near=True)
            self.has_limit = True
            sums = self.sums()
        return sums

    def sums(self, moments: Tensor | None = None) -> Tensor:
        """Return how much of each chunk is kept, by weight: [rows, chunks] fp64."""
        sums = self._empty(torch.float64)
        launch(
            sums_kernel, self.grid, (*self.arguments(), sums, sums if moments is None else moments),
            self.sizes, (moments is not None, *self.flags()),
            num_warps=WARPS, enable_fp_fusion=FUSION,
        )  # fmt: skip
        return sums

    def _empty(self, dtype: torch.dtype, *inner: int) -> Tensor:
        """Allocate [rows, chunks, inner...]."""
        return torch.empty(*self.highs.shape, *inner, dtype=dtype, device=self.logits.device)

    def _search(
        self, shares: Tensor, sums: Tensor, *, count: bool = False, near: bool = False
    ) -> Tensor:
        """Keep the fewest tokens that reach a share: the largest logits, or (near) the nearest to
        the centre of the tokens kept so far.

        Args:
            shares: [rows] fp64, of the mass; or (count) numbers of tokens.
            sums: how much of each chunk was kept, written where rows use the rule.

        Returns:
            How much of each chunk is kept; unless `near`.
        """
        n, _ = self.grid
        *row_facts, _ = self.arguments()
        has_cut, applies_min_p, _, chunk, chunks = self.flags()
        rule = count, near, has_cut, applies_min_p, chunk, chunks
        vocab, _, used_chunks = self.sizes
        parts, listed = self._empty(torch.float64, EDGES.value), self._empty(torch.float32, chunk)
        targets, bounds = torch.empty_like(shares), self.highs.new_empty(n, 2)
        nearer, counts = self._empty(torch.float64), torch.empty_like(self.equals)
        if sums is self.weights or near:
            sums = self._empty(torch.float64)
        for first in (True, False):
            launch(
                coarse_kernel, self.grid, (*row_facts, shares, bounds, parts), self.sizes,
                (first, *rule), num_warps=WARPS,
            )  # fmt: skip
            launch(
                bounds_kernel, (n,), (self.temperature, shares, parts, bounds, targets),
                (vocab, used_chunks), (first, count, chunks),
            )  # fmt: skip
        launch(
            list_kernel, self.grid, (*row_facts, shares, bounds, nearer, sums, counts, listed),
            self.sizes, rule, num_warps=WARPS, enable_fp_fusion=FUSION,
        )  # fmt: skip
        launch(
            settle_kernel, (n,),
            (
                self.highs, self.temperature, self.centre, shares, targets, self.weights, nearer,
                counts, listed, self.cut, self.equals, self.limit, sums,
            ),
            (vocab, used_chunks), (count, near, has_cut, chunk, chunks, min(TILE, chunk)),
            num_warps=SETTLE_WARPS, enable_fp_fusion=FUSION,
        )  # fmt: skip
        return sums


# Penalties for tokens seen before.
#
# Floor: memory. The tables' 5 bytes per token are read; logits only where a block of a row has
# tokens that were seen.

PENALIZED = 1024  # tokens of a program


@triton.jit
def penalize_kernel(
    logits, rows, seen, repetitions, frequencies, presences, in_prompt, counts,
    vocab, stride, seen_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [n, blocks]; logits [.., vocab] fp32, in_prompt [.., vocab] uint8, counts [.., vocab]"""
    n = tl.program_id(0).to(tl.int64)
    row, table = tl.load(rows + n).to(tl.int64), tl.load(seen + n).to(tl.int64)
    repetition, frequency = tl.load(repetitions + n), tl.load(frequencies + n)
    presence = tl.load(presences + n)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    count = tl.load(counts + table * seen_stride + ids, mask=inside, other=0)
    prompt = tl.load(in_prompt + table * seen_stride + ids, mask=inside, other=0)
    known = (count > 0) | (prompt != 0)
    x = tl.load(logits + row * stride + ids, mask=known, other=0.0)
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    y = tl.where(count > 0, y - frequency * count.to(tl.float32) - presence, y)
    tl.store(logits + row * stride + ids, y, mask=known)


def penalize(logits: Tensor, penalties: Penalties) -> None:
    """See `Ops`."""
    vocab = logits.shape[1]
    block, blocks = in_blocks(vocab, PENALIZED)
    factors = (penalties.repetition, penalties.frequency, penalties.presence)
    seen = (penalties.in_prompt.view(torch.uint8), penalties.counts)
    launch(
        penalize_kernel,
        (len(penalties.rows), blocks),
        (logits, penalties.rows, penalties.seen, *factors, *seen),
        (vocab, logits.stride(0), penalties.counts.stride(0)),
        (block,),
        enable_fp_fusion=False,  # each operation is rounded separately, as on a CPU
    )


# Masks of the allowed tokens.
#
# Floor: memory. One bit per token is read, and a logit is written if the bit is not set.


@triton.jit
def mask_kernel(logits, rows, words, vocab, stride, words_stride, BLOCK: tl.constexpr):
    """grid [n, blocks]; logits [.., vocab] fp32, words [n, ..] int32"""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    word = tl.load(words + n * words_stride + ids // 32, mask=inside, other=-1)
    allowed = (word >> (ids % 32)) & 1
    tl.store(logits + row * stride + ids, float("-inf"), mask=inside & (allowed == 0))


def mask(logits: Tensor, masks: Masks) -> None:
    """See `Ops`."""
    vocab, words = logits.shape[1], masks.words
    block, blocks = in_blocks(vocab, PENALIZED)
    tensors, numbers = (logits, masks.rows, words), (vocab, logits.stride(0), words.stride(0))
    launch(mask_kernel, (len(masks.rows), blocks), tensors, numbers, (block,))
