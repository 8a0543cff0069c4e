from __future__ import annotations

import pytest

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import FinishReason, Request, derive_seed, finish_reason


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
    # The first output of the published generator for state 0.
    assert derive_seed(0, 1) == 0xE220A8397B1DCDAF - 2**64


EOS, STOP = 7, 5


def request(output: list[int], max_length: int = 10, min_tokens: int = 0) -> Request:
    params = SamplingParams(stop_token_ids=(STOP,), min_tokens=min_tokens)
    return Request("r", 0, params, [1, 1, *output], 2, max_length, frozenset([EOS, STOP]), 0, 0.0)


@pytest.mark.parametrize(
    ("output", "max_length", "min_tokens", "reason"),
    [
        ([1], 10, 0, None),
        ([1, EOS], 10, 0, FinishReason.STOP),
        ([1, STOP], 10, 0, FinishReason.STOP),
        ([1, 1], 4, 0, FinishReason.LENGTH),
        ([1, EOS], 4, 0, FinishReason.STOP),  # both: the model chose to stop
        ([EOS], 10, 2, None),
        ([1, EOS], 10, 2, FinishReason.STOP),
        ([EOS], 3, 1, FinishReason.STOP),
    ],
)
def test_why_an_output_ends(
    output: list[int], max_length: int, min_tokens: int, reason: FinishReason | None
) -> None:
    assert finish_reason(request(output, max_length, min_tokens), output[-1]) is reason


def test_a_stop_id_is_named_and_eos_is_not() -> None:
    stopped, ended = request([STOP]), request([EOS])
    finish_reason(stopped, STOP)
    finish_reason(ended, EOS)
    assert (stopped.stop_reason, ended.stop_reason) == (STOP, None)
