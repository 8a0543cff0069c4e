"""Draw one token per row by inverse CDF, or return each token's probability, without sorting.

Without rules, one kernel finds the largest logit of each chunk and one sums the weights of each
chunk; then one program per row finds the chunk, and in it the token, at which the running sum
exceeds u times the total. That takes three launches and reads the row's logits several times, after
the first time from L2 if they fit. A rule adds a search (see below). Weights are never written to
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
from kvik.kernels.triton.launch import ceil_div, power_of_two

# Finding the tokens that a row keeps without sorting: the threshold is searched digit by digit.
#
# The logits of a row are divided into chunks, one per program: a single SM would take microseconds
# to read a row of 128k logits. In a pass each program sums, for each of the sixteen values of the
# next digit, the weights of its chunk at or above that value; each program of the next pass adds
# these sums over the chunks, in the same order, and continues with the largest digit that still
# reaches the target. Eight passes find 32 bits exactly. Sums are in double precision and depend
# only on the row.
#
# Floor of a pass: each logit once, 4 bytes and after the first pass from L2, with 16 comparisons
# and sums. With few rows the time is that of the launches: 8 and a few for each rule.

# The truncations that the kernels here apply.
RULES = ("top_k", "top_p", "min_p", "typical_p")

CHUNK = 2048  # logits of a program
PASSES = 8
DIGITS = tl.constexpr(16)
FIRST_STEP = 16 ** (PASSES - 1)
UNBOUNDED = tl.constexpr(1 << 40)  # more than there are tokens


@triton.jit
def key_of(logit):
    """Map fp32 to int64 in 0..2^32 - 1, preserving order; equal numbers have the same key."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True).to(tl.int64)  # -0 is 0
    return tl.where(bits < 0, -1 - bits, bits + 0x80000000)


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
        lowest, allowed = tl.load(cut + 2 * row), tl.load(cut + 2 * row + 1)
        counts = over_chunks(equals, row, chunks, CHUNKS)
        before = tl.sum(tl.where(at < chunk, counts, 0), 0)
        equal = (key == lowest).to(tl.int32)
        first = (tl.cumsum(equal, 0) + before) <= allowed
        weight = tl.where((key > lowest) | ((equal > 0) & first), weight, 0.0)
    if MIN_P:
        weight = tl.where(weight >= tl.load(min_p + row), weight, 0.0)
    if TYPICAL:
        near = nearness(distance, tl.load(centre + row)) >= tl.load(limit + row)
        weight = tl.where(near, weight, 0.0)
    return ids, weight, distance, key


@triton.jit
def found(lows, parts, targets, row, chunks, step, CHUNKS: tl.constexpr):
    """Return the threshold as found by the last pass, from its `lows` [rows] int64, `parts` [rows,
    chunks, digits] fp64 and step."""
    at, digit = tl.arange(0, CHUNKS), tl.arange(0, DIGITS)
    where = (row * chunks + at)[:, None] * DIGITS + digit[None, :]
    reached = tl.sum(tl.load(parts + where, mask=(at < chunks)[:, None], other=0.0), 0)
    chosen = tl.max(tl.where(reached >= tl.load(targets + row), digit, 0), 0)
    return tl.load(lows + row) + chosen.to(tl.int64) * step


@triton.jit(do_not_specialize=["step"])  # else the last pass would be compiled separately
def search_kernel(
    logits, highs, temperature, cut, equals, min_p, centre, targets, lows, parts, next_lows,
    next_parts, vocab, stride, chunks, step,
    FIRST: tl.constexpr, MASS: tl.constexpr, CUT: tl.constexpr, MIN_P: tl.constexpr,
    NEAR: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows, chunks]: one pass, over keys of logits or (NEAR) nearness to the centre.

    It sums weights (MASS) or counts tokens. `lows` and `parts` are results of the pass before,
    `next_...` of this one; `step` is of this one.
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
    """grid [rows, chunks]: the sum above the threshold found (or an earlier rule's, if higher),
    fp64, the number of tokens equal to it, int32, and the weight of one, fp32"""
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
    """grid [rows]: set the cut as low as the target requires, unless it was higher already."""
    row = tl.program_id(0).to(tl.int64)
    lowest = found(lows, parts, targets, row, chunks, 1, CHUNKS)
    before, allowed = tl.load(cut + 2 * row), tl.load(cut + 2 * row + 1)
    height = tl.full([], 1.0, tl.float64)
    if MASS:
        height = tl.max(over_chunks(heights, row, chunks, CHUNKS), 0).to(tl.float64)
    missing = tl.load(targets + row) - tl.sum(over_chunks(above, row, chunks, CHUNKS), 0)
    # If the target is not reached, by rounding or because it is infinite, all tokens are kept.
    enough = missing <= height * UNBOUNDED
    height = tl.where(enough & (height > 0.0), height, 1.0)
    wanted = tl.maximum(tl.ceil(tl.where(enough, missing, 0.0) / height), 1.0)
    wanted = tl.where(enough, wanted.to(tl.int64), UNBOUNDED)
    tl.store(cut + 2 * row, tl.maximum(lowest, before))
    allowed = tl.where(lowest == before, tl.minimum(wanted, allowed), allowed)
    tl.store(cut + 2 * row + 1, tl.where(lowest > before, wanted, allowed))


