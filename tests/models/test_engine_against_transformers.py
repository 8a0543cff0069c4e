"""The whole engine beside transformers on the bundled models: batched, cached, scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.optional_native import needs_native
from transformers import AutoModelForCausalLM

import kvik
from kvik import LLM, SamplingParams

BUNDLED = Path(kvik.__file__).parent / "bundled"
PROMPTS = [
    "Once upon a time",
    "One day, the fox said to the lion,",
    "The old king had three daughters. The youngest",
    "A",
    "In the forest there lived a bear and a bird. They were friends. Every day the bird sang, and",
]
NUM_TOKENS = 40


@pytest.mark.parametrize("name", ["stories", "stories-draft"])
@pytest.mark.parametrize(
    ("kernels", "block_size"), [("torch", 8), pytest.param("native", 16, marks=needs_native)]
)
def test_greedy_tokens_and_log_probabilities_are_equal(
    name: str, kernels: str, block_size: int
) -> None:
    folder = BUNDLED / name
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    common = {"dtype": "float32", "device": "cpu", "threads": 1}
    with LLM(str(folder), kernels=kernels, block_size=block_size, **common) as llm:
        assert llm.resolved.runner.attention_backend == ("cpu" if kernels == "native" else "sdpa")
        outputs = llm.generate(PROMPTS, params)
        scores = llm.score([[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs])
    for output, score in zip(outputs, scores, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0]  # [tokens, vocab]
        first = len(output.prompt_token_ids) - 1
        assert logits[first:-1].argmax(-1).tolist() == output.outputs[0].token_ids
        logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found = torch.tensor([p.logprob for p in score.prompt_logprobs[1:]])
        torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=0)
