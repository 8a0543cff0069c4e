"""How likely is a text? The log probability of each of its tokens, and its perplexity."""

import math

from kvik import LLM

texts = ["Once upon a time there was a king.", "Once upon a king there time was a."]

with LLM() as llm:
    for text, output in zip(texts, llm.score(texts), strict=True):
        # Nothing predicts the first token, so it has no log probability.
        logprobs = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
        perplexity = math.exp(-sum(logprobs) / len(logprobs))
        print(f"perplexity {perplexity:8.1f}: {text}")
