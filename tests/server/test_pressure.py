"""What is given up under pressure."""

from __future__ import annotations

import pytest

from kvik.core.sampling_params import SamplingParams
from kvik.server.admission import Degradation, pressure


@pytest.mark.parametrize(
    ("fill", "kv", "waiting", "expected"),
    [(0.0, 1.0, False, 0.0), (0.0, 1.0, True, 1.0), (0.6, 0.2, True, 0.6), (0.1, 0.9, True, 0.9)],
)
def test_a_full_cache_presses_only_those_who_wait_for_it(fill, kv, waiting, expected):
    assert pressure(fill, kv, waiting=waiting) == expected


def test_nothing_changes_without_an_operators_word_or_without_pressure():
    params = SamplingParams(max_tokens=None)
    assert Degradation().apply(params, 1.0) is params
    assert Degradation(8, threshold=0.5).apply(params, 0.4) is params


@pytest.mark.parametrize(
    ("asked", "least", "given"),
    [(None, 0, 8), (100, 0, 8), (8, 0, 8), (3, 0, 3), (100, 50, 50), (None, 9, 9)],
)
def test_the_cap_never_goes_below_what_must_come(asked, least, given):
    params = SamplingParams(max_tokens=asked, min_tokens=least)
    assert Degradation(8).apply(params, 0.8).max_tokens == given
