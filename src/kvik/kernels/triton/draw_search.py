"""Which tokens a row keeps, without sorting: a threshold is searched for, digit by digit.

The logits of a row are cut into chunks, one for a program: a single SM would take microseconds to
read a row of 128k logits. In a pass each program weighs, for each of the sixteen values of the next
digit, what of its chunk lies at or above; the programs of the next pass add that up over the
chunks, each for itself and all in the same order, and go on below the largest digit that still
reaches the target. Eight passes find 32 bits exactly. Sums are in double precision and made of the
row alone.

Floor of a pass: each logit once, 4 bytes and after the first pass from L2, with 16 comparisons and
sums. Of few rows the launches are the time: 8 and a few for each rule.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvik.kernels.triton.launch import Resources

CHUNK = 2048  # logits of a program
PASSES = 8
DIGITS = tl.constexpr(16)
FIRST_STEP = 16 ** (PASSES - 1)
UNBOUNDED = tl.constexpr(1 << 40)  # more than there are tokens


@triton.jit
def key_of(logit):
    """fp32 -> int64 in 0..2^32 - 1 in the order of the numbers, the same for equals."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True).to(tl.int64)  # -0 is 0
    return tl.where(bits < 0, -1 - bits, bits + 0x80000000)


@triton.jit
def nearness(distance, centre):
    """Of a token's information to the entropy, as a key: the nearest has the largest."""
    return 0x7FFFFFFF - tl.abs(distance - centre).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def over_chunks(parts, row, chunks, CHUNKS: tl.constexpr):
    """The row's of [rows, chunks], zeros behind: [CHUNKS]."""
    at = tl.arange(0, CHUNKS)
    return tl.load(parts + row * chunks + at, mask=at < chunks, other=0)


