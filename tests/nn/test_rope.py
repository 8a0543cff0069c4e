"""Frequencies of rotary positions, compared with their definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvik.kernels.reference.ops import REFERENCE
from kvik.nn.rope import Rope, attention_factor, frequencies
from kvik.spec.rope import RopeSpec

DIM = 64
CPU = torch.device("cpu")


def plain(theta: float = 10000.0) -> torch.Tensor:
    return torch.tensor([theta ** (-2 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64)


def test_default_is_the_papers() -> None:
    torch.testing.assert_close(frequencies(RopeSpec(theta=5e5), DIM, 4096), plain(5e5))


def test_linear_slows_every_pair() -> None:
    spec = RopeSpec("linear", factor=4.0, original_max_position=2048)
    torch.testing.assert_close(frequencies(spec, DIM, 8192), plain() / 4)


def test_dynamic_is_unscaled_up_to_its_original_context() -> None:
    spec = RopeSpec("dynamic", factor=2.0, original_max_position=2048)
    for length in (1, 100, 2048):
        torch.testing.assert_close(frequencies(spec, DIM, length), plain())


def test_dynamic_keeps_the_fastest_pair_and_stretches_the_slowest() -> None:
    spec = RopeSpec("dynamic", factor=2.0, original_max_position=2048)
    found = frequencies(spec, DIM, 8192)
    stretch = 2.0 * 8192 / 2048 - 1.0
    assert float(found[0]) == 1.0
    assert float(plain()[-1] / found[-1]) == pytest.approx(stretch, rel=1e-4)
    assert frequencies(spec, 2, 8192).tolist() == [1.0]


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    spec = RopeSpec(
        "llama3",
        theta=5e5,
        factor=8.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    found, before = frequencies(spec, DIM, 131072), plain(5e5)
    wavelength = 2 * math.pi / before
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any() and (~short & ~long).any()
    torch.testing.assert_close(found[short], before[short])
    torch.testing.assert_close(found[long], before[long] / 8)
    between = found[~short & ~long] / before[~short & ~long]
    assert ((between > 1 / 8) & (between < 1)).all()


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    spec = RopeSpec("yarn", factor=4.0, original_max_position=2048)
    found, before = frequencies(spec, DIM, 8192), plain()
    turns = 2048 * before / (2 * math.pi)
    torch.testing.assert_close(found[turns > 64], before[turns > 64])
    torch.testing.assert_close(found[turns < 0.5], before[turns < 0.5] / 4)
    assert attention_factor(spec) == pytest.approx(0.1 * math.log(4.0) + 1.0)
    rope = Rope(REFERENCE, spec, DIM, 8192, CPU)
    rotation = rope.at(torch.tensor([0, 5]))
    assert rotation.dtype == torch.float32 and rotation.shape == (2, DIM)
    cos, sin = rotation.chunk(2, dim=-1)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, attention_factor(spec) ** 2))


def test_longrope_has_factors_of_its_own_beyond_the_original_context() -> None:
    spec = RopeSpec(
        "longrope",
        factor=4.0,
        original_max_position=2048,
        short_factors=(2.0,) * (DIM // 2),
        long_factors=(8.0,) * (DIM // 2),
    )
    torch.testing.assert_close(frequencies(spec, DIM, 2048), plain() / 2)
    torch.testing.assert_close(frequencies(spec, DIM, 2049), plain() / 8)
    expected = math.sqrt(1 + math.log(4.0) / math.log(2048))
    assert attention_factor(spec) == pytest.approx(expected)
    assert attention_factor(replace(spec, attention_factor=1.5)) == 1.5


def test_a_part_of_a_head_is_rotated_and_the_rest_is_kept() -> None:
    """For both orders of pairs in checkpoints."""
    x = torch.randn(1, 1, 16)
    for interleaved in (False, True):
        spec = RopeSpec(fraction=0.5, interleaved=interleaved)
        rows = spec.rows(16)
        assert rows is not None and sorted(rows) == list(range(16))
        rotation = Rope(REFERENCE, spec, 16, 8, CPU).at(torch.tensor([5]))
        turned, _ = REFERENCE.rotary(x[..., list(rows)], x[..., list(rows)], rotation)
        found = torch.empty(16)
        found[list(rows)] = turned[0, 0]
        angles = 5 * plain_of(8)
        pairs = [(2 * i, 2 * i + 1) if interleaved else (i, 4 + i) for i in range(4)]
        expected = x[0, 0].clone()
        for (a, b), angle in zip(pairs, angles.tolist(), strict=True):
            one, other = float(x[0, 0, a]), float(x[0, 0, b])
            expected[a] = one * math.cos(angle) - other * math.sin(angle)
            expected[b] = other * math.cos(angle) + one * math.sin(angle)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert RopeSpec().rows(16) is None


def plain_of(width: int) -> torch.Tensor:
    return torch.tensor([10000.0 ** (-2 * i / width) for i in range(width // 2)])


YARN = RopeSpec("yarn", 1e4, 32.0, 4096)
LLAMA3 = RopeSpec("llama3", 5e5, 8.0, 8192)
LONGROPE = RopeSpec(
    "longrope",
    1e4,
    32.0,
    4096,
    short_factors=(1.0,) * 48,
    long_factors=tuple(1.0 + i / 0.75 for i in range(48)),
)
QUERIES = RopeSpec("yarn", 1e6, 16.0, 16_384, mscale=1.0, mscale_all_dim=1.0, query_beta=0.1)


@pytest.mark.parametrize(
    ("spec", "dim", "positions", "of_queries"),
    [
        (RopeSpec(), DIM, 1000, False),  # fewer than a table of remainders may have
        (RopeSpec(theta=5e6), 128, 1 << 20, False),
        (RopeSpec(theta=1e4), 128, 4_000_000, False),
        (LLAMA3, 128, 4_000_000, False),
        (YARN, 128, 131_072, False),
        (YARN, 128, 4_000_000, False),
        (LONGROPE, 96, 131_072, False),
        (LONGROPE, 96, 1 << 20, False),
        (QUERIES, 128, 4_000_000, True),
        (replace(QUERIES, original_max_position=48), 8, 5000, True),  # tables of 16 remainders
        (RopeSpec(theta=1e4), 4, 1 << 30, False),
    ],
)
def test_cosines_and_sines_are_right_at_every_position(
    spec: RopeSpec, dim: int, positions: int, of_queries: bool
) -> None:
    """To a relative error of 1e-6, although no table has a row per position."""
    rope = Rope(REFERENCE, spec, dim, positions, CPU, of_queries=of_queries)
    assert len(rope.high) + len(rope.low) <= positions / 100 or positions <= 5000
    drawn = torch.randint(positions, (2000,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 1, 15, 16, 47, 48, positions // 2, positions - 1])
    at = torch.cat((drawn, ends, positions - 1 - torch.arange(min(positions, 1024))))
    angles = at[:, None].double() * frequencies(spec, dim, positions)
    factor = torch.full_like(at, attention_factor(spec), dtype=torch.float64)
    if of_queries:
        factor *= 1 + spec.query_beta * torch.log1p((at // spec.original_max_position).double())
    expected = torch.cat((angles.cos(), angles.sin()), 1)
    found = rope.at(at).double() / factor[:, None]
    assert (found - expected).abs().max() < 1e-6


def test_a_rotation_has_the_same_bits_in_any_batch() -> None:
    rope, at = Rope(REFERENCE, RopeSpec(), DIM, 4096, CPU), torch.arange(7, 4096, 61)
    together = rope.at(at)
    assert all(torch.equal(rope.at(at[i : i + 1])[0], together[i]) for i in range(len(at)))
    longer = Rope(REFERENCE, RopeSpec(), DIM, 9999, CPU)
    assert torch.equal(longer.at(at), together)


@pytest.mark.parametrize(
    ("spec", "positions", "rows"),
    [
        (RopeSpec(), 512, 1 + 512),
        (RopeSpec(), 131_072, 128 + 1024),
        (RopeSpec(), 1_048_576, 1024 + 1024),
        (RopeSpec(), 1025, 2 + 1024),
        (QUERIES, 131_072, 2 * (128 + 1024)),
        (replace(QUERIES, original_max_position=96), 1000, 1 + 1000 + 32 + 32),
    ],
)
def test_tables_have_the_rows_that_the_memory_plan_counts(
    spec: RopeSpec, positions: int, rows: int
) -> None:
    ropes = [Rope(REFERENCE, spec, 8, positions, CPU)]
    if spec.query_beta:
        ropes.append(Rope(REFERENCE, spec, 8, positions, CPU, of_queries=True))
    assert sum(len(rope.high) + len(rope.low) for rope in ropes) == rows
    assert spec.table_rows(positions) == rows


def test_yarn_rounds_its_range_outwards_unless_truncate_is_false() -> None:
    spec = RopeSpec("yarn", factor=4.0, original_max_position=2048)
    rounded = frequencies(spec, DIM, 8192)
    exact = frequencies(replace(spec, truncate=False), DIM, 8192)
    wavelength = 2048 / (2 * math.pi)
    fast, slow = (DIM * math.log(wavelength / t) / (2 * math.log(1e4)) for t in (32, 1))
    for found, low, high in (
        (rounded, math.floor(fast), math.ceil(slow)),
        (exact, fast, slow),
    ):
        share = torch.tensor([min(max((i - low) / (high - low), 0), 1) for i in range(DIM // 2)])
        torch.testing.assert_close(found, plain() * (1 - share) + plain() / 4 * share)


def test_rotation_only_depends_on_the_distance() -> None:
    rope = Rope(REFERENCE, RopeSpec(), DIM, 4096, CPU)
    q, k = torch.randn(2, 1, 1, DIM, generator=torch.Generator().manual_seed(0))

    def product(i: int, j: int) -> float:
        turned_q, _ = REFERENCE.rotary(q.clone(), k.clone(), rope.at(torch.tensor([i])))
        _, turned_k = REFERENCE.rotary(q.clone(), k.clone(), rope.at(torch.tensor([j])))
        return float((turned_q * turned_k).sum())

    assert product(7, 3) == pytest.approx(product(1007, 1003), abs=1e-2)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)
