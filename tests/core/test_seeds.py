from __future__ import annotations

from kvik.core.types import derive_seed


def test_index_zero_keeps_the_seed() -> None:
    assert derive_seed(17, 0) == 17


def test_seeds_are_distinct_int64() -> None:
    seeds = {
        derive_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(200)
    }
    assert len(seeds) == 5 * 200
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seeds) < 0 < max(seeds)


def test_one_round_of_splitmix64() -> None:
    # the first output of the published generator for the state 0
    assert derive_seed(0, 1) == 0xE220A8397B1DCDAF - 2**64
