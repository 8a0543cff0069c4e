"""One token per row by inverse CDF, and what each token's share of the draws is, without sorting.

Without rules: the largest logit of each chunk; the weights of each chunk; then one program of a row
finds the chunk, and in it the token, at which the running sum exceeds u times the total. Three
launches, and twice the row's logits: the second time, if they fit, from L2. A rule adds a search
(`draw_search.py`). Weights are never written to memory.

A row's token depends on that row alone. Tokens of equal logits are dropped from the highest id on;
weights are compared by the logits they are made of, whose order rounding does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.ops import Draws, Truncation
from kvik.kernels.triton.draw_search import (
    CHUNK,
    FIRST_STEP,
    PASSES,
    kept_weights,
    limit_kernel,
    over_chunks,
    search_kernel,
    settle_kernel,
    tally_kernel,
)
from kvik.kernels.triton.launch import Resources, ceil_div, power_of_two

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
    """grid [rows, chunks]: what is kept of each chunk weighs, [rows, chunks] fp64, and the same
    times the distance from the top"""
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
    """grid [rows]: the mass that a rule keeps, infinite where the rule is off; and the entropy.

    A token's information is its distance from the top plus the logarithm of the total, and so is
    the entropy with the mean distance, by which they differ.
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
    # Where rounding leaves nothing beyond the point, it is the last that has any weight.
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
    """Rows of logits with what is known of them so far; names as in `kept_weights`."""

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
        """Find what the rules keep, one after the other."""
        rules = self.rules
        if rules.top_k is not None:
            self._cut(rules.top_k.double(), mass=False)
        if rules.top_p is not None:
            self._cut(self._aim(rules.top_p, near=False), mass=True)
        self.applies_min_p = rules.min_p is not None
        if rules.typical_p is not None:
            targets = self._aim(rules.typical_p, near=True)
            lows, parts = self._search(targets, mass=True, near=True)
            # one digit is left to be read from what the last pass has weighed
            limit_kernel[(len(self.logits),)](
                self.limit, targets, lows, parts, self.highs.shape[1], self.flags()[-1]
            )
            self.has_limit = True

    def sums(self, moments: Tensor | None = None) -> Tensor:
        """What is kept of each chunk weighs: [rows, chunks] fp64."""
        sums = self._empty(torch.float64)
        sums_kernel[self.grid](
            *self.arguments(), sums, sums if moments is None else moments, *self.sizes,
            moments is not None, *self.flags(), num_warps=WARPS,
        )  # fmt: skip
        return sums

    def _empty(self, dtype: torch.dtype, *inner: int) -> Tensor:
        """[rows, chunks, inner...]"""
        return torch.empty(*self.highs.shape, *inner, dtype=dtype, device=self.logits.device)

    def _aim(self, shares: Tensor, *, near: bool) -> Tensor:
        """[rows] fp64, the mass that a share of what is kept so far has."""
        moments = self._empty(torch.float64) if near else None
        sums = self.sums(moments)
        targets = torch.empty_like(shares)
        aim_kernel[(len(shares),)](
            shares, sums, sums if moments is None else moments, targets, self.centre,
            self.highs.shape[1], near, self.flags()[-1],
        )  # fmt: skip
        return targets

    def _search(self, targets: Tensor, *, mass: bool, near: bool = False) -> tuple[Tensor, Tensor]:
        """`lows` and `parts` of the last pass. What is near is searched among what is kept."""
        # Rows of an even number lie alike in memory, or the second one would be compiled apart.
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
        """Keep the largest logits, as many as reach the target."""
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


_POINTERS = {
    **dict.fromkeys(("logits", "highs", "temperature", "min_p", "centre", "out"), "*fp32"),
    **dict.fromkeys(("sums", "moments", "uniforms"), "*fp64"),
    **{"cut": "*i64", "limit": "*i64", "equals": "*i32"},
    **{"vocab": "i32", "stride": "i32", "chunks": "i32"},
}
_ALL_RULES = {"CUT": True, "MIN_P": True, "TYPICAL": True, "CHUNK": CHUNK, "CHUNKS": 64}
_ALIGNED = frozenset({"vocab", "stride"})

RESOURCES = (
    Resources(
        sums_kernel,
        "every rule, 128k",
        _POINTERS,
        {"MOMENTS": True, **_ALL_RULES},
        num_warps=WARPS,
        aligned=_ALIGNED,
        max_registers=128,
    ),
    Resources(
        pick_kernel,
        "every rule, 128k",
        _POINTERS | {"out": "*i64"},
        _ALL_RULES,
        num_warps=WARPS,
        aligned=_ALIGNED,
        max_registers=128,
    ),
    Resources(
        shares_kernel,
        "every rule, 128k",
        _POINTERS,
        _ALL_RULES,
        num_warps=WARPS,
        aligned=_ALIGNED,
        max_registers=128,
    ),
)
