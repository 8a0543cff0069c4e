from __future__ import annotations

import pytest

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import FinishReason, Request, finish_reason

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
