from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvik.core.types import derive_seed
from kvik.worker.sampling_table import uniform

N = 1 << 16
COUNT = np.arange(N)
ZERO = np.zeros(N, np.uint64)

# Each is a sequence that a weak hash would give a pattern.
SEQUENCES = {
    "consecutive positions": lambda: uniform(ZERO, COUNT),
    "consecutive positions, large seed": lambda: uniform(ZERO + np.uint64(2**63 + 12345), COUNT),
    "consecutive seeds": lambda: uniform(COUNT.astype(np.uint64), np.full(N, 17)),
    "seeds that differ in their highest bits": lambda: uniform(
        COUNT.astype(np.uint64) << np.uint64(48), np.full(N, 3)
    ),
    "seed and position move together": lambda: uniform(COUNT.astype(np.uint64), COUNT),
    "seed and position move apart": lambda: uniform(COUNT.astype(np.uint64), N - COUNT),
    "consecutive streams": lambda: np.concatenate(
        [uniform(ZERO[:64], COUNT[:64], stream) for stream in range(N // 64)]
    ),
    "siblings": lambda: uniform(
        np.array([derive_seed(5, i) % 2**64 for i in range(N)], np.uint64), np.full(N, 9)
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_is_uniform_and_uncorrelated(name: str) -> None:
    u = SEQUENCES[name]()
    assert u.dtype == np.float64 and u.shape == (N,)
    assert u.min() >= 0.0 and u.max() < 1.0
    assert stats.chisquare(np.bincount((u * 256).astype(int), minlength=256)).pvalue > 1e-3
    for lag in (1, 2, 3, 64):
        correlation = np.corrcoef(u[:-lag], u[lag:])[0, 1]
        assert abs(correlation) * np.sqrt(N) < 3.5
    pairs = (u[0::2] * 32).astype(int) * 32 + (u[1::2] * 32).astype(int)
    assert stats.chisquare(np.bincount(pairs, minlength=1024)).pvalue > 1e-3
    low_bits = ((u * 2**53).astype(np.uint64) % np.uint64(64)).astype(int)
    assert stats.chisquare(np.bincount(low_bits, minlength=64)).pvalue > 1e-3
    assert len(np.unique(u)) == N


def test_streams_and_seeds_are_independent_of_each_other() -> None:
    base = uniform(ZERO, COUNT)
    for other in (uniform(ZERO, COUNT, 1), uniform(ZERO + np.uint64(1), COUNT)):
        assert abs(np.corrcoef(base, other)[0, 1]) * np.sqrt(N) < 3.5


def test_depends_on_its_arguments_alone() -> None:
    seeds, positions = COUNT[:50].astype(np.uint64), COUNT[:50] * 7
    together = uniform(seeds, positions)
    for i in (0, 13, 49):
        assert uniform(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    assert np.array_equal(uniform(seeds[::-1], positions[::-1]), together[::-1])


def test_random_numbers_never_change() -> None:
    """Other numbers would change the text of every seeded request."""
    found = uniform(np.array([0, 0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 0, 5]))
    expected = [0.13870941014555427, 0.2691303195904541, 0.6935121390102292, 0.9277262799198309]
    assert found.tolist() == expected
