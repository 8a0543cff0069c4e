"""Figures of a request as JSON."""

from __future__ import annotations

from kvik.cli.report import as_json
from kvik.core.types import DraftCounts, RequestSpeculation
from kvik.engine.output import CompletionOutput, RequestMetrics, RequestOutput

GUESSED = RequestSpeculation(DraftCounts(4, 10, 6, [4, 3, 3], [3, 2, 1]), 2.0, 3.0)


def output(*guessed: RequestSpeculation | None) -> RequestOutput:
    done = [CompletionOutput(i, "", [1, 2], "stop", speculation=g) for i, g in enumerate(guessed)]
    return RequestOutput("r", None, [1], done, 0, 0, None, RequestMetrics(0.0, 0.0, 1.0, 2.0))


def test_json_tells_them_of_each_completion() -> None:
    first, second, third = as_json(output(GUESSED, RequestSpeculation(), None), "m")["completions"]
    assert first["speculation"] == {
        "checks": 4,
        "drafted_tokens": 10,
        "accepted_tokens": 6,
        "drafted_per_position": [4, 3, 3],
        "accepted_per_position": [3, 2, 1],
        "mean_accepted_length": 2.5,
        "speedup": 1.5,
    }
    assert second["speculation"]["mean_accepted_length"] is second["speculation"]["speedup"] is None
    assert third["speculation"] is None
