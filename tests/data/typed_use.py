"""A caller of the public API, which mypy checks and nothing runs."""

import kvik
from kvik import LLM, RequestOutput, SamplingParams, TextDelta, server

params = SamplingParams(
    stop=["a"],
    stop_token_ids=[1],
    allowed_token_ids=[1],
    bad_words=["a", [1, 2]],
    dry_sequence_breakers=["a"],
    logit_bias={1: 2.0},
)
one_stop: SamplingParams = SamplingParams(stop="a").with_changes(seed=2)
SamplingParams(stop=5)  # type: ignore[arg-type]

with LLM() as llm:
    outputs: list[RequestOutput] = llm.generate(["a", "b"], [params, one_stop])
    deltas: list[TextDelta] = list(llm.stream([1, 2], params))

print(kvik.Missing)  # type: ignore[attr-defined]
print(server.missing)  # type: ignore[attr-defined]
