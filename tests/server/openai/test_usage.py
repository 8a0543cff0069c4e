"""Usage adds up over the prompts of a request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvik.core.types import RequestSpeculation
from kvik.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from kvik.server.openai.answers import usage_of


def output(
    prompt: int,
    lengths: list[int],
    guessed: Sequence[RequestSpeculation | None] | None = None,
    cached: int = 0,
) -> RequestOutput:
    guessed = [None] * len(lengths) if guessed is None else guessed
    completions = [
        CompletionOutput(i, "", [1] * n, "stop", speculation=one)
        for i, (n, one) in enumerate(zip(lengths, guessed, strict=True))
    ]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * prompt,
        outputs=completions,
        num_cached_tokens=cached,
        num_preemptions=0,
        prompt_logprobs=None,
        metrics=RequestMetrics(0.0, 0.0, 0.0, 1.0),
    )


def test_a_prompt_counts_once_and_each_choice_by_itself() -> None:
    usage = usage_of([output(5, [2, 3], cached=4), output(7, [1, 1])])
    assert msgspec.to_builtins(usage) == {
        "prompt_tokens": 12,
        "completion_tokens": 7,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def guessed(*rows: tuple[int, int], seconds: float = 0.0, plain: float = 0.0) -> RequestSpeculation:
    """Rows of (drafts, right)."""
    found = RequestSpeculation(seconds=seconds, plain_seconds=plain)
    for drafts, right in rows:
        found.drafts.add(drafts, right)
    return found


def test_what_speculation_guessed() -> None:
    one = guessed((3, 2), (4, 3), (1, 0), seconds=2.0, plain=3.0)
    other = guessed((2, 0), seconds=1.0, plain=0.75)
    usage = usage_of([output(1, [9, 2], [one, guessed()]), output(1, [9], [other])])
    assert msgspec.to_builtins(usage.completion_tokens_details) == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 5,
    }
    assert msgspec.to_builtins(usage.speculation) == {
        "checks": 4,
        "drafted_tokens": 10,
        "accepted_tokens": 5,
        "drafted_per_position": [4, 3, 2, 1],
        "accepted_per_position": [2, 2, 1, 0],
        "mean_accepted_length": 2.25,
        "speedup": 1.25,
    }
    assert one.drafts.at == [3, 2, 2, 1]  # as it was


def test_an_engine_that_guessed_nothing_yet_says_so() -> None:
    usage = msgspec.to_builtins(usage_of([output(1, [9], [guessed()])]))
    assert "completion_tokens_details" not in usage
    assert (usage["speculation"]["checks"], usage["speculation"]["drafted_per_position"]) == (0, [])
    assert usage["speculation"]["mean_accepted_length"] is None
    assert usage["speculation"]["speedup"] is None
