"""Many prompts at once: they share the engine's steps, so a batch is much faster than a loop."""

import time

from kvik import LLM, SamplingParams

prompts = [f"The {animal} went to the" for animal in ("fox", "bear", "hen", "king", "mouse")]
params = SamplingParams(temperature=0.8, max_tokens=30, seed=1)

with LLM() as llm:
    started = time.monotonic()
    outputs = llm.generate(prompts, params)
    seconds = time.monotonic() - started
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{prompt}{output.text!r}")
    tokens = sum(output.num_output_tokens for output in outputs)
    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")
