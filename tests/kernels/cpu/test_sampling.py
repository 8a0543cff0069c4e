"""draw and probabilities compared with the definition in exact arithmetic, with each other, and
with themselves in other batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from helpers.native import Poisoned, Runtime, call, normal, runtimes
from helpers.sampling_oracle import distribution
from torch import Tensor

from kvik.core.sampling_params import SamplingParams
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik.kernels.ops import Draws, Truncation
from kvik.kernels.reference.draw import draw as reference
from kvik.kernels.reference.draw import probabilities as reference_shares

each_runtime = pytest.mark.parametrize("runtime", runtimes())

# Weights are fp32 exponentials of fp32 quotients, by which a running sum may move this share of the
# total.
MARGIN = 1e-6

TINY = 1e-30  # smaller weights may be 0
U_NEAR_1 = 1.0 - 2**-53
RULES: list[dict[str, float]] = [
    {},
    {"temperature": 0.1},
    {"temperature": 40.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300, "temperature": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 2.0},
    {"top_p": 1 - 1e-12},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "min_p": 1.0},
    {"top_k": 500, "top_p": 0.95, "min_p": 0.02, "temperature": 0.6},
]


def draws_of(rules: Sequence[dict[str, float]], uniforms: Sequence[float], vocab: int) -> Draws:
    """Return a row per rule; columns of unused rules are absent, as the table plans it."""

    def column(name: str, dtype: torch.dtype, off: float) -> Tensor | None:
        values = [rule.get(name, off) for rule in rules]
        return None if all(v == off for v in values) else torch.tensor(values, dtype=dtype)

    top_k = column("top_k", torch.int64, vocab)
    return Draws(
        torch.tensor([rule.get("temperature", 1.0) for rule in rules]),
        torch.tensor(uniforms, dtype=torch.float64),
        Truncation(
            None if top_k is None else top_k.clamp(max=vocab),
            column("top_p", torch.float64, 1.0),
            column("min_p", torch.float32, 0.0),
        ),
    )


def draw(runtime: Runtime, logits: Tensor, draws: Draws, gap: int = 0) -> list[int]:
    rows, vocab = logits.shape
    source = Poisoned(rows, vocab, gap=gap)
    source.view.copy_(logits)
    ids, rules = Poisoned(rows, dtype=torch.int64), draws.truncation
    call(
        runtime, "draw", logits=source.view, logits_stride=source.stride, rows=rows, vocab=vocab,
        temperature=draws.temperature, uniforms=draws.uniforms, top_k=rules.top_k,
        top_p=rules.top_p, min_p=rules.min_p, ids=ids.view,
    )  # fmt: skip
    ids.assert_rest_untouched()
    torch.testing.assert_close(source.view, logits, rtol=0, atol=0, equal_nan=True)
    return ids.view.tolist()


def shares_of(runtime: Runtime, logits: Tensor, draws: Draws, gap: int = 0) -> Tensor:
    rows, vocab = logits.shape
    source, shares = Poisoned(rows, vocab, gap=gap), Poisoned(rows, vocab, gap=2 * gap)
    source.view.copy_(logits)
    rules = draws.truncation
    call(
        runtime, "probabilities", logits=source.view, logits_stride=source.stride, rows=rows,
        vocab=vocab, temperature=draws.temperature, top_k=rules.top_k, top_p=rules.top_p,
        min_p=rules.min_p, shares=shares.view, shares_stride=shares.stride,
    )  # fmt: skip
    shares.assert_rest_untouched()
    torch.testing.assert_close(source.view, logits, rtol=0, atol=0, equal_nan=True)
    return shares.view.clone()


@cache
def definition(vocab: int) -> tuple[Tensor, list[dict[int, tuple[float, float]]]]:
    """Return logits per rule, and the interval of each token in their distributions."""
    logits = normal(len(RULES), vocab, seed=vocab) * 3
    rows = []
    for row, rule in zip(logits.tolist(), RULES, strict=True):
        expected, reached, ends = distribution(row, SamplingParams(**rule)), 0.0, {}
        for token in sorted(expected):
            ends[token] = (reached, reached + expected[token])
            reached += expected[token]
        rows.append(ends)
    return logits, rows


@each_runtime
@pytest.mark.parametrize("vocab", [1, 2, 33, 1500])
def test_matches_the_definition(runtime: Runtime, vocab: int) -> None:
    logits, rows = definition(vocab)
    middle = torch.rand(len(RULES), generator=torch.Generator().manual_seed(vocab)).tolist()
    for uniforms in ([0.0] * len(RULES), middle, [U_NEAR_1] * len(RULES)):
        found = draw(runtime, logits, draws_of(RULES, uniforms, vocab), gap=3)
        for token, ends, rule, u in zip(found, rows, RULES, uniforms, strict=True):
            low, high = ends[token]
            assert low - MARGIN <= u <= high + MARGIN, rule


@each_runtime
@pytest.mark.parametrize("vocab", [1, 2, 33, 1500])
def test_shares_match_the_definition(runtime: Runtime, vocab: int) -> None:
    logits, rows = definition(vocab)
    found = shares_of(runtime, logits, draws_of(RULES, [0.0] * len(RULES), vocab), gap=3)
    for shares, ends, rule in zip(found.double(), rows, RULES, strict=True):
        expected = torch.zeros(vocab, dtype=torch.float64)
        for token, (low, high) in ends.items():
            expected[token] = high - low
        assert (shares - expected).abs().max() < MARGIN, rule
        assert shares.sum().item() == pytest.approx(1, abs=MARGIN)


@each_runtime
@pytest.mark.parametrize("vocab", [3, 1025, 20_011])
def test_shares_are_those_of_the_draws(runtime: Runtime, vocab: int) -> None:
    """To the token, including first and last ones."""
    rules = [*RULES, {"top_k": 5000, "top_p": 0.9}, {"top_p": 0.9999}]
    middle = torch.rand(len(rules), generator=torch.Generator().manual_seed(3)).tolist()
    for logits in (normal(len(rules), vocab, seed=1) * 3, normal(len(rules), vocab, seed=2) / 50):
        shares = shares_of(runtime, logits, draws_of(rules, middle, vocab))
        reference = reference_shares(*_asked(logits, draws_of(rules, middle, vocab)))
        torch.testing.assert_close(shares, reference, rtol=1e-4, atol=1e-7)
        assert torch.equal(shares > TINY, reference > TINY)
        mass = shares.cumsum(-1, dtype=torch.float64)
        for uniforms in ([0.0] * len(rules), middle, [U_NEAR_1] * len(rules)):
            found = torch.tensor(draw(runtime, logits, draws_of(rules, uniforms, vocab)))[:, None]
            high = mass.gather(1, found)[:, 0]
            low = high - shares.gather(1, found)[:, 0]
            u = torch.tensor(uniforms, dtype=torch.float64)
            assert bool(((low - MARGIN <= u) & (u <= high + MARGIN)).all())
            assert bool((shares.gather(1, found) > 0).all())


def _asked(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Truncation]:
    return logits, draws.temperature, draws.truncation


@each_runtime
@pytest.mark.parametrize("vocab", [1023, 1025, 20_011, 40_000])
def test_matches_the_reference(runtime: Runtime, vocab: int) -> None:
    """To the token: no number is so near a limit that rounding would matter."""
    rules = [*RULES, {"top_k": 5000, "top_p": 0.9}, {"top_k": vocab - 1}, {"top_p": 0.9999}]
    for logits in (normal(len(rules), vocab, seed=1) * 3, normal(len(rules), vocab, seed=2) / 50):
        middle = torch.rand(len(rules), generator=torch.Generator().manual_seed(3)).tolist()
        for rows in (slice(0, None), slice(5, 6), slice(-2, -1)):
            draws = draws_of(rules[rows], middle[rows], vocab)
            assert draw(runtime, logits[rows], draws) == reference(logits[rows], draws).tolist()


@each_runtime
def test_a_row_does_not_depend_on_other_rows_or_threads(runtime: Runtime) -> None:
    """Nor on its place or the number of threads that share it: the same tokens at the limits of the
    others, and the same bits of probabilities."""
    for vocab in (700, 17_000):
        logits = normal(len(RULES), vocab, seed=5) / 4
        uniforms = [(3 * i + 1) / 64 for i in range(len(RULES))]
        alone, everything = Runtime(runtime.isa, 1), draws_of(RULES, uniforms, vocab)
        expected, shares = draw(alone, logits, everything), shares_of(alone, logits, everything)
        rows = list(range(len(RULES)))
        for some in (rows, rows[::-1], rows[3:6], rows[::5], *([row] for row in rows)):
            draws = draws_of([RULES[i] for i in some], [uniforms[i] for i in some], vocab)
            assert draw(runtime, logits[some], draws) == [expected[i] for i in some]
            assert torch.equal(shares_of(runtime, logits[some], draws), shares[some])


@each_runtime
@pytest.mark.parametrize("vocab", [40, 2500, 20_000])
def test_lower_ids_of_equal_tokens_stay(runtime: Runtime, vocab: int) -> None:
    logits = torch.zeros(1, vocab)
    logits[0, vocab // 2] = 1.0
    kept = {"top_k": 5, "top_p": (math.e + 3.5) / (math.e + vocab - 1)}  # four of the equal ones
    for name, value in kept.items():
        shares = shares_of(runtime, logits, draws_of([{name: value}], [0.0], vocab))
        assert shares[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, vocab // 2]
        for u, token in ((0.0, 0), (0.3 / (math.e + 4), 0), (3.5 / (math.e + 4), 3)):
            assert draw(runtime, logits, draws_of([{name: value}], [u], vocab)) == [token]
        assert draw(runtime, logits, draws_of([{name: value}], [U_NEAR_1], vocab)) == [vocab // 2]


@each_runtime
def test_extremes(runtime: Runtime) -> None:
    """Masked tokens, logits at the limits of fp32, temperatures at the allowed limits."""
    largest = torch.finfo(torch.float32).max
    for vocab in (60, 5_000):
        logits = torch.full((4, vocab), -math.inf)
        logits[0, [7, vocab - 9]] = 1.0
        logits[1] = -largest
        logits[1, [7, vocab - 9]] = largest
        logits[2] = 0.0
        logits[2, [7, vocab - 9]] = 1e-30  # larger, but not enough to change a weight
        logits[3, 7] = -largest
        for temperature in (1e-3, 1.0, 100.0):
            for rule in ({}, {"top_k": 2}, {"top_k": vocab - 1}, {"top_p": 0.99}, {"min_p": 0.5}):
                rules = [{**rule, "temperature": temperature}] * 4
                first = draw(runtime, logits, draws_of(rules, [0.0] * 4, vocab))
                last = draw(runtime, logits, draws_of(rules, [U_NEAR_1] * 4, vocab))
                assert first[0] == first[1] == first[3] == last[3] == 7
                assert last[:2] == [vocab - 9] * 2
                if rule == {"top_k": 2}:
                    assert [first[2], last[2]] == [7, vocab - 9]


@each_runtime
def test_rows_without_a_distribution_affect_no_other_row(runtime: Runtime) -> None:
    for vocab in (1, 50, 5_000):
        logits = normal(6, vocab)
        logits[0] = math.nan
        logits[1, vocab // 3] = math.nan
        logits[2, vocab // 2] = math.inf
        logits[3] = -math.inf
        logits[4, :] = math.inf
        for rule in RULES:
            found = draw(runtime, logits, draws_of([rule] * 6, [0.7] * 6, vocab))
            assert all(0 <= token < vocab for token in found)
            alone = draw(runtime, logits[5:], draws_of([rule], [0.7], vocab))
            assert found[5:] == alone
            shares = shares_of(runtime, logits, draws_of([rule] * 6, [0.7] * 6, vocab))
            assert torch.equal(
                shares[5:], shares_of(runtime, logits[5:], draws_of([rule], [0.7], vocab))
            )


def test_no_rows() -> None:
    runtime = runtimes()[0].values[0]
    assert draw(runtime, torch.empty(0, 10), draws_of([], [], 10)) == []
    assert shares_of(runtime, torch.empty(0, 10), draws_of([], [], 10)).shape == (0, 10)


def test_only_typical_rows_are_sampled_by_torch() -> None:
    """A row with typical_p is sampled by torch, and the other rows are not."""
    ops, vocab = native_ops(Native(2)), 3000
    logits = normal(8, vocab, seed=9) * 2
    draws = draws_of([{"top_p": 0.9}, {"top_k": 50}] * 4, [i / 8 for i in range(8)], vocab)
    typical = torch.tensor([1.0, 0.5, 1.0, 1.0, 0.9, 1.0, 0.2, 1.0], dtype=torch.float64)
    rules = draws.truncation
    mixed = Draws(
        draws.temperature, draws.uniforms, Truncation(rules.top_k, rules.top_p, None, typical)
    )
    found = ops.draw(logits, mixed)
    plain = typical == 1
    assert torch.equal(found[plain], ops.draw(logits, draws)[plain])
    assert torch.equal(found[~plain], reference(logits, mixed)[~plain])
    assert not torch.equal(found, ops.draw(logits, draws))
    shares = ops.probabilities(*_asked(logits, mixed))
    assert torch.equal(shares[plain], ops.probabilities(*_asked(logits, draws))[plain])
    assert torch.equal(shares[~plain], reference_shares(*_asked(logits, mixed))[~plain])
