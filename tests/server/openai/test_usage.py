"""Usage adds up over the prompts of a request."""

from __future__ import annotations

import msgspec

from kvik.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from kvik.server.openai.usage import usage_of, usage_so_far


def output(prompt: int, lengths: list[int], **counts: int) -> RequestOutput:
    completions = [CompletionOutput(i, "", [1] * n, "stop") for i, n in enumerate(lengths)]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * prompt,
        completions=completions,
        num_cached_tokens=counts.get("cached", 0),
        num_preemptions=0,
        prompt_logprobs=None,
        metrics=RequestMetrics(0.0, 0.0, 0.0, 1.0),
        num_drafted_tokens=counts.get("drafted", 0),
        num_accepted_tokens=counts.get("accepted", 0),
    )


def test_a_prompt_counts_once_and_each_choice_by_itself() -> None:
    usage = usage_of([output(5, [2, 3], cached=4), output(7, [1, 1])])
    assert msgspec.to_builtins(usage) == {
        "prompt_tokens": 12,
        "completion_tokens": 7,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_what_speculation_guessed() -> None:
    usage = usage_of([output(1, [9], drafted=8, accepted=5), output(1, [9], drafted=2)])
    assert msgspec.to_builtins(usage.completion_tokens_details) == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 5,
    }


def test_in_the_middle_of_a_stream() -> None:
    assert msgspec.to_builtins(usage_so_far(3, 4)) == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
    }
