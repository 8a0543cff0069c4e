"""Usage from the engine's counts."""

from __future__ import annotations

import pytest

from kvik.core.types import Pin, PromptUse
from kvik.server.anthropic import FIVE_MINUTES, HOUR, UsageMeter


@pytest.mark.parametrize(
    ("num_prompt", "pins", "read", "written", "hour"),
    [
        (100, [(70, FIVE_MINUTES)], 0, 64, 0),
        (100, [(70, HOUR)], 0, 64, 64),
        (100, [(40, HOUR), (70, FIVE_MINUTES)], 0, 64, 32),
        (100, [(40, HOUR), (70, FIVE_MINUTES)], 16, 48, 16),
        (100, [(40, HOUR), (70, FIVE_MINUTES)], 48, 16, 0),  # what is for an hour was there
        (100, [(40, FIVE_MINUTES), (70, HOUR)], 0, 64, 64),
        (100, [(40, FIVE_MINUTES), (90, HOUR)], 0, 32, 0),  # no room for the longer one
        (96, [(96, HOUR)], 0, 96, 96),
        (96, [(96, HOUR)], 80, 16, 16),  # whose last token is computed anew each time
        (100, [(70, HOUR)], 64, 0, 0),
    ],
)
def test_how_long_what_was_written_stays(
    num_prompt: int, pins: list[tuple[int, float]], read: int, written: int, hour: int
) -> None:
    meter = UsageMeter(num_prompt, [Pin(*pin) for pin in pins], 16)
    usage = meter.usage(PromptUse(read, written), 3)
    assert usage.input_tokens == num_prompt - read - written
    assert usage.cache_read_input_tokens == read
    assert usage.cache_creation_input_tokens == written
    assert usage.cache_creation is not None
    assert usage.cache_creation.ephemeral_1h_input_tokens == hour
    assert usage.cache_creation.ephemeral_5m_input_tokens == written - hour
    assert usage.output_tokens == 3


def test_what_is_not_known_is_not_told() -> None:
    usage = UsageMeter(100, [], 16).usage(None, 0)
    assert usage.input_tokens == 100
    assert usage.cache_read_input_tokens is usage.cache_creation_input_tokens is None
