"""Text as it comes, and stopping early."""

from kvik import LLM, SamplingParams

params = SamplingParams(temperature=0.8, max_tokens=200, seed=5)

with LLM() as llm:
    with llm.stream("Once upon a time", params) as stream:
        count = 0
        for delta in stream:
            print(delta.text, end="", flush=True)
            count += len(delta.token_ids)
            if count >= 40:
                break  # leaving the block aborts the request and frees its memory
    print(f"\nstopped after {count} tokens; running requests: {llm.stats().num_running}")