@triton.jit
def limit_kernel(limit, targets, lows, parts, chunks, CHUNKS: tl.constexpr):
    """grid [rows]: store the threshold itself"""
    row = tl.program_id(0).to(tl.int64)
    tl.store(limit + row, found(lows, parts, targets, row, chunks, 1, CHUNKS))


WARPS = 8


@triton.jit
def highs_kernel(logits, highs, vocab, stride, CHUNK: tl.constexpr):
    """grid [rows, chunks]: the largest logit of each chunk"""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    tl.store(highs + row * tl.num_programs(1) + chunk, tl.max(logit.to(tl.float32), 0))


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
def aim_kernel(
    shares, sums, moments, targets, centre, chunks, MOMENTS: tl.constexpr, CHUNKS: tl.constexpr
):
    """grid [rows]: the mass that a rule keeps, infinite if the rule is off; and the mean distance.

    A token's information is its distance from the top plus the logarithm of the total, and the
    entropy is the mean distance plus the same. So distances can be compared instead.
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.sum(over_chunks(sums, row, chunks, CHUNKS), 0)
    share = tl.load(shares + row)
    tl.store(targets + row, tl.where(share < 1.0, share * total, float("inf")))
    if MOMENTS:
        mean = tl.sum(over_chunks(moments, row, chunks, CHUNKS), 0) / total
        tl.store(centre + row, mean.to(tl.float32))


@triton.jit
def pick_kernel(
    logits, highs, temperature, cut, equals, min_p, centre, limit, sums, uniforms, out, vocab,
    stride, chunks, CUT: tl.constexpr, MIN_P: tl.constexpr, TYPICAL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """grid [rows]: the chunk, then the token, at which the running sum exceeds the point"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
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
        rows.truncate()
        sums = rows.sums()
        pick_kernel[(len(logits),)](
            *rows.arguments(),
            sums,
            draws.uniforms,
            out,
            *rows.sizes,
            *rows.flags(),
            num_warps=WARPS,
        )
    return out