@triton.jit
def kept_weights(
    logits, highs, temperature, cut, equals, min_p, centre, limit, row, chunk, vocab, stride,
    chunks, CUT: tl.constexpr, MIN_P: tl.constexpr, TYPICAL: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """A chunk as the rules found so far leave it.

    Args:
        highs: [rows, chunks] fp32, largest logits.
        cut: [rows, 2] int64, the key of the lowest logit that is kept, and how many that equal it.
        equals: [rows, chunks] int32, how many there are in each chunk.
        centre, limit: [rows] fp32 and int64, the least nearness to a centre.

    Returns:
        ids, weights with dropped ones at 0 (fp32), distances from the top in temperatures, keys.
    """
    at = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(highs + row * chunks + at, mask=at < chunks, other=float("-inf")), 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    logit = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    key = tl.where(inside, key_of(logit), -1)
    distance = (top - logit) / tl.load(temperature + row)
    weight = tl.exp(-distance)
    if CUT:
        lowest, room = tl.load(cut + 2 * row), tl.load(cut + 2 * row + 1)
        counts = over_chunks(equals, row, chunks, CHUNKS)
        before = tl.sum(tl.where(at < chunk, counts, 0), 0)
        equal = (key == lowest).to(tl.int32)
        first = (tl.cumsum(equal, 0) + before) <= room
        weight = tl.where((key > lowest) | ((equal > 0) & first), weight, 0.0)
    if MIN_P:
        weight = tl.where(weight >= tl.load(min_p + row), weight, 0.0)
    if TYPICAL:
        near = nearness(distance, tl.load(centre + row)) >= tl.load(limit + row)
        weight = tl.where(near, weight, 0.0)
    return ids, weight, distance, key


@triton.jit
def found(lows, parts, targets, row, chunks, step, CHUNKS: tl.constexpr):
    """The threshold as far as the last pass knows it: from its `lows` [rows] int64, its `parts`
    [rows, chunks, digits] fp64 and its step."""
    at, digit = tl.arange(0, CHUNKS), tl.arange(0, DIGITS)
    where = (row * chunks + at)[:, None] * DIGITS + digit[None, :]
    reached = tl.sum(tl.load(parts + where, mask=(at < chunks)[:, None], other=0.0), 0)
    chosen = tl.max(tl.where(reached >= tl.load(targets + row), digit, 0), 0)
    return tl.load(lows + row) + chosen.to(tl.int64) * step


@triton.jit(do_not_specialize=["step"])  # or the last pass would compile anew
def search_kernel(
    logits, highs, temperature, cut, equals, min_p, centre, targets, lows, parts, next_lows,
    next_parts, vocab, stride, chunks, step,
    FIRST: tl.constexpr, MASS: tl.constexpr, CUT: tl.constexpr, MIN_P: tl.constexpr,
    NEAR: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows, chunks]: one pass, over keys of logits or (NEAR) nearness to the centre.

    Measured are weights (MASS) or tokens. `lows` and `parts` are of the pass before, `next_...`
    of this one; `step` is this one's.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low = tl.zeros([], tl.int64)
    if not FIRST:
        low = found(lows, parts, targets, row, chunks, step * DIGITS, CHUNKS)
    if chunk == 0:
        tl.store(next_lows + row, low)
    _, weight, distance, key = kept_weights(
        logits, highs, temperature, cut, equals, min_p, centre, centre, row, chunk, vocab, stride,
        chunks, CUT, MIN_P, False, CHUNK, CHUNKS,
    )  # fmt: skip
    if NEAR:
        key = tl.where(key < 0, -1, nearness(distance, tl.load(centre + row)))
    digit = tl.arange(0, DIGITS)
    above = key[None, :] >= (low + digit.to(tl.int64) * step)[:, None]
    if MASS:
        measure = tl.sum(tl.where(above, weight.to(tl.float64)[None, :], 0.0), 1)
    else:
        measure = tl.sum(above.to(tl.int32), 1).to(tl.float64)
    tl.store(next_parts + (row * chunks + chunk) * DIGITS + digit, measure)


@triton.jit
def tally_kernel(
    logits, highs, temperature, cut, targets, lows, parts, above, equals, heights, vocab, stride,
    chunks, MASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows, chunks]: what lies above the threshold that was found (or that of a rule before,
    if it is higher), fp64, how many are equal to it, int32, and what one of them weighs, fp32"""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lowest = found(lows, parts, targets, row, chunks, 1, CHUNKS)
    lowest = tl.maximum(lowest, tl.load(cut + 2 * row))
    _, weight, _, key = kept_weights(
        logits, highs, temperature, cut, equals, cut, cut, cut, row, chunk, vocab, stride, chunks,
        False, False, False, CHUNK, CHUNKS,
    )  # fmt: skip
    measure = weight.to(tl.float64) if MASS else tl.full([CHUNK], 1.0, tl.float64)
    at = row * chunks + chunk
    tl.store(above + at, tl.sum(tl.where(key > lowest, measure, 0.0), 0))
    tl.store(equals + at, tl.sum((key == lowest).to(tl.int32), 0))
    tl.store(heights + at, tl.max(tl.where(key == lowest, weight, 0.0), 0))


@triton.jit
def settle_kernel(
    cut, targets, lows, parts, above, heights, chunks, MASS: tl.constexpr, CHUNKS: tl.constexpr
):
    """grid [rows]: the cut is as low as the target demands, unless it was higher already."""
    row = tl.program_id(0).to(tl.int64)
    lowest = found(lows, parts, targets, row, chunks, 1, CHUNKS)
    before, room = tl.load(cut + 2 * row), tl.load(cut + 2 * row + 1)
    height = tl.full([], 1.0, tl.float64)
    if MASS:
        height = tl.max(over_chunks(heights, row, chunks, CHUNKS), 0).to(tl.float64)
    missing = tl.load(targets + row) - tl.sum(over_chunks(above, row, chunks, CHUNKS), 0)
    # What is not reached, by rounding or because the target is infinite, takes all there are.
    enough = missing <= height * UNBOUNDED
    height = tl.where(enough & (height > 0.0), height, 1.0)
    wanted = tl.maximum(tl.ceil(tl.where(enough, missing, 0.0) / height), 1.0)
    wanted = tl.where(enough, wanted.to(tl.int64), UNBOUNDED)
    tl.store(cut + 2 * row, tl.maximum(lowest, before))
    room = tl.where(lowest == before, tl.minimum(wanted, room), room)
    tl.store(cut + 2 * row + 1, tl.where(lowest > before, wanted, room))


@triton.jit
def limit_kernel(limit, targets, lows, parts, chunks, CHUNKS: tl.constexpr):
    """grid [rows]: the threshold itself"""
    row = tl.program_id(0).to(tl.int64)
    tl.store(limit + row, found(lows, parts, targets, row, chunks, 1, CHUNKS))


_SEARCH = {
    **dict.fromkeys(("logits", "highs", "temperature", "min_p", "centre"), "*fp32"),
    **dict.fromkeys(("cut", "lows", "next_lows"), "*i64"),
    **dict.fromkeys(("targets", "parts", "next_parts"), "*fp64"),
    **{"equals": "*i32", "vocab": "i32", "stride": "i32", "chunks": "i32", "step": "i32"},
}


def _search(what: str, *, mass: bool) -> Resources:
    constants: dict[str, object] = {"FIRST": False, "MASS": mass, "CUT": mass, "MIN_P": False}
    constants |= {"NEAR": False, "CHUNK": CHUNK, "CHUNKS": 64}
    aligned = frozenset({"vocab", "stride"})
    return Resources(search_kernel, what, _SEARCH, constants, num_warps=8, aligned=aligned)


RESOURCES = (
    _search("top_k of 128k", mass=False),
    _search("top_p after top_k, of 128k", mass=True),
)
