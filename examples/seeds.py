"""A seeded request gives the same text whatever else is in its batch."""

from kvik import LLM, SamplingParams


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=20, seed=seed)


with LLM() as llm:
    (alone,) = llm.generate("The old woman", seeded(1))
    prompts = ["A dog", "The old woman", "The old woman", "Far away"]
    _, same, other, _ = llm.generate(prompts, [seeded(9), seeded(1), seeded(2), seeded(9)])
    print(f"seed 1, alone:      {alone.text!r}")
    print(f"seed 1, in a batch: {same.text!r}")
    print(f"seed 2:             {other.text!r}")
    assert alone.text == same.text != other.text