def probabilities(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
    """See `Ops`."""
    rows = _Rows.of(logits, temperature, truncation)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        rows.truncate()
        sums = rows.sums()
        shares_kernel[rows.grid](
            *rows.arguments(), sums, out, *rows.sizes, *rows.flags(), num_warps=WARPS
        )
    return out


@dataclass(slots=True)
class _Rows:
    """Rows of logits and intermediate results; names as in `kept_weights`."""

    logits: Tensor
    temperature: Tensor
    rules: Truncation
    chunk: int
    highs: Tensor
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
        chunk = min(CHUNK, power_of_two(logits.shape[1]))
        n, chunks = len(logits), ceil_div(logits.shape[1], chunk)
        device = logits.device
        highs = torch.empty(n, chunks, dtype=torch.float32, device=device)
        if n:
            highs_kernel[n, chunks](
                logits, highs, logits.shape[1], logits.stride(0), chunk, num_warps=WARPS
            )
        return cls(
            logits,
            temperature,
            rules,
            chunk,
            highs,
            torch.full((n, 2), -1, dtype=torch.int64, device=device),  # nothing is cut off
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
        known = (self.highs, self.temperature, self.cut, self.equals)
        return self.logits, *known, min_p, self.centre, self.limit

    def flags(self) -> tuple[bool, bool, bool, int, int]:
        rules = self.has_cut, self.applies_min_p, self.has_limit
        return *rules, self.chunk, power_of_two(self.highs.shape[1])

    def truncate(self) -> None:
        """Apply the rules, one after the other."""
        rules = self.rules
        if rules.top_k is not None:
            self._cut(rules.top_k.double(), mass=False)
        if rules.top_p is not None:
            self._cut(self._aim(rules.top_p, near=False), mass=True)
        self.applies_min_p = rules.min_p is not None
        if rules.typical_p is not None:
            targets = self._aim(rules.typical_p, near=True)
            lows, parts = self._search(targets, mass=True, near=True)
            # The last digit is read from the sums of the last pass.
            limit_kernel[(len(self.logits),)](
                self.limit, targets, lows, parts, self.highs.shape[1], self.flags()[-1]
            )
            self.has_limit = True

    def sums(self, moments: Tensor | None = None) -> Tensor:
        """Return how much of each chunk is kept, by weight: [rows, chunks] fp64."""
        sums = self._empty(torch.float64)
        sums_kernel[self.grid](
            *self.arguments(), sums, sums if moments is None else moments, *self.sizes,
            moments is not None, *self.flags(), num_warps=WARPS,
        )  # fmt: skip
        return sums

    def _empty(self, dtype: torch.dtype, *inner: int) -> Tensor:
        """Allocate [rows, chunks, inner...]."""
        return torch.empty(*self.highs.shape, *inner, dtype=dtype, device=self.logits.device)

    def _aim(self, shares: Tensor, *, near: bool) -> Tensor:
        """Return the mass of a share of the tokens kept so far: [rows] fp64."""
        moments = self._empty(torch.float64) if near else None
        sums = self.sums(moments)
        targets = torch.empty_like(shares)
        aim_kernel[(len(shares),)](
            shares, sums, sums if moments is None else moments, targets, self.centre,
            self.highs.shape[1], near, self.flags()[-1],
        )  # fmt: skip
        return targets

    def _search(self, targets: Tensor, *, mass: bool, near: bool = False) -> tuple[Tensor, Tensor]:
        """Return `lows` and `parts` of the last pass; `near` searches among the kept tokens."""
        # An even number keeps both rows aligned; otherwise the second would be compiled separately.
        even = len(targets) + len(targets) % 2
        lows = torch.empty(2, even, dtype=torch.int64, device=targets.device)
        parts = [self._empty(torch.float64, 16) for _ in range(2)]
        *known, _ = self.arguments()
        has_cut, applies_min_p, _, chunk, chunks = self.flags()
        for number in range(PASSES):
            old, new = (number + 1) % 2, number % 2
            search_kernel[self.grid](
                *known, targets, lows[old], parts[old], lows[new], parts[new], *self.sizes,
                FIRST_STEP >> 4 * number, number == 0, mass, near and has_cut,
                near and applies_min_p, near, chunk, chunks, num_warps=WARPS,
            )  # fmt: skip
        return lows[new], parts[new]

    def _cut(self, targets: Tensor, *, mass: bool) -> None:
        """Keep the fewest largest logits that reach the target."""
        lows, parts = self._search(targets, mass=mass)
        above, heights = self._empty(torch.float64), self._empty(torch.float32)
        chunks = self.flags()[-1]
        tally_kernel[self.grid](
            self.logits, self.highs, self.temperature, self.cut, targets, lows, parts, above,
            self.equals, heights, *self.sizes, mass, self.chunk, chunks, num_warps=WARPS,
        )  # fmt: skip
        settle_kernel[(len(targets),)](
            self.cut, targets, lows, parts, above, heights, self.highs.shape[1], mass, chunks
        )
        self.has_cut = True


# Penalties for tokens seen before.
#
# Floor: memory. The tables' 5 bytes per token are read; logits only where a block of a row has
# tokens that were seen.

PENALIZED = 1024  # tokens of a program


@triton.jit
def penalize_kernel(
    logits,
    rows,
    seen,
    repetitions,
    frequencies,
    presences,
    in_prompt,
    counts,
    vocab,
    stride,
    seen_stride,
    BLOCK: tl.constexpr,
):
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
    block = min(PENALIZED, power_of_two(vocab))
    penalize_kernel[len(penalties.rows), ceil_div(vocab, block)](
        logits,
        penalties.rows,
        penalties.seen,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        penalties.in_prompt.view(torch.uint8),
        penalties.counts,
        vocab,
        logits.stride(0),
        penalties.counts.stride(0),
        block,
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
    block = min(PENALIZED, power_of_two(vocab))
    mask_kernel[len(masks.rows), ceil_div(vocab, block)](
        logits, masks.rows, words, vocab, logits.stride(0), words.stride(0), block
    )
