"""Questions that make no sense, each refused by the name of its field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvik.errors import ConfigError
from kvik.planner.families import read_shape
from kvik.planner.question import Question, check_question, context_of, load_of, request_of

SHAPE = read_shape("")  # the bundled model: 8 heads, 6 layers, a context of 1024


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"context": 0}, "context", "must be an integer of at least 1, not 0"),
        ({"context": 1025}, "context", "must be at most the model's 1024 tokens, not 1025"),
        ({"batch": 0}, "batch", r"must be an integer in \[1, 65536\], not 0"),
        ({"tp": 3}, "tp", "must divide the 8 query heads, not 3"),
        ({"pp": 7}, "pp", "must be at most the 6 layers, not 7"),
        ({"utilization": 0.0}, "memory_utilization", r"must be a number in \[0.01, 1\], not 0"),
        ({"price": -1.0}, "price", "must be a number in"),
        ({"price": float("nan")}, "price", "must be a number in"),
        ({"draft_cost": -0.1}, "draft_cost", "must be a number in"),
        ({"output": 0}, "output_tokens", r"must be in \[1, 1023\]"),
        ({"output": 1024}, "output_tokens", "share the context of 1024"),
        ({"load": "much"}, "load", "must be tokens per day"),
    ],
)
def test_refused(change: dict[str, Any], field: str, message: str) -> None:
    check_question(Question(), SHAPE)
    with pytest.raises(ConfigError, match=message) as caught:
        check_question(replace(Question(), **change), SHAPE)
    assert caught.value.field == field


def test_gaps_are_filled() -> None:
    assert context_of(Question(), SHAPE) == 1024
    assert context_of(Question(), replace(SHAPE, max_context=131_072)) == 8192
    assert context_of(Question(context=77), SHAPE) == 77
    assert request_of(Question(), 1024) == (768, 256)
    assert request_of(Question(output=24), 1024) == (1000, 24)
    assert load_of(Question(), 1024) is None
    load = load_of(Question(load="1/s"), 1024)
    assert load is not None and (load.requests, load.prompt, load.output) == (86_400, 768, 256)
